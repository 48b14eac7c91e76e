// Names of ranks, buckets and activities, for texts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "activity.h"

namespace ddpx::health {

// "'a', 'b' and 3 more".
std::string join_names(const std::vector<std::string>& names, std::size_t most);

// "0.25", "12.3", "123": seconds.
std::string in_seconds(int64_t ns);

// Of the ranks of a group, their ranks in the whole job.
class RankNames {
 public:
  RankNames() = default;

  // `in_job`: by rank in the group, the rank in the job. Empty: the same.
  explicit RankNames(std::vector<int> in_job) : in_job_(std::move(in_job)) {}

  // The rank in the group of a rank of the job; nullopt if that rank is not in the group.
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

  // To begin a list with: "rank 3 of the job, ".
  std::string prefix(int rank) const {
    const auto other = other_name(rank);
    return other ? *other + ", " : std::string();
  }

 private:
  // Where it is another number.
  std::optional<std::string> other_name(int rank) const {
    const auto at = static_cast<std::size_t>(rank);
    return rank >= 0 && at < in_job_.size() && in_job_[at] != rank
               ? std::make_optional("rank " + std::to_string(in_job_[at]) + " of the job")
               : std::nullopt;
  }

  std::vector<int> in_job_;
};

// The params of each bucket of each wrapper. Ranks have the same, so that a rank can name what
// another one does. Thread-safe.
class BucketNames {
 public:
  void set(uint8_t model, std::vector<std::vector<std::string>> names);

  // All params of the wrapper, by index.
  void set_all_params(uint8_t model, std::vector<std::string> names);
  std::vector<std::string> all_params(uint8_t model) const;

  std::vector<std::string> params(uint8_t model, uint16_t bucket) const;

  // "step 3, phase waiting for buckets, bucket 1 ('a', 'b')".
  std::string describe(const Activity& activity) const;

 private:
  mutable std::mutex mutex_;
  std::map<uint8_t, std::vector<std::vector<std::string>>> names_;  // by model, bucket
  std::map<uint8_t, std::vector<std::string>> all_params_;          // by model
};

}  // namespace ddpx::health
