// With find_unused_parameters nobody can know at the start of a backward which params it will not
// reach. A bucket that waited for them would leave at its end only. So those that no rank used in
// the last step are taken to be unused again: their buckets leave without them. The agreement at
// the end of the step tells every rank which guesses were wrong; those params get a second pass.
#include <algorithm>

#include "reducer.h"
#include "slot_io.h"

namespace ddpx {

void Reducer::agree_on_use() {
  if (agrees_on_use()) {
    notes_.note(Doing::kSettling);
    communicate([&] { used_.launch(*collective_); }, errors::used_map_agreement);
  }
}

void Reducer::settle_guesses() {
  if (options_.mode != GraphMode::kFindUnused) {
    return;
  }
  repair(wrong_guesses());
  predict();
  used_.clear();
}

Reducer::Indices Reducer::wrong_guesses() {
  Indices wrong;
  if (predicted_unused_.empty()) {
    return wrong;
  }
  const auto& users = communicate(
      [&]() -> const auto& { return used_.num_ranks_using(); }, errors::used_map_agreement);
  std::copy_if(
      predicted_unused_.begin(),
      predicted_unused_.end(),
      std::back_inserter(wrong),
      [&](std::size_t i) { return users[i] != 0; });
  return wrong;
}

// The same on every rank: either all read the agreement, or one rank used every param, and then
// those that read it find nothing.
void Reducer::predict() {
  predicted_unused_.clear();
  if (comm_hook_ || !communicates() || used_.all_marked()) {
    return;  // a hook may not be called twice for a bucket, so with one nothing is guessed
  }
  const auto& users = communicate(
      [&]() -> const auto& { return used_.num_ranks_using(); }, errors::used_map_agreement);
  for (std::size_t i = 0; i < users.size(); ++i) {
    if (users[i] == 0) {
      predicted_unused_.push_back(i);
    }
  }
}

// Each param keeps its place in a buffer of its bucket's size, because the place decides in which
// order a backend sums.
Reducer::SecondPasses Reducer::second_passes_for(const Indices& param_indices) const {
  SecondPasses passes;
  for (const auto param_index : param_indices) {
    const auto bucket_index = plan_.location(param_index).bucket_index;
    if (passes.count(bucket_index) == 0) {
      passes.emplace(bucket_index, buckets_[bucket_index].zeros_like(params_));
    }
  }
  return passes;
}

void Reducer::run(SecondPasses& passes) {
  for (auto& [bucket_index, pass] : passes) {
    launch(pass, bucket_index);
  }
  for (auto& entry : passes) {
    communicate(
        [&] { entry.second.wait(*collective_); }, [&] { return describe_bucket(entry.first); });
  }
}

void Reducer::repair(const Indices& param_indices) {
  auto passes = second_passes_for(param_indices);
  Indices fitting;
  for (const auto param_index : param_indices) {
    const auto location = plan_.location(param_index);
    auto& pass = passes.at(location.bucket_index);
    const auto& slot = pass.slots()[location.slot_index];
    const auto& param = params_[param_index];
    if (!param.requires_grad()) {
      continue;
    }
    if (const auto misfit = find_misfit(pass, slot, param)) {
      report_later(
          errors::gradient_mismatch(
              where(), names_[param_index], misfit->gradient, misfit->expected));
      continue;
    }
    fitting.push_back(param_index);
    if (moved_out_[param_index]) {
      pack_as_if_in_slot(pass, slot, param, divisor());
    } else {
      pack(pass, slot, param, divisor(), /*as_view=*/false);
    }
  }
  run(passes);
  for (const auto param_index : fitting) {
    const auto location = plan_.location(param_index);
    const auto& pass = passes.at(location.bucket_index);
    const auto& slot = pass.slots()[location.slot_index];
    if (options_.gradient_as_bucket_view && !pass.sparse()) {
      const auto& home = buckets_[location.bucket_index].slots()[location.slot_index];
      write_back_to(pass, slot, home, params_[param_index]);
    } else {
      write_back(pass, {&slot}, params_, /*as_view=*/false);
    }
  }
}

void Reducer::shadow_step() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (phase_ == Phase::kFailed) {
    recover();
  }
  notes_.check();
  if (phase_ != Phase::kIdle) {
    throw errors::inside_backward(where(), "shadow_step()");
  }
  go_to(Phase::kCollecting);
  clock_.begin_step();
  notes_.begin_step(step_number());
  go_to(Phase::kDraining);
  try {
    Indices all;
    for (std::size_t b = 0; b < buckets_.size(); ++b) {
      if (!skipped(b)) {
        all.push_back(plan_.buckets()[b].param_indices.front());
      }
    }
    auto shadows = second_passes_for(all);
    for (auto& [bucket_index, shadow] : shadows) {
      launch(shadow, bucket_index);
    }
    order_.complete();
    agree_on_use();
    for (auto& entry : shadows) {
      notes_.note(Doing::kWaiting, entry.first);
      communicate(
          [&] { entry.second.wait(*collective_); }, [&] { return describe_bucket(entry.first); });
    }
    if (options_.mode == GraphMode::kFindUnused) {
      auto passes = second_passes_for(wrong_guesses());
      run(passes);
      predict();
      used_.clear();
    }
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

}  // namespace ddpx
