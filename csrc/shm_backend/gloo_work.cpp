#include "gloo_work.h"

#include <algorithm>
#include <optional>
#include <utility>

namespace ddpx {
namespace {

using std::chrono::milliseconds;

// How long who waits may miss that the group has failed.
constexpr auto kSlice = milliseconds(100);

// What can be completed in spite of a failure, as by ranks that live, is.
constexpr auto kTimeToComplete = std::chrono::seconds(1);

}  // namespace

GlooWork::GlooWork(c10::intrusive_ptr<c10d::Work> inner, int rank, GlooFaults faults)
    : Work(rank, inner->retrieveOpType()), inner_(std::move(inner)), faults_(std::move(faults)) {}

bool GlooWork::wait(milliseconds timeout) {
  const auto deadline = timeout == kNoTimeout ? Clock::time_point::max() : Clock::now() + timeout;
  try {
    if (!faults_.collective()) {
      return inner_->wait(timeout);  // not in slices: gloo takes the end of one for a fault
    }
    await_end(deadline);
    return wait_until(deadline);
  } catch (...) {
    if (!inner_->isCompleted()) {
      throw;  // the time that the caller gave is up, or the group has failed
    }
    std::rethrow_exception(faults_.explain(std::current_exception()));
  }
}

// Until it has ended or the time is up; throws if the group has failed. That a rank is gone is no
// reason to: it may have done its part.
void GlooWork::await_end(Clock::time_point deadline) {
  std::optional<Clock::time_point> patience;
  while (!inner_->isCompleted() && Clock::now() < deadline) {
    try {
      wait_until(std::min(deadline, Clock::now() + kSlice));
      return;
    } catch (...) {
      // The slice is over, or gloo has failed: then it throws the same to who waits next.
    }
    const auto failure = faults_.group_failure();
    if (!failure) {
      continue;
    }
    patience = patience.value_or(Clock::now() + kTimeToComplete);
    if (Clock::now() >= *patience && !inner_->isCompleted()) {
      std::rethrow_exception(failure);
    }
  }
}

// Throws if the time is up.
bool GlooWork::wait_until(Clock::time_point deadline) {
  if (deadline == Clock::time_point::max()) {
    return inner_->wait(kNoTimeout);
  }
  const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
  return inner_->wait(std::max(left, milliseconds(1)));
}

// ---- gloo's ------------------------------------------------------------------------------------

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
