// Compares the last collective calls of the ranks, as their backends recorded them, when the ranks
// have stopped.
#pragma once

#include <cstdint>
#include <optional>

#include "../group_state.h"
#include "../verdict/failure.h"

namespace ddpx::health {

// Finds calls of the script that do not match. On a device such calls may block forever, or add
// unrelated tensors. All ranks have made the same number of calls, so WaitSearch finds no late
// rank. Owned by the monitor. The watchdog's thread calls check().
//
// A rank that has made no call for two seconds publishes its last calls, once
// (StatusPage::recorded; ddpx/health/recorded_calls.py reads them from torch's flight recorder).
// Ranks of one host compare these calls.
class RecordedCalls {
 public:
  explicit RecordedCalls(const GroupState& state) : state_(state) {}

  // The failure of ranks that have made different calls.
  std::optional<Failure> check(int64_t now_ns);

 private:
  bool any_written();
  std::optional<Failure> compare() const;

  const GroupState& state_;
  uint64_t num_calls_ = 0;
  int64_t since_ns_ = 0;     // when the watchdog detected the last call of this rank
  uint64_t published_ = 0;   // the number of calls when this rank was asked to publish
  uint64_t num_writes_ = 0;  // of all ranks, at the last comparison
};

}  // namespace ddpx::health
