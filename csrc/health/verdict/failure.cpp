#include "failure.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <set>
#include <sstream>

#include "../machine/fields.h"

namespace ddpx::health {
namespace {

std::atomic<void (*)(const RankReport&)> installed_raiser{nullptr};

constexpr std::size_t kNumFields = 6;  // of a lost rank
constexpr int kMostRanks = 1 << 16;    // of a group

// "0-7,12".
std::string ranges_of(const std::set<int>& ranks) {
  std::string text;
  for (auto rank = ranks.begin(); rank != ranks.end();) {
    const int first = *rank;
    int last = first;
    while (++rank != ranks.end() && *rank == last + 1) {
      last = *rank;
    }
    text += (text.empty() ? "" : ",") + std::to_string(first);
    text += last == first ? "" : "-" + std::to_string(last);
  }
  return text;
}

std::set<int> ranks_from(const std::string& text) {
  std::set<int> ranks;
  std::istringstream ranges(text);
  for (std::string range; std::getline(ranges, range, ',');) {
    const auto dash = range.find('-');
    const auto first = to_number<int>(range.substr(0, dash));
    const auto last = dash == std::string::npos ? first : to_number<int>(range.substr(dash + 1));
    if (!first || !last) {
      break;
    }
    for (int rank = std::max(*first, 0); rank <= std::min(*last, kMostRanks - 1); ++rank) {
      ranks.insert(rank);
    }
  }
  return ranks;
}

// What to do about the cause.
std::string remedy(const Failure& failure) {
  switch (failure.kind) {
    case FailureKind::kStalled:
      return failure.lost.empty()
                 ? "Look at the connections between the ranks, and at what else their machines do. "
                 : "Look at what that rank does, as ddpx.peer_stack(model, rank) shows it: it may "
                   "wait in a collective call that the others do not make. ";
    case FailureKind::kLeft:
      return "Give every rank the same number of steps, or use model.join() for uneven inputs. ";
    case FailureKind::kDead:
      return "";
    case FailureKind::kFrozen:
      return "Pass find_unused_parameters=True, or freeze the same parameters on all ranks. ";
    case FailureKind::kMismatch:
      break;
  }
  return "Look for a collective call (dist.barrier(), dist.all_reduce(...), a forward or backward "
         "of another wrapper) that only some ranks make; one for some ranks needs a group of "
         "theirs, by dist.new_group(). Code that writes into gradients while backward runs shows "
         "in "
         "this way, too. ";
}

const char* consequence(FailureKind kind) {
  switch (kind) {
    case FailureKind::kMismatch:
      return "Tensors may have been summed with what does not belong to them. ";
    case FailureKind::kFrozen:
      return "A rank that froze a parameter did not get its average, so that the weights of ranks "
             "differ from then on. ";
    case FailureKind::kDead:
    case FailureKind::kLeft:
    case FailureKind::kStalled:
      break;
  }
  return "The gradients of this step are not averaged. ";
}

// What to do to train on.
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
  switch (kind) {
    case FailureKind::kMismatch:
    case FailureKind::kFrozen:
      return "ddpx.RankMismatch";
    case FailureKind::kStalled:
      return "ddpx.RankStalled";
    case FailureKind::kDead:
    case FailureKind::kLeft:
      break;
  }
  return "ddpx.RankFailure";
}

std::string Failure::to_text() const {
  std::set<int> ranks;
  for (const auto& each : lost) {
    ranks.insert(each.rank);
  }
  auto text = join_fields({std::to_string(static_cast<int>(kind)), how, ranges_of(ranks)});
  for (const auto& each : lost) {
    text += join_fields(
        {std::to_string(each.rank),
         each.host,
         std::to_string(each.pid),
         each.what,
         each.cause,
         each.last_seen});
  }
  return text;
}

std::optional<Failure> Failure::from_text(const std::string& text) {
  const auto fields = split_fields(text);
  const auto code = fields.size() < 3 ? std::nullopt : to_number<int>(fields[0]);
  if (!code || *code < 0 || *code > static_cast<int>(FailureKind::kFrozen)) {
    return std::nullopt;
  }
  Failure failure{static_cast<FailureKind>(*code), {}, fields[1]};
  auto ranks = ranks_from(fields[2]);
  for (std::size_t at = 3; at + kNumFields <= fields.size(); at += kNumFields) {
    const auto rank = to_number<int>(fields[at]);
    const auto pid = to_number<int>(fields[at + 2]);
    if (!rank || !pid) {
      break;
    }
    failure.lost.push_back(
        {*rank, fields[at + 1], *pid, fields[at + 3], fields[at + 4], fields[at + 5]});
    ranks.erase(*rank);
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
    out << separator << (one ? "rank " : "ranks ") << ranges_of(others)
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
        << " one, and the others have given it up: ";
  }
  out << described << ".";
  if (bucket && !failure.is_mismatch()) {
    constexpr std::size_t kMostNames = 8;
    out << " This rank was waiting for bucket " << *bucket << " (" << join_names(params, kMostNames)
        << ").";
  }
  out << ' ' << consequence(failure.kind) << remedy(failure) << way_on(*this);
  if (!said.empty()) {
    out << " The backend said: " << said;
  }
  return out.str();
}

void raise(const RankReport& report) {
  if (const auto raiser = installed_raiser.load()) {
    raiser(report);
  }
  throw std::runtime_error(report.text());
}

void set_raiser(void (*raiser)(const RankReport& report)) {
  installed_raiser.store(raiser);
}

}  // namespace ddpx::health
