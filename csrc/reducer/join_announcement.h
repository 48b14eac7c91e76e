// The announcement of forwards in a join() context, to ranks that have run out of inputs.
#pragma once

#include <atomic>

#include "context.h"

namespace ddpx {

// The announcement of the forwards since the last averaged backward of this rank. Ranks without
// inputs make the step that was announced. A backward that does otherwise raises.
//
// The reducer owns this object. Any thread may call announce(), leave() and averages() without the
// mutex. The other methods read the context, and need its mutex.
class JoinAnnouncement {
 public:
  // A forward announces whether its backward averages.
  void announce(bool averages) {
    State before = state_;
    while (before != State::kAverages &&
           !state_.compare_exchange_weak(before, averages ? State::kAverages : State::kLocal)) {
    }
  }

  // The join() context has ended.
  void leave() {
    state_ = State::kOutsideJoin;
  }

  // Whether ranks without inputs expect an averaged backward.
  bool averages() const {
    return state_ == State::kAverages;
  }

  // UserError in a join() context in which ranks without inputs expect no averaged backward.
  void check_prepare(const ReducerContext& context) const {
    const State state = state_;
    if (state == State::kLocal || state == State::kUnannounced) {
      throw context.error(
          "prepare_for_backward() was called in a join() context, without a forward outside "
          "no_sync() before it. Ranks without inputs learn at forward whether a step averages "
          "gradients. Run the last forward of the step outside no_sync().");
    }
  }

  // An averaged backward begins, and the announcement is used up. UserError if ranks without inputs
  // do not expect the backward.
  void begin_step(const ReducerContext& context) {
    if (state_ == State::kLocal) {
      throw context.error(
          "in a join() context, forward ran inside no_sync() and announced to the other ranks that "
          "this step leaves gradients local, but this backward averages gradients. Put the "
          "backward inside no_sync() as well to keep gradients local, or the forward outside to "
          "average them.");
    }
    auto announced = State::kAverages;  // leave() may come in between
    state_.compare_exchange_strong(announced, State::kUnannounced);
  }

  // A local backward of a forward outside no_sync() begins. UserError if ranks without inputs
  // expect an averaged backward.
  void check_local(const ReducerContext& context) const {
    if (averages()) {
      throw context.error(
          "in a join() context, forward ran outside no_sync() and announced to the other ranks "
          "that this step averages gradients, but backward runs inside no_sync(). Put the forward "
          "inside no_sync() as well to keep gradients local.");
    }
  }

 private:
  enum class State { kOutsideJoin, kUnannounced, kLocal, kAverages };

  std::atomic<State> state_{State::kOutsideJoin};
};

}  // namespace ddpx
