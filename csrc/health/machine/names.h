// Names of ranks, buckets and activities, for texts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../../count.h"
#include "activity.h"

namespace ddpx::health {

// "0.25", "12.3", "123": seconds.
std::string in_seconds(int64_t ns);

// " of wrapper 2". Empty for the first wrapper, and for a wrapper that not all ranks constructed
// together.
std::string of_wrapper(uint8_t model);

// Maps ranks of the group to ranks of the job.
class RankNames {
 public:
  RankNames() = default;

  // `in_job`: the ranks of the job, by rank in the group. Empty: both numbers are equal.
  explicit RankNames(std::vector<int> in_job) : in_job_(std::move(in_job)) {}

  // The rank in the group; nullopt if that rank of the job is not in the group.
  std::optional<int> find(int rank_in_job) const {
    const auto found = std::find(in_job_.begin(), in_job_.end(), rank_in_job);
    return in_job_.empty()          ? std::make_optional(rank_in_job)
           : found != in_job_.end() ? std::make_optional<int>(found - in_job_.begin())
                                    : std::nullopt;
  }

  // "rank 1", or "rank 1 (rank 3 of the job)".
  std::string name(int rank) const {
    const auto other = other_name(rank);
    return "rank " + std::to_string(rank) + (other ? " (" + *other + ")" : "");
  }

  // The prefix "rank 3 of the job, ", or empty.
  std::string prefix(int rank) const {
    const auto other = other_name(rank);
    return other ? *other + ", " : std::string();
  }

 private:
  // nullopt if both numbers are equal.
  std::optional<std::string> other_name(int rank) const {
    const auto at = static_cast<std::size_t>(rank);
    return rank >= 0 && at < in_job_.size() && in_job_[at] != rank
               ? std::make_optional("rank " + std::to_string(in_job_[at]) + " of the job")
               : std::nullopt;
  }

  std::vector<int> in_job_;
};

// Returns the params of one wrapper that have no gradient yet, or no params if this is unknown.
// Called on the thread of the watchdog. Must not wait.
using MissingParams = std::function<std::vector<std::string>()>;

// The params of each wrapper and of each bucket. These are the same on all ranks, so a rank can
// describe the activity of another rank. Owned by the table of peers. Thread-safe.
class WrapperNames {
 public:
  struct Names {
    std::vector<std::string> params{};                // all params of the wrapper, by index
    std::vector<std::vector<std::string>> buckets{};  // the params of each bucket
    MissingParams missing_params{};
  };

  // Replaces the names of an earlier wrapper with this number.
  void set(uint8_t model, Names names);

  std::vector<std::string> params(uint8_t model) const;
  std::vector<std::string> params(uint8_t model, uint16_t bucket) const;

  // "step 3, phase waiting for buckets, bucket 1 ('a', 'b')".
  std::string describe(const Activity& activity) const;

  // "without gradients yet for 'a', 'b'". Empty if no gradient is known to be missing, or if the
  // backward has just begun.
  std::string describe_missing(const Activity& own) const;

 private:
  // A member of the names of a wrapper. Empty if the wrapper is unknown.
  template <class Member>
  Member find(uint8_t model, Member Names::* member) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = by_model_.find(model);
    return found == by_model_.end() ? Member() : found->second.*member;
  }

  mutable std::mutex mutex_;
  std::map<uint8_t, Names> by_model_;  // of the newest wrapper
};

}  // namespace ddpx::health
