#include "failure.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <sstream>

#include "../machine/record.h"

namespace ddpx::health {
namespace {

constexpr uint32_t kMostRanks = 1 << 16;  // of a group

// "0-7,12".
std::string in_ranges(const std::set<int>& ranks) {
  std::string text;
  for (const auto& run : to_runs(ranks)) {
    text += (text.empty() ? "" : ",") + std::to_string(run.first);
    text += run.last == run.first ? "" : "-" + std::to_string(run.last);
  }
  return text;
}

// The remedy for the cause.
std::string remedy(const Failure& failure) {
  switch (failure.kind) {
    case FailureKind::kStalled:
      return failure.lost.empty()
                 ? "Check the connections between the ranks, and the load of their machines. "
                 : "ddpx.peer_stack(model, rank) shows what that rank does. The rank may wait in a "
                   "collective call that the other ranks do not make. ";
    case FailureKind::kLeft:
      return "Give every rank the same number of steps, or use model.join() for uneven inputs. ";
    case FailureKind::kDead:
      return "";
    case FailureKind::kFrozen:
      return "Pass find_unused_parameters=True, or freeze the same parameters on all ranks. ";
    case FailureKind::kForwards:
      return "A forward of ReducerDDP takes over rank 0's buffers, so all ranks make the same "
             "number of forwards. Call model.module(...) for a forward of one rank alone, or pass "
             "forward_sync_buffers=False. ";
    case FailureKind::kSettings:
      return "Give the wrapper this setting on all ranks, before the same step. ";
    case FailureKind::kMismatch:
      break;
  }
  return "Look for a collective call (dist.barrier(), dist.all_reduce(...), a forward or backward "
         "of another wrapper) that only some ranks make. A collective call for only some ranks "
         "needs its own group: dist.new_group(). Code that writes into gradients while backward "
         "runs has the same effect. ";
}

const char* consequence(FailureKind kind) {
  if (kind == FailureKind::kMismatch) {
    return "Sums may contain tensors of different calls. ";
  }
  return kind == FailureKind::kFrozen
             ? "A rank that froze a parameter did not get its average. The weights of the ranks "
               "differ from then on. "
             : "The gradients of this step are not averaged. ";
}

// The way to continue training.
std::string way_on(const RankReport& report) {
  const std::string restart = "Start the job again from a checkpoint";
  if (report.failure.lost.empty() || !report.can_shrink) {
    return restart + ".";
  }
  return report.failure.kind == FailureKind::kStalled
             ? restart + ", or end the process of the late rank, and then call ddpx.shrink(model)."
             : restart +
                   ", or catch ddpx.RankFailure and call ddpx.shrink(model, optimizer, step=step).";
}

}  // namespace

const char* error_name(FailureKind kind) {
  return kind >= FailureKind::kMismatch  ? "ddpx.RankMismatch"
         : kind == FailureKind::kStalled ? "ddpx.RankStalled"
                                         : "ddpx.RankFailure";
}

std::string Failure::encode() const {
  std::set<int> ranks;
  for (const auto& each : lost) {
    ranks.insert(each.rank);
  }
  auto record = health::encode(kind, how, to_runs(ranks));
  for (const auto& each : lost) {
    record += health::encode(each.rank, each.host, each.pid, each.what, each.cause, each.last_seen);
  }
  return record;
}

std::optional<Failure> Failure::decode(std::string_view record) {
  Failure failure;
  std::vector<Run> runs;
  if (!health::decode(record, failure.kind, failure.how, runs) ||
      failure.kind > FailureKind::kSettings) {
    return std::nullopt;
  }
  const auto all = from_runs<int>(runs, kMostRanks);
  std::set<int> ranks(all.begin(), all.end());
  LostRank each;
  while (health::decode(
      record, each.rank, each.host, each.pid, each.what, each.cause, each.last_seen)) {
    failure.lost.push_back(each);
    ranks.erase(each.rank);
  }
  for (const int rank : ranks) {
    failure.lost.push_back({rank, "unknown", 0, "is lost, too", {}, {}, false});
  }
  const bool says_how = failure.is_mismatch() || !failure.how.empty();
  return says_how || !failure.lost.empty() ? std::make_optional(failure) : std::nullopt;
}

std::string Failure::describe(const RankNames& names) const {
  if (lost.empty()) {
    return how;
  }
  std::ostringstream out;
  const char* separator = "";
  std::set<int> others;
  for (const auto& lost_rank : lost) {
    if (!lost_rank.has_details) {
      others.insert(lost_rank.rank);
      continue;
    }
    out << separator << "rank " << lost_rank.rank << " (" << names.prefix(lost_rank.rank) << "host "
        << lost_rank.host;
    if (lost_rank.pid != 0) {
      out << ", pid " << lost_rank.pid;
    }
    out << ") " << lost_rank.what;
    if (!lost_rank.cause.empty()) {
      out << " (" << lost_rank.cause << ")";
    }
    if (!lost_rank.last_seen.empty()) {
      out << "; it was last seen in " << lost_rank.last_seen;
    }
    separator = ". And ";
  }
  if (!others.empty()) {
    const bool one = others.size() == 1;
    out << separator << (one ? "rank " : "ranks ") << in_ranges(others)
        << (one ? " is lost, too" : " are lost, too");
  }
  return out.str();
}

bool RankReport::is_about_this_rank() const {
  return std::any_of(failure.lost.begin(), failure.lost.end(), [this](const LostRank& each) {
    return each.rank == rank;
  });
}

std::string RankReport::text() const {
  auto described = failure.describe(names);
  if (described.ends_with('.')) {
    described.pop_back();
  }
  std::ostringstream out;
  out << "[ddpx " << names.name(rank);
  if (step >= 0) {
    out << ", step " << step;
  }
  out << ", phase " << to_string(doing) << "] ";
  if (is_about_this_rank()) {
    out << "this rank is the " << (failure.kind == FailureKind::kStalled ? "late" : "lost")
        << " one, and the other ranks have given it up: ";
  }
  out << described << ".";
  if (bucket && !failure.is_mismatch()) {
    out << " This rank was waiting for bucket " << *bucket << " (" << join_names(params) << ").";
  }
  out << ' ' << consequence(failure.kind) << remedy(failure) << way_on(*this);
  if (!said.empty()) {
    out << " The backend said: " << said;
  }
  return out.str();
}

void raise(const RankReport& report) {
  if (const auto raise_in_interpreter = raiser.load()) {
    raise_in_interpreter(report);
  }
  throw std::runtime_error(report.text());
}

}  // namespace ddpx::health
