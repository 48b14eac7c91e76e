#include "bucket.h"

#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "../comm/comm_hook.h"
#include "../errors.h"
#include "device_stream.h"
#include "sparse_rows.h"

namespace ddpx {
namespace {

// torch keeps only the text of an error in a Python callback of a future. The text begins so.
constexpr std::string_view kOfCallback = "Got the following error when running the callback: ";

// To be called in a catch block. `what`: the text of the error. Throws the error as it is, unless a
// callback has raised it.
[[noreturn]] void raise_of_hook(std::string_view what) {
  if (what.starts_with(kOfCallback)) {
    throw HookError(std::string(what), /*may_be_of_call=*/true);
  }
  throw;
}

}  // namespace

void Bucket::prepare_launch() {
  wait_for_streams();
  add_stream();  // after an abort, wait_for_streams() waits for the gradients again
}

void Bucket::launch(Collective& collective) {
  RECORD_FUNCTION("ddpx::launch", {});
  if (rows().defined()) {
    row_values_ = values_at_rows(buffer(), rows());
  }
  const auto& sent = row_values_.defined() ? row_values_ : buffer();
  // Backends sum real numbers. A complex sum is the sum of its parts.
  const auto real = !sent.is_sparse() && sent.is_complex() ? at::view_as_real(sent) : sent;
  auto work = collective.all_reduce_sum(real);
  auto sum = collective.sum_of(*work);
  in_flight_ = InFlightReduction{std::move(work), std::move(sum), nullptr};
}

void Bucket::wait(Collective& collective) {
  RECORD_FUNCTION("ddpx::wait", {});
  // Dropped even if the wait throws: a work is waited for once.
  const auto flight = std::exchange(in_flight_, std::nullopt);
  add_stream();
  if (!flight) {
    throw InternalError("waiting for a bucket that was not launched");
  }
  if (flight->hook != nullptr) {
    try {
      collective.wait(*flight->future);
    } catch (const c10::Error& error) {  // since torch 2.15
      raise_of_hook(error.what_without_backtrace());
    } catch (const std::runtime_error& error) {
      raise_of_hook(error.what());
    }
  } else if (flight->future) {
    collective.wait(*flight->future);
  } else {
    collective.wait(*flight->work, device());
  }
  if (flight->hook != nullptr) {
    const auto result = flight->hook->parseHookResult(flight->future->value());
    reduced_ = as_reduced(result, "the communication hook");
    keep_for_current_stream(result);  // the hook may have allocated it on a stream of its own
    return;
  }
  const auto sum = flight->future ? tensor_in(flight->future->value()) : at::Tensor();
  if (row_values_.defined()) {
    const auto sent = std::exchange(row_values_, {});
    reduced_ = sparse_from_rows(flight->future ? sum.view_as(sent) : sent, rows(), buffer());
  } else {
    reduced_ = flight->future ? as_reduced(sum, "the all-reduce of the process group") : buffer();
  }
  if (flight->future) {
    keep_for_current_stream(sum);  // the group may have allocated it on a stream of its own
  } else if (sparse()) {
    keep_for_current_stream(reduced_);  // allocated on the stream of the packing or the launch
  }
}

void Bucket::divide_reduced(const at::Tensor& divisor) {
  const at::NoGradGuard no_grad;
  const auto type = reduced_.scalar_type();
  const bool is_double = type == at::kDouble || type == at::kComplexDouble;
  const auto real_divisor = divisor.to(device(), is_double ? at::kDouble : at::kFloat, true);
  const auto values = sparse() ? reduced_._values() : reduced_;
  const auto real = values.is_complex() ? at::view_as_real(values) : values;
  if (!sparse() && reduced_.is_alias_of(buffer())) {
    real.div_(real_divisor);
    return;
  }
  auto quotient = real.div(real_divisor);
  if (values.is_complex()) {
    quotient = at::view_as_complex(quotient);
  }
  reduced_ = sparse() ? at::_sparse_coo_tensor_unsafe(
                            reduced_._indices(), quotient.to(type), reduced_.sizes())
                            ._coalesced_(reduced_.is_coalesced())
                      : quotient;
}

at::Tensor Bucket::reduced_slot(const Slot& slot) const {
  return reduced_.is_same(buffer()) ? slot.view : part_of(reduced_, slot);
}

void Bucket::free_memory() {
  if (sparse()) {
    return;
  }
  keep_for_streams();
  drop_memory();
  reduced_.reset();
}

void Bucket::keep_for_streams() const {
  if (!buffer().defined()) {
    return;
  }
  streams().keep_alive(buffer());
  if (rows().defined()) {
    streams().keep_alive(rows());
  }
  if (in_flight_ && in_flight_->future) {
    // A hook may write into the buffer behind its collective call, on a stream of its own. The
    // stream of the callback waits for the future.
    in_flight_->future->addCallback(
        [memory = buffer()](c10::ivalue::Future& /*future*/) { keep_for_current_stream(memory); });
  }
}

Bucket Bucket::zeros_like(const std::vector<at::Tensor>& params) const {
  return Bucket(zeros(params));
}

}  // namespace ddpx
