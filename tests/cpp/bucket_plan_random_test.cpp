// Random params, caps and orders: the plan's invariants, and agreement with a slow reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "buckets/bucket_plan.h"
#include "plans.h"

namespace ddpx {
namespace {

constexpr int kTrials = 2000;

struct Trial {
  std::vector<ParamMeta> params;
  BucketCaps caps;
  Indices arrival_order;
};

class TrialMaker {
 public:
  Trial make() {
    Trial trial;
    const int num_params = up_to(12);
    for (int i = 0; i <= num_params; ++i) {
      const bool is_double = up_to(2) == 0;
      trial.params.push_back(
          ParamMeta{
              up_to(6),
              is_double ? 8 : 4,
              is_double ? c10::kDouble : c10::kFloat,
              c10::Device(up_to(4) == 0 ? c10::kMeta : c10::kCPU),
              up_to(5) == 0});
    }
    trial.caps = BucketCaps{up_to(40), up_to(80), {}};
    for (int i = up_to(3); i > 0; --i) {
      trial.caps.listed_bytes.push_back(up_to(60));
    }
    trial.arrival_order.resize(trial.params.size());
    std::iota(trial.arrival_order.begin(), trial.arrival_order.end(), 0);
    std::shuffle(trial.arrival_order.begin(), trial.arrival_order.end(), generator_);
    return trial;
  }

 private:
  int up_to(int most) {
    return std::uniform_int_distribution<int>(0, most)(generator_);
  }

  std::mt19937 generator_{20240607};
};

bool same_kind(const ParamMeta& a, const ParamMeta& b) {
  return a.dtype == b.dtype && a.device == b.device;
}

// Takes one kind of param at a time, and only then sorts the buckets into launch order: by when
// they closed, and after those the ones left open, by when their kind was first met.
Buckets reference(const Trial& trial, const Indices& order, const std::vector<int64_t>& caps) {
  const auto never = order.size();
  std::map<std::pair<std::size_t, std::size_t>, Indices> by_close;  // {closed at, first met at}
  for (std::size_t met = 0; met < order.size(); ++met) {
    const auto& kind = trial.params[order[met]];
    if (kind.expect_sparse) {
      by_close[{met, met}] = {order[met]};
      continue;
    }
    const auto of_kind = [&](std::size_t index) {
      return !trial.params[index].expect_sparse && same_kind(trial.params[index], kind);
    };
    if (std::find_if(order.begin(), order.begin() + met, of_kind) != order.begin() + met) {
      continue;  // done when it was first met
    }
    std::size_t num_closed = 0;
    Indices bucket;
    for (std::size_t position = met; position < order.size(); ++position) {
      if (!of_kind(order[position])) {
        continue;
      }
      bucket.push_back(order[position]);
      int64_t bytes = 0;
      for (const auto index : bucket) {
        bytes += trial.params[index].numel * trial.params[index].element_bytes;
      }
      if (bytes >= caps[std::min(num_closed, caps.size() - 1)]) {
        by_close[{position, met}] = std::exchange(bucket, {});
        ++num_closed;
      }
    }
    if (!bucket.empty()) {
      by_close[{never, met}] = bucket;
    }
  }
  Buckets buckets;
  for (const auto& [when, bucket] : by_close) {
    buckets.push_back(bucket);
  }
  return buckets;
}

void expect_invariants(const Trial& trial, const BucketPlan& plan) {
  Indices seen;
  for (std::size_t b = 0; b < plan.buckets().size(); ++b) {
    const auto& indices = plan.buckets()[b].param_indices;
    ASSERT_FALSE(indices.empty());
    for (std::size_t s = 0; s < indices.size(); ++s) {
      const auto& param = trial.params[indices[s]];
      EXPECT_TRUE(same_kind(param, trial.params[indices.front()]));
      EXPECT_TRUE(!param.expect_sparse || indices.size() == 1);
      EXPECT_EQ(plan.location(indices[s]).bucket_index, b);
      EXPECT_EQ(plan.location(indices[s]).slot_index, s);
      seen.push_back(indices[s]);
    }
  }
  std::sort(seen.begin(), seen.end());
  Indices all(trial.params.size());
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(seen, all);
}

TEST(RandomPlan, ByArrivalAgreesWithTheReference) {
  TrialMaker maker;
  for (int i = 0; i < kTrials && !testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE(i);
    const auto trial = maker.make();
    const auto plan = BucketPlan::by_arrival(trial.params, trial.caps, trial.arrival_order);
    expect_invariants(trial, plan);
    auto caps = trial.caps.listed_bytes;
    if (caps.empty()) {
      caps = {trial.caps.first_bytes, trial.caps.cap_bytes};
    }
    EXPECT_EQ(buckets_of(plan), reference(trial, trial.arrival_order, caps));
  }
}

TEST(RandomPlan, InitialAgreesWithTheReference) {
  TrialMaker maker;
  for (int i = 0; i < kTrials && !testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE(i);
    const auto trial = maker.make();
    Indices registration_order(trial.params.size());
    std::iota(registration_order.begin(), registration_order.end(), 0);
    for (const auto mode : {GraphMode::kDefault, GraphMode::kFindUnused, GraphMode::kStatic}) {
      const auto plan = BucketPlan::initial(trial.params, trial.caps, mode);
      expect_invariants(trial, plan);
      auto caps = trial.caps.listed_bytes;
      if (caps.empty() && mode == GraphMode::kFindUnused) {
        caps = {trial.caps.first_bytes, trial.caps.cap_bytes};
      } else if (caps.empty()) {
        caps = {1 << 30};
      }
      auto expected = reference(trial, registration_order, caps);
      // Within a bucket params stand in registration order; buckets launch by the reverse.
      std::sort(expected.begin(), expected.end(), [](const Indices& a, const Indices& b) {
        return a.front() > b.front();
      });
      EXPECT_EQ(buckets_of(plan), expected);
    }
  }
}

}  // namespace
}  // namespace ddpx
