// What becomes of a step that broke off on this rank: what peers still need of it, and how the next
// one begins afresh.
#include <algorithm>
#include <utility>

#include "reducer.h"

namespace ddpx {

void Reducer::on_graph_task_abort(int task_id) noexcept {
  const auto lock = enter();
  const Occupation occupation(*this);
  scope_.leave(task_id);
  if (!scope_.empty()) {
    return;
  }
  backward_sync_.end(sync_enabled_);
  if (phase_ != Phase::kCollecting) {
    return;
  }
  go_to(Phase::kDraining);
  // Where the group has failed, peers finish no step either.
  auto unused_by_all = notes_.group_failed() || !match_peers() ? Indices() : unused_by_all_;
  fail();
  unused_by_all_ = std::move(unused_by_all);
}

// After an abort that came when every gradient was there (while learning: a part of each): peers
// get them, and cannot know of it. Does what they do at the end of the step, so that the next
// collectives pair up; false if that is not possible.
bool Reducer::match_peers() noexcept {
  try {
    if (arrivals_.learning() && arrivals_.missing().empty()) {
      join_arrivals();
      for (const auto param_index : arrivals_.unfinished()) {
        links_.pull(param_index);
        accept(param_index);
      }
    }
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      if (!skipped(b) && !buckets_[b].in_flight()) {
        return false;  // peers wait for this one, and would take another call for it
      }
    }
    if (!arrivals_.learning() || options_.mode != GraphMode::kStatic) {
      order_.complete();
    }
    // Nothing that peers only read is waited for: this may run where the graph task is destroyed.
    used_.abandon();
    agree_on_use();
    if (options_.skip_unused_buckets) {
      reduce_skipped_by_mistake();
      learn_use();
    }
    if (finite_check_) {
      finite_check_->launch(*collective_, params_.front().device());
    }
    count_broken_step();
    return true;
  } catch (...) {
    return false;  // the error that aborted this backward is the one to report
  }
}

// The current stream waits for all gradients that have arrived. Autograd sees to that at the end of
// a backward, but not within it, nor after one that raised.
void Reducer::join_arrivals() {
  for (auto& bucket : buckets_) {
    bucket.join_streams();
    bucket.note_stream();
  }
}

// As peers do, for which it did not break off.
void Reducer::count_broken_step() {
  if (options_.mode == GraphMode::kStatic && arrivals_.learning()) {
    arrivals_.end();  // ranks learn in the same step: the next one is whose order counts
  }
  static_use_agreed_ = true;
  clock_.skip_step();
}

void Reducer::fail() noexcept {
  try {
    go_to(Phase::kFailed);
    recover();
  } catch (...) {
    // Out of memory, say: the next step tries again, and its error reaches the user.
  }
}

void Reducer::recover() {
  arrived_grads_.clear();
  links_.pull_all();
  if (options_.precision.compute) {
    join_arrivals();
    for (std::size_t i = 0; i < params_.size(); ++i) {
      cast_to_local_dtype(i);
    }
  }
  // Peers may never join what is in flight, so nothing is waited for: the old buffers are left to
  // the backend, whose work objects keep them alive.
  links_.push_all();
  install(plan_, build_buckets(plan_));
  if (agrees_on_use()) {
    forget_use();
  }
  order_.restart();
  owed_.clear();
  go_to(Phase::kIdle);
  notes_.break_off();
}

void Reducer::reset() {
  auto lock = enter();
  if (BackwardScope::inside_any_task()) {
    throw errors::inside_backward(where(), "reset()");
  }
  changed_.wait(lock, [this] { return !launching_; });
  backward_sync_ = {};
  if (phase_ == Phase::kCollecting) {
    go_to(Phase::kFailed);
  }
  if (phase_ == Phase::kFailed) {
    recover();
  }
}

void Reducer::drain_all() {
  try {
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      if (!skipped(b)) {
        drain(b);
      }
    }
  } catch (...) {
    // A hook's result can be wrong on one rank alone; peers wait for nothing more of it.
    if (comm_hook_ && !finite_check_ && !notes_.group_failed()) {
      count_broken_step();
    }
    throw;
  }
}

}  // namespace ddpx
