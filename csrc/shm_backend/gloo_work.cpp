#include "gloo_work.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace ddpx {
namespace {

using std::chrono::milliseconds;

// Poll interval for a failure of the group.
constexpr auto kSlice = milliseconds(100);

// Grace time after a failure of the group. An operation among live ranks may still complete.
constexpr auto kTimeToComplete = std::chrono::seconds(1);

}  // namespace

GlooWork::GlooWork(c10::intrusive_ptr<c10d::Work> inner, int rank, GlooFaults faults)
    : Work(rank, inner->retrieveOpType()), inner_(std::move(inner)), faults_(std::move(faults)) {}

bool GlooWork::wait(milliseconds timeout) {
  const auto deadline = timeout == kNoTimeout ? Clock::time_point::max() : Clock::now() + timeout;
  try {
    if (!faults_.collective()) {
      return inner_->wait(timeout);  // not in slices: gloo treats the end of a wait as a fault
    }
    await_end(deadline);
    return wait_until(deadline);
  } catch (...) {
    if (!inner_->isCompleted()) {
      throw;  // the caller's timeout is over, or the group has failed
    }
    std::rethrow_exception(faults_.explain(std::current_exception()));
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
    const auto failure = faults_.group_failure();
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

// ---- forwarded to gloo's work ------------------------------------------------------------------

bool GlooWork::isCompleted() {
  return inner_->isCompleted();
}

bool GlooWork::isSuccess() const {
  return inner_->isSuccess();
}

std::exception_ptr GlooWork::exception() const {
  return inner_->exception();
}

int GlooWork::sourceRank() const {
  return inner_->sourceRank();
}

std::vector<at::Tensor> GlooWork::result() {
  return inner_->result();
}

void GlooWork::synchronize() {
  inner_->synchronize();
}

void GlooWork::blockCurrentStream() {
  inner_->blockCurrentStream();
}

void GlooWork::abort() {
  inner_->abort();
}

c10::intrusive_ptr<c10::ivalue::Future> GlooWork::getFuture() {
  return inner_->getFuture();
}

c10::intrusive_ptr<c10::ivalue::Future> GlooWork::getFutureResult() {
  return inner_->getFutureResult();
}

float GlooWork::getDuration() const {
  return inner_->getDuration();
}

uint64_t GlooWork::getSequencenumber() const {
  return inner_->getSequencenumber();
}

}  // namespace ddpx
