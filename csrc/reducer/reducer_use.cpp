// What ranks agree on about the use of params, the buckets that are left out because of it, and the
// step of a rank that has no gradients.
#include <algorithm>

#include "reducer.h"

namespace ddpx {

void Reducer::agree_on_use() {
  if (agrees_on_use()) {
    notes_.note(Doing::kSettling);
    for (const auto param_index : unused_search_.nested()) {
      used_.mark_nested(param_index);
    }
    communicate([&] { used_.launch(*collective_); }, errors::used_map_agreement);
    last_use_ = used_.settled();
  }
}

// A bucket of which no rank used a param in the last step. All ranks leave out the same buckets.
bool Reducer::skipped(std::size_t bucket_index) const {
  if (unused_by_all_.empty()) {
    return false;
  }
  const auto& members = plan_.buckets()[bucket_index].param_indices;
  return std::all_of(members.begin(), members.end(), [this](std::size_t i) {
    return std::binary_search(unused_by_all_.begin(), unused_by_all_.end(), i);
  });
}

// Skipped buckets of which some rank used a param after all; the same on every rank.
Reducer::Indices Reducer::skipped_by_mistake() {
  Indices mistaken;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    if (!skipped(b)) {
      continue;
    }
    const auto& users = num_ranks_using();
    const auto& members = plan_.buckets()[b].param_indices;
    if (std::any_of(members.begin(), members.end(), [&](auto i) { return users[i] != 0; })) {
      mistaken.push_back(b);
    }
  }
  return mistaken;
}

const std::vector<int32_t>& Reducer::num_ranks_using() {
  const auto& users = communicate(
      [&]() -> const auto& { return used_.num_ranks_using(); }, errors::used_map_agreement);
  if (!last_use_.of_ranks.is_same(used_.settled().of_ranks)) {
    last_use_ = used_.settled();
  }
  return users;
}

void Reducer::reduce_skipped_by_mistake() {
  const auto mistaken = skipped_by_mistake();
  for (const auto bucket_index : mistaken) {
    for (const auto param_index : plan_.buckets()[bucket_index].param_indices) {
      pack_into_slot(param_index);
    }
    auto& bucket = buckets_[bucket_index];
    if (packs_when_full(bucket)) {
      pack_held(bucket);
    }
    if (finite_check_) {
      look_at(bucket);
    }
    launch(bucket, bucket_index);
  }
  for (const auto bucket_index : mistaken) {
    drain(bucket_index);
  }
}

// Ends what this step has agreed on about use. The same on every rank: either all ranks read the
// agreement, or some rank used every param, and those that read it find nothing.
void Reducer::learn_use() {
  if (options_.mode != GraphMode::kFindUnused) {
    return;
  }
  unused_by_all_.clear();
  if (options_.skip_unused_buckets && communicates() && !used_.all_marked()) {
    const auto& users = num_ranks_using();
    for (std::size_t i = 0; i < users.size(); ++i) {
      if (users[i] == 0) {
        unused_by_all_.push_back(i);
      }
    }
  }
  if (const auto& nesting = used_.num_ranks_nesting(); !nesting.empty()) {
    unused_search_.note_peers(num_ranks_using(), nesting);
  }
  used_.clear();
  last_use_ = used_.settled();
}

void Reducer::forget_use() {
  used_ = UsedMap(params_.size(), params_.front().device());
  last_use_ = {};
  unused_by_all_.clear();
}

void Reducer::shadow_step() {
  const auto lock = enter();
  const Occupation occupation(*this);
  if (phase_ == Phase::kFailed) {
    recover();
  }
  notes_.check();
  if (phase_ != Phase::kIdle) {
    throw errors::inside_backward(where(), "shadow_step()");
  }
  go_to(Phase::kCollecting);
  apply_settings();
  clock_.begin_step();
  notes_.begin_step(step_number());
  go_to(Phase::kDraining);
  try {
    Indices all;
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      if (!skipped(b)) {
        all.push_back(b);
      }
    }
    auto shadows = launch_zeros(all);
    order_.complete();
    agree_on_use();
    wait_for(shadows);
    auto late_shadows = launch_zeros(skipped_by_mistake());
    wait_for(late_shadows);
    learn_use();
    if (finite_check_) {
      finite_check_->begin_step();
    }
    report_not_finite();
  } catch (...) {
    fail();
    throw;
  }
  static_use_agreed_ = true;
  go_to(Phase::kIdle);
  clock_.skip_step();
  note_outside();
  if (const auto error = std::exchange(to_report_, std::nullopt)) {
    raise(*error);
  }
}

Reducer::Shadows Reducer::launch_zeros(const Indices& bucket_indices) {
  Shadows shadows;
  for (const auto bucket_index : bucket_indices) {
    auto& bucket =
        shadows.emplace(bucket_index, buckets_[bucket_index].zeros_like(params_)).first->second;
    launch(bucket, bucket_index);
  }
  return shadows;
}

void Reducer::wait_for(Shadows& shadows) {
  for (auto& entry : shadows) {
    notes_.note(Doing::kWaiting, entry.first);
    communicate(
        [&] { entry.second.wait(*collective_); }, [&] { return describe_bucket(entry.first); });
  }
}

}  // namespace ddpx
