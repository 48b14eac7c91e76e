// A failure of a process group: its kind, and the ranks that it names.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "../machine/activity.h"
#include "../machine/names.h"

namespace ddpx::health {

enum class FailureKind : uint8_t {
  kDead,      // the process of a rank ended, or its script is ending with an error
  kLeft,      // the script of a rank ended, or destroyed its group, while other ranks wait for it
  kStalled,   // a rank that lives is late for longer than the user, or the backend, allows
  kMismatch,  // ranks made different collective calls; no rank is lost
  kFrozen,    // ranks froze different params; no rank is lost
  kForwards,  // ranks made different numbers of forwards; no rank is lost
  kSettings,  // settings of a wrapper differ between ranks; no rank is lost
};

struct LostRank {
  int rank = 0;
  std::string host;
  int pid = 0;            // 0: unknown
  std::string what;       // "was killed by SIGKILL"
  std::string cause;      // the text of its exception, or empty
  std::string last_seen;  // its last known activity, or empty
  bool has_details = true;
};

struct Failure {
  FailureKind kind = FailureKind::kDead;
  std::vector<LostRank> lost;
  std::string how;  // what has happened, if no rank of the group is lost

  // Whether ranks did different things, and no rank is lost.
  bool is_mismatch() const {
    return kind >= FailureKind::kMismatch;
  }

  // The first lost rank; -1 if no rank is lost.
  int first_rank() const {
    return lost.empty() ? -1 : lost.front().rank;
  }

  // A record that was cut off has all lost ranks, and the details of the first ones only. decode()
  // returns nullopt if the record is malformed.
  std::string encode() const;
  static std::optional<Failure> decode(std::string_view record);

  // "rank 1 (host a, pid 12) was killed by SIGKILL; it was last seen in ..."
  std::string describe(const RankNames& names = {}) const;
};

// The name of the Python error for this kind, such as "ddpx.RankFailure".
const char* error_name(FailureKind kind);

// A failure as one rank reports it.
struct RankReport {
  Failure failure;
  int rank = 0;       // the rank that reports the failure
  int64_t step = -1;  // the step of this rank; -1 before its first step
  Doing doing = Doing::kOutside;
  std::optional<int> bucket;        // the bucket that this rank waits for
  std::vector<std::string> params;  // of that bucket
  std::string said;                 // the error of the backend, or empty
  RankNames names;
  bool can_shrink = false;  // the launcher does not end survivors, so they may call ddpx.shrink()
  std::string own_stack;    // the stack of this rank, if the failure names this rank

  // Whether this rank is among the lost or late ones.
  bool is_about_this_rank() const;

  std::string text() const;
};

// Ends a wait because the group has failed. The catcher must raise the group's report.
class GroupFailed : public std::runtime_error {
 public:
  GroupFailed() : std::runtime_error("ranks of the process group are lost") {}
};

// Throws the error of `raiser` (in Python, ddpx.RankFailure), or else a std::runtime_error.
[[noreturn]] void raise(const RankReport& report);

// Functions of the interpreter. Null without an interpreter.
inline std::atomic<void (*)(const RankReport& report)> raiser{nullptr};
// Makes the main thread raise the failure of the group whose state has this token. Does not wait,
// and needs no lock of the interpreter.
inline std::atomic<void (*)(uint64_t token)> interrupt{nullptr};

}  // namespace ddpx::health
