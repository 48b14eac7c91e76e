// What has become of ranks that a group cannot go on without.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../machine/activity.h"
#include "../machine/names.h"

namespace ddpx::health {

enum class FailureKind : uint8_t {
  kDead,      // a process ended, or its script is ending with an error
  kLeft,      // its script ended, or it destroyed its group, while others wait for it
  kStalled,   // it lives, and has not come for longer than the user, or the backend, allows
  kMismatch,  // ranks made different collective calls; nobody is lost
  kFrozen,    // ranks froze different params; nobody is lost
};

struct LostRank {
  int rank = 0;
  std::string host;
  int pid = 0;            // 0: unknown
  std::string what;       // "was killed by SIGKILL"
  std::string cause;      // the text of its exception, if it left one
  std::string last_seen;  // what it was doing; empty if nobody knows
  bool has_details = true;
};

struct Failure {
  FailureKind kind = FailureKind::kDead;
  std::vector<LostRank> lost;
  std::string how;  // where no rank of the group is lost: what has happened

  // Ranks did different things, and nobody is lost.
  bool is_mismatch() const {
    return kind == FailureKind::kMismatch || kind == FailureKind::kFrozen;
  }

  // The first lost rank, for whose sake others fail; -1 if none is lost.
  int first_rank() const {
    return lost.empty() ? -1 : lost.front().rank;
  }

  // A text that was cut off has all lost ranks, but the details of the first ones only.
  std::string to_text() const;
  static std::optional<Failure> from_text(const std::string& text);

  // "rank 1 (host a, pid 12) was killed by SIGKILL; it was last seen in ..."
  std::string describe(const RankNames& names = {}) const;
};

// Of the error that says so: "ddpx.RankFailure".
const char* error_name(FailureKind kind);

// A failure as one rank meets it.
struct RankReport {
  Failure failure;
  int rank = 0;       // the one that reports
  int64_t step = -1;  // and what it is doing itself; -1 before its first step
  Doing doing = Doing::kOutside;
  std::optional<int> bucket;        // that it waits for
  std::vector<std::string> params;  // of that bucket
  std::string said;                 // the error that the backend met, if it met one
  RankNames names;                  // of the whole job
  bool can_shrink = false;          // survivors live on, so that ddpx.shrink() is of use
  std::string own_stack;            // of a rank that the others have given up

  // Whether this rank is among the lost or late ones.
  bool is_about_this_rank() const;

  std::string text() const;
};

// A wait has ended because the group has failed. Who catches it raises the report.
class GroupFailed : public std::runtime_error {
 public:
  GroupFailed() : std::runtime_error("ranks of the process group are lost") {}
};

// Throws: what the installed raiser throws (in Python, ddpx.RankFailure), else a
// std::runtime_error.
[[noreturn]] void raise(const RankReport& report);
void set_raiser(void (*raiser)(const RankReport& report));

}  // namespace ddpx::health
