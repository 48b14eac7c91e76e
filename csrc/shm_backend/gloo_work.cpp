#include "gloo_work.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "../shm/error.h"
#include "shm_work.h"

namespace ddpx {
namespace {

using std::chrono::milliseconds;

// Poll interval for a failure of the group.
constexpr auto kSlice = milliseconds(100);

// Grace time after a failure of the group. An operation among live ranks may still complete.
constexpr auto kTimeToComplete = std::chrono::seconds(1);

std::exception_ptr torch_error(shm::Error error) {
  return as_torch_error(std::make_exception_ptr(std::move(error)));
}

// Whether gloo refused the arguments, on this rank alone and before it sent anything. To be called
// in a handler.
bool refuses_arguments() {
  try {
    throw;
  } catch (const c10::DistError&) {
    return false;
  } catch (const c10::Error&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

std::string GlooCall::name_of_rank() const {
  const auto local = group.lock();
  return local ? local->topology().name({rank}) : list_ranks({rank});
}

std::string GlooCall::phase() const {
  return std::string(name) + " through gloo";
}

std::exception_ptr GlooCall::failure() const {
  const auto watched = backend.lock();
  const auto monitor = watched ? watched->monitor() : nullptr;
  if (const auto report = monitor ? monitor->report() : std::nullopt) {
    return torch_error(
        shm::Error(
            shm::ErrorKind::kPeerLost,
            shm::opening(name_of_rank(), phase()) + shm::without_opening(report->text())));
  }
  const auto local = collective ? group.lock() : nullptr;
  const auto failure = local ? local->failure(phase()) : std::nullopt;
  return failure ? torch_error(*failure) : nullptr;
}

std::exception_ptr GlooCall::explain(const std::exception_ptr& error) const {
  const auto said = shm::text_of(error);
  try {
    const auto watched = backend.lock();
    if (const auto monitor = watched ? watched->monitor() : nullptr) {
      monitor->explain_error(said);
    }
  } catch (...) {
    // The detector has raised its report, which failure() reads.
  }
  if (const auto known = failure()) {
    return known;
  }
  const shm::Failure unknown{
      shm::ErrorKind::kPeerLost,
      name_of_rank() + ": " + phase() +
          " failed. Another rank may have died, or may be late: see the output of all ranks. gloo "
          "said: " +
          said,
      rank};
  const auto local = collective ? group.lock() : nullptr;
  return torch_error(
      local ? local->fail(unknown, phase())
            : shm::Error(unknown.kind, shm::opening(name_of_rank(), phase()) + unknown.text));
}

GlooWork::GlooWork(c10::intrusive_ptr<c10d::Work> inner, GlooCall call)
    : Work(call.rank, inner->retrieveOpType()), inner_(std::move(inner)), call_(std::move(call)) {}

bool GlooWork::wait(milliseconds timeout) {
  const auto deadline = timeout == kNoTimeout ? Clock::time_point::max() : Clock::now() + timeout;
  try {
    if (!call_.collective) {
      return inner_->wait(timeout);  // not in slices: gloo treats the end of a wait as a fault
    }
    await_end(deadline);
    return wait_until(deadline);
  } catch (...) {
    if (!inner_->isCompleted() || refuses_arguments()) {
      throw;  // the caller's timeout is over, the group has failed, or the call is invalid
    }
    std::rethrow_exception(call_.explain(std::current_exception()));
  }
}

// Waits for the end of the operation or the deadline. Throws if the group has failed. A lost rank
// alone is no failure, since it may have done its part.
void GlooWork::await_end(Clock::time_point deadline) {
  std::optional<Clock::time_point> grace_end;
  while (!inner_->isCompleted() && Clock::now() < deadline) {
    try {
      wait_until(std::min(deadline, Clock::now() + kSlice));
      return;
    } catch (...) {
      // The slice is over, or gloo has failed. After a failure, gloo throws again in the next wait.
    }
    const auto failure = call_.failure();
    if (!failure) {
      continue;
    }
    grace_end = grace_end.value_or(Clock::now() + kTimeToComplete);
    if (Clock::now() >= *grace_end && !inner_->isCompleted()) {
      std::rethrow_exception(failure);
    }
  }
}

// Throws after the deadline.
bool GlooWork::wait_until(Clock::time_point deadline) {
  if (deadline == Clock::time_point::max()) {
    return inner_->wait(kNoTimeout);
  }
  const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
  return inner_->wait(std::max(left, milliseconds(1)));
}

}  // namespace ddpx
