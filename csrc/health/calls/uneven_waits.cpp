#include "uneven_waits.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <sstream>
#include <string>

#include "../../count.h"
#include "../times.h"

namespace ddpx::health {
namespace {

// "rank 1 has a communication hook, and rank 0 has none". Empty if the settings are the same, or
// unknown.
std::string different_settings(int rank, uint64_t settings, int other_rank, uint64_t others) {
  struct Flag {
    uint64_t flag;
    const char* if_set;
    const char* otherwise;
  };
  constexpr std::array kFlags{
      Flag{StepCalls::kHasHook, " has a communication hook", " has none"},
      Flag{StepCalls::kIsStatic, " has a static graph", " does not"},
      Flag{StepCalls::kChecksFinite, " checks that gradients are finite", " does not"},
  };
  if (settings == 0 || others == 0) {
    return {};
  }
  std::string text;
  for (const auto& [flag, if_set, otherwise] : kFlags) {
    if (((settings ^ others) & flag) != 0) {
      const bool is_set = (settings & flag) != 0;
      text += (text.empty() ? "rank " : "; rank ") + std::to_string(is_set ? rank : other_rank) +
              if_set + ", and rank " + std::to_string(is_set ? other_rank : rank) + otherwise;
    }
  }
  return text;
}

// Compares the settings of two ranks that wait in the same wrapper, in their last common step. The
// text also has the number of this step.
std::string different_settings_of(
    int rank, const StatusPage& own, int other_rank, const StatusPage& other) {
  const auto ours = own.activity();
  const auto step = std::min(ours.step, other.activity().step);
  for (const auto each : {step, step - 1}) {  // the step of the wait may have no launch yet
    const auto our_calls = own.calls.find(ours.model, each);
    const auto their_calls = our_calls ? other.calls.find(*our_calls) : std::nullopt;
    if (their_calls) {
      const auto text =
          different_settings(rank, our_calls->settings, other_rank, their_calls->settings);
      return text.empty() ? text
                          : text + ", in step " + std::to_string(each) + of_wrapper(ours.model);
    }
  }
  return {};
}

}  // namespace

std::optional<Failure> find_uneven_forwards(const PeerTable& peers, const StatusPage& own) {
  const uint64_t num_ours = own.num_syncs;  // read first, and theirs last: a late read is safe
  const auto ours = own.activity();
  const auto latest_ns = now_ns() - times::kUnevenForwards;
  if (ours.doing != Doing::kBuffers || ours.since_ns > latest_ns || ours.bucket != 0 ||
      ours.model == kNoModel || ours.model == kNotNumbered) {
    return std::nullopt;
  }
  // This rank has launched no bucket of the step that the other rank waits for. All ranks make
  // their calls in the same order, so the other rank has synchronized buffers at least as often.
  const auto with_page = peers.with_page();
  for (const auto& peer : *with_page) {
    const auto theirs = peer->page()->activity();
    const uint64_t num_theirs = peer->page()->num_syncs;
    if (theirs.doing != Doing::kWaiting || theirs.since_ns > latest_ns ||
        theirs.model != ours.model || theirs.step != ours.step || num_theirs >= num_ours) {
      continue;
    }
    std::ostringstream out;
    out << "rank " << peers.rank() << " has begun " << count(num_ours - num_theirs, "more forward")
        << " than rank " << peer->rank() << " by step " << ours.step << ": rank " << peers.rank()
        << " waits for the buffers of another forward, and rank " << peer->rank()
        << " waits for the gradients of rank " << peers.rank();
    return Failure{FailureKind::kForwards, {}, out.str()};
  }
  return std::nullopt;
}

std::optional<Failure> find_uneven_settings(
    const PeerTable& peers, const StatusPage& own, int64_t since_ns) {
  const auto ours = own.activity();
  const auto waits = [model = ours.model,
                      latest_ns = now_ns() - times::kUnevenSettings](const Activity& activity) {
    return may_wait(activity.doing) && activity.since_ns <= latest_ns && activity.model == model;
  };
  if (!waits(ours) || now_ns() - since_ns < times::kUnevenSettings) {
    return std::nullopt;
  }
  std::string text;
  const auto all = peers.all();
  for (int rank = 0; rank < static_cast<int>(all.size()); ++rank) {
    if (rank == peers.rank()) {
      continue;
    }
    const auto page = all[rank] ? all[rank]->page() : nullptr;
    if (!page || !waits(page->activity())) {
      return std::nullopt;  // the other ranks may wait for this one
    }
    if (text.empty()) {
      text = different_settings_of(peers.rank(), own, rank, *page);
    }
  }
  return text.empty() ? std::nullopt
                      : std::make_optional(Failure{FailureKind::kSettings, {}, text});
}

}  // namespace ddpx::health
