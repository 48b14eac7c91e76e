// Who a rank of the group is in the whole job, for texts.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace ddpx::health {

class RankNames {
 public:
  RankNames() = default;

  // By rank in the group: that in the job.
  explicit RankNames(std::vector<int> in_job) : in_job_(std::move(in_job)) {}

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

}  // namespace ddpx::health
