// All times of the failure detector, in nanoseconds, and the relations between them.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ddpx::health::times {

constexpr int64_t kMillisecond = 1'000'000;
constexpr int64_t kSecond = 1000 * kMillisecond;

// ---- polling ------------------------------------------------------------------------------------

constexpr int64_t kWatchdogPeriod = 200 * kMillisecond;
constexpr int64_t kFlagPoll = 1 * kMillisecond;      // reads of a word in memory
constexpr int64_t kFailurePoll = 10 * kMillisecond;  // checks of processes, pages and failures
constexpr int64_t kPostPoll = 20 * kMillisecond;     // checks whether the store has all messages
constexpr int64_t kReconnect = 200 * kMillisecond;   // attempts to connect to the store
constexpr int64_t kCountPoll = 200 * kMillisecond;   // reads of the number of ranks that have come
constexpr int64_t kDevicePoll = 100 * kMillisecond;  // queries of the steps of a device

// A process whose watchdog has paused for this time was stopped.
constexpr int64_t kStopped = 1500 * kMillisecond;
static_assert(kStopped > 5 * kWatchdogPeriod);

// ---- shared memory ------------------------------------------------------------------------------

// A writer that takes longer is stopped, or has died.
constexpr int64_t kWriteText = 200 * kMillisecond;

// ---- the lease of a host ------------------------------------------------------------------------

constexpr int64_t kLease = 15 * kSecond;  // the default

constexpr int64_t renewal_period(int64_t lease) {
  return lease / 10;
}
// The time after which the next rank of a host takes over from its keeper.
constexpr int64_t takeover_turn(int64_t lease) {
  return lease / 5;
}
// The silence after which a host is suspected: all hosts are then watched.
constexpr int64_t suspicion(int64_t lease) {
  return lease / 3;
}
// The silence after which other watched hosts are lost, too, when a watched host is lost.
constexpr int64_t shared_loss(int64_t lease) {
  return lease / 3 * 2;
}
// shared_loss() for hosts that are watched only since the suspicion.
constexpr int64_t distant_loss(int64_t lease) {
  return lease / 2;
}
// The longest wait for the messages of hosts before a rank judges late ranks.
constexpr int64_t message_wait(int64_t lease) {
  return lease / 4;
}
// The longest wait of a rank without a lease for the store.
constexpr int64_t lease_wait(int64_t lease) {
  return lease / 3 * 2;
}
// Hosts lost at the same moment have silences that differ by at most two periods.
static_assert(kLease - 2 * renewal_period(kLease) >= shared_loss(kLease));
static_assert(kLease - suspicion(kLease) - renewal_period(kLease) >= distant_loss(kLease));
static_assert(takeover_turn(kLease) < message_wait(kLease));
static_assert(takeover_turn(kLease) > renewal_period(kLease));

constexpr int64_t kDeadKeeperTurn = 500 * kMillisecond;  // takeover_turn() if the keeper is dead

// ---- messages between hosts ---------------------------------------------------------------------

constexpr int64_t kFastPeriod = 500 * kMillisecond;  // the period while a rank needs messages
constexpr int64_t kFastWriting = 5 * kSecond;        // how long hosts then write in this period
constexpr int64_t kRequest = 1 * kSecond;            // how long a request of a rank is valid
constexpr int64_t kReadPerRank = 2 * kMillisecond;   // the period of reads of the list of ranks
constexpr int64_t kReadPerHost = 10 * kMillisecond;  // the period of reads of all hosts
constexpr int64_t kReadIsOld = 1 * kSecond;
static_assert(kRequest > 2 * kWatchdogPeriod);

// ---- the store ----------------------------------------------------------------------------------

constexpr int64_t kLateAnswer = 300 * kMillisecond;  // StoreState::kSlow
constexpr int64_t kCatchUp = 1 * kSecond;            // for messages after a late answer
constexpr int64_t kPromptAnswer = 1 * kSecond;    // after a slower answer, silence does not count
constexpr int64_t kNoAnswer = 2 * kSecond;        // StoreState::kLost: beyond the last answer
constexpr int64_t kSlowestAnswer = 3 * kSecond;   // the limit of the last answer in kNoAnswer
constexpr int64_t kRefusal = 500 * kMillisecond;  // of connections before StoreState::kEnded
constexpr int64_t kStateIsOld = 1 * kSecond;      // the published state of the keeper
static_assert(kLateAnswer < kPromptAnswer && kPromptAnswer < kNoAnswer);
static_assert(kStateIsOld > 2 * kWatchdogPeriod);

// Ranks that construct a wrapper usually have met in its collective call by then. The call takes
// longer where many ranks share few cores.
constexpr int64_t collective_start(int64_t world_size) {
  return std::min<int64_t>(100 + 10 * world_size, 1000) * kMillisecond;
}

// ---- the search for a failure -------------------------------------------------------------------

// The waits after which these are failures: a rank that has left, a rank that raised in its step,
// and the loss of the store.
constexpr int64_t kLeftMatters = 300 * kMillisecond;
constexpr int64_t kFaultMatters = 300 * kMillisecond;
constexpr int64_t kStoreMatters = 500 * kMillisecond;
static_assert(kLeftMatters > kWatchdogPeriod);
// A script that has caught an error, and continues training, begins its next step within this time.
constexpr int64_t kNextStep = 500 * kMillisecond;
// kLeftMatters if numbers of calls alone show the wait: the numbers may be as old as two periods,
// and the wait may be over.
constexpr int64_t kUncertainLeftMatters = 3 * kSecond;
static_assert(kUncertainLeftMatters > kLeftMatters + 2 * kWatchdogPeriod);

// A host that was asked for messages, and has written no message for this time, is dead.
constexpr int64_t kHostSilence = 4 * kSecond;
static_assert(kHostSilence > kFastPeriod + 3 * kPromptAnswer);  // a host writes and reads in turn
static_assert(kFastWriting > kHostSilence);

// The durations of the search for the cause of an error. gloo may report the end of a connection
// before the kernel has ended the process. Messages of other hosts need the store.
struct SearchTimes {
  int64_t on_one_host;
  int64_t between_hosts;
};
constexpr SearchTimes kAfterTimeout{200 * kMillisecond, 2500 * kMillisecond};
constexpr SearchTimes kOutsideStep{500 * kMillisecond, 5500 * kMillisecond};
constexpr SearchTimes kConnectionLost{800 * kMillisecond, 6000 * kMillisecond};
// A timeout ends the wait of one rank, and breaks the connections of the others. Ranks that timed
// out report first.
static_assert(kAfterTimeout.on_one_host < kOutsideStep.on_one_host);
static_assert(kAfterTimeout.between_hosts < kOutsideStep.between_hosts);
static_assert(kOutsideStep.on_one_host < kConnectionLost.on_one_host);
static_assert(kOutsideStep.between_hosts >= kHostSilence + kReadIsOld + kFastPeriod);
static_assert(kConnectionLost.between_hosts > kOutsideStep.between_hosts);

constexpr int64_t kAllHadTime = 500 * kMillisecond;  // each rank has published its cause by then
constexpr int64_t kLeastTimeout = 1 * kSecond;       // the shortest wait that a timeout can end
constexpr int64_t kSlowStore = 3500 * kMillisecond;  // the wait for a store that is slow
constexpr int64_t kEndedStore = 500 * kMillisecond;  // the search goes on without the store
static_assert(kSlowStore > kSlowestAnswer && kSlowStore < kOutsideStep.between_hosts);

// ---- stalls and calls ---------------------------------------------------------------------------

// Between a failure and the abort of calls on a device. The steps that the device has done until
// then are known to be right.
constexpr int64_t kBeforeAbort = 250 * kMillisecond;
static_assert(kBeforeAbort > 2 * kDevicePoll);
// Until the interpreter knows that it must raise an error before it uses results of aborted calls.
constexpr int64_t kInterruptDelay = 50 * kMillisecond;
// A rank raises after the abort, since destroy_process_group() raises an error of NCCL before. The
// longest wait, from the failure on.
constexpr int64_t kMostAbort = 2500 * kMillisecond;
static_assert(kMostAbort > kBeforeAbort + kInterruptDelay);

constexpr int64_t kWarn = 10 * kSecond;        // the default
constexpr int64_t kLeastMargin = 1 * kSecond;  // between the stall error and the timeout
constexpr int64_t kMarginShare = 20;  // a larger margin: the timeout divided by this number
constexpr int64_t kStackAnswer = 2 * kSecond;
// A backward runs for this time before warnings name its missing gradients.
constexpr int64_t kMissingGradients = 1 * kSecond;
constexpr int64_t kNoCalls = 2 * kSecond;  // the pause after which ranks compare recorded calls
// Ranks that made different numbers of forwards wait for each other for this time, at least.
constexpr int64_t kUnevenForwards = 400 * kMillisecond;
// Ranks with different settings wait for each other for this time, at least. A shorter wait may be
// for a long call that matches.
constexpr int64_t kUnevenSettings = 5 * kSecond;
constexpr int64_t kStepEnd = 1 * kSecond;  // the wait for ranks that have not ended a step
static_assert(kNoCalls > 2 * kWatchdogPeriod);
static_assert(kUnevenForwards >= 2 * kWatchdogPeriod);

// ---- the end of a rank --------------------------------------------------------------------------

constexpr int64_t kDelivery = 1 * kSecond;  // the limit for the last message to the store
constexpr int64_t kDeliveredRead =
    700 * kMillisecond;  // the wait until other hosts have read the message

// After SIGTERM. The launcher sends SIGKILL later.
constexpr int64_t kFindReason = 500 * kMillisecond;  // the search for a lost rank
constexpr int64_t kPrintReport = 1 * kSecond;        // by the interpreter
constexpr int64_t kWriteReport = 1 * kSecond;        // by the watchdog
constexpr int64_t kAwaitEnd = 2 * kSecond;  // the wait of the interpreter while the watchdog writes
constexpr int64_t kLauncherKill = 30 * kSecond;  // torchrun
static_assert(kFindReason > 2 * kWatchdogPeriod);
static_assert(kAwaitEnd > kWriteReport);
static_assert(kFindReason + std::max(kPrintReport, kWriteReport) < kLauncherKill);

}  // namespace ddpx::health::times
