#include "wrappers.h"

namespace ddpx::health {

void Wrappers::begin_construction() {
  const auto number = ++num_constructions_;
  page_.note({.doing = Doing::kConstructing, .model = kNoModel, .step = number});
}

// A rank that has begun fewer calls than another rank is behind that rank.
void Wrappers::begin_call() {
  auto activity = page_.view().activity();
  if (activity.doing == Doing::kConstructing) {
    activity.doing = Doing::kConstruction;
    ++activity.bucket;
    page_.note(activity);
  }
}

void Wrappers::end_call() {
  if (page_.view().activity().doing == Doing::kConstruction) {
    note(Doing::kConstructing);
  }
}

void Wrappers::note(Doing doing) {
  auto activity = page_.view().activity();
  activity.doing = doing;
  page_.note(activity);
}

}  // namespace ddpx::health
