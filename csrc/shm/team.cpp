#include "team.h"

#include <algorithm>

#include "collectives.h"
#include "error.h"
#include "float_environment.h"

namespace ddpx::shm {
namespace {

// The input that peers could access in place; null if the call has no such input.
const void* shareable(const Call& call, int own_index) {
  switch (call.kind) {
    case Kind::kAllReduce:
      return call.input == call.output ? call.output : nullptr;
    case Kind::kBroadcast:
      return call.root == own_index ? call.output : nullptr;
    case Kind::kAllGather:
      return call.input;
    case Kind::kReduceScatter:
      return call.inputs.empty() ? call.input : nullptr;
    case Kind::kBarrier:
      return nullptr;
  }
  return nullptr;
}

}  // namespace

Team::Team(
    RendezvousResult rendezvous, int rank, const TeamOptions& options, std::shared_ptr<Arena> arena)
    : peers_(std::move(rendezvous), rank),
      options_(options),
      arena_(std::move(arena)),
      buffers_(static_cast<std::size_t>(peers_.size())),
      steps_(peers_, options.spin_policy) {}

void Team::post(const Call& call, uint64_t sequence) noexcept {
  try {
    take_first_step(call, sequence);
  } catch (...) {
    steps_.fail_with_current_exception(name_of(call.kind));
  }
}

void Team::take_first_step(const Call& call, uint64_t sequence) {
  sequence_ = sequence;
  auto& descriptor = peers_.own_home().ring[sequence % kRing];
  descriptor = {
      sequence, call.kind, call.dtype, call.op, options_.order, call.root, call.count, {}};
  if (has_failed(peers_.shared_state().failure)) {
    return;  // `execute` reports it
  }
  if (fits_one_shot(*this, call)) {
    copy_to_one_shot(*this, call, peers_.segment(own_index()).one_shot(sequence));
  } else if (arena_ && size() > 1) {
    const auto* data = shareable(call, own_index());
    descriptor.buffer = arena_->locate(data, input_bytes(call, size())).value_or(BufferRef{});
  }
  steps_.arrive();
}

// The failure that all ranks report for an error of this rank. This rank is the culprit unless the
// error names other ranks.
Failure Team::failure_of(const Error& error) const {
  auto failure = shm::failure_of(error);
  if (failure.culprit < 0) {
    failure.text = peers_.name_of(own_index()) + ": " + failure.text;
    failure.culprit = peers_.rank_of(own_index());
  }
  return failure;
}

void Team::execute(const Call& call) {
  try {
    carry_out(call);
  } catch (const Error&) {
    throw;
  } catch (...) {
    std::rethrow_exception(steps_.fail_with_current_exception(name_of(call.kind)));
  }
}

void Team::carry_out(const Call& call) {
  timeout_ = call.timeout.count() > 0 ? call.timeout : options_.timeout;
  deadline_ = Clock::now() + timeout_;
  const auto& own = descriptor(own_index());
  try {
    steps_.check(own);
    steps_.await({own, deadline_, timeout_});
    check_match();
    dispatch(call);
  } catch (const Error& error) {
    // After any error the ranks are no longer at the same step, so the group cannot continue.
    if (!has_failed(peers_.shared_state().failure) && error.kind() != ErrorKind::kAborted) {
      throw steps_.fail(failure_of(error), describe(own));
    }
    throw;
  }
}

void Team::leave() {
  peers_.own_home().has_left.store(true, std::memory_order_release);
  peers_.shared_state().steps.num_left.fetch_add(1);
  os::futex_wake_all(peers_.shared_state().steps.count);
}

void Team::step() {
  steps_.arrive();
  steps_.await({descriptor(own_index()), deadline_, timeout_});
}

// All ranks read the same descriptors, so all ranks reach the same verdict.
void Team::check_match() {
  const auto& first = descriptor(0);
  for (int index = 1; index < size(); ++index) {
    if (same_operation(first, descriptor(index))) {
      continue;
    }
    throw steps_.fail(
        {ErrorKind::kMismatch,
         "ranks called different operations: " + peers_.name_of(0) + " called " + describe(first) +
             ", " + peers_.name_of(index) + " called " + describe(descriptor(index)) +
             ". Every rank must call the same operations in the same order.",
         peers_.rank_of(index)},
        describe(descriptor(own_index())));
  }
}

bool Team::all_resident() const {
  return std::find(buffers_.begin(), buffers_.end(), nullptr) == buffers_.end();
}

// Exchanges new segments, and locates every buffer in shared memory, even if the operation does not
// use it. Otherwise messages would accumulate in the sockets.
void Team::locate_buffers(const Call& call) {
  const auto check = [this] {
    steps_.check(descriptor(own_index()));
    if (Clock::now() >= deadline_) {
      throw Error(
          ErrorKind::kTimeout,
          "timed out after " + std::to_string(timeout_.count()) +
              " ms while the local ranks exchanged memory files. If many ranks share this host, "
              "raise the limit of open files (ulimit -n); if ranks are slow, raise the timeout.");
    }
  };
  const auto own = descriptor(own_index()).buffer.segment;
  if (own != 0) {
    peers_.announce(*arena_, own, check);
  }
  const auto num_bytes = input_bytes(call, size());
  for (int index = 0; index < size(); ++index) {
    const auto buffer = descriptor(index).buffer;
    if (buffer.segment == 0) {
      buffers_[index] = nullptr;
    } else if (index == own_index()) {
      buffers_[index] =
          const_cast<std::byte*>(static_cast<const std::byte*>(shareable(call, index)));
    } else {
      buffers_[index] = peers_.locate(index, buffer, num_bytes, check);
    }
  }
}

void Team::dispatch(const Call& call) {
  const DefaultFloatEnvironment environment;
  locate_buffers(call);
  switch (call.kind) {
    case Kind::kAllReduce:
      return all_reduce(*this, call);
    case Kind::kBroadcast:
      return broadcast(*this, call);
    case Kind::kAllGather:
      return all_gather(*this, call);
    case Kind::kReduceScatter:
      return reduce_scatter(*this, call);
    case Kind::kBarrier:
      return;
  }
}

}  // namespace ddpx::shm
