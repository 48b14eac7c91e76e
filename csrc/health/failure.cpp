#include "failure.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <cstddef>
#include <cstdio>
#include <sstream>
#include <system_error>
#include <utility>

namespace ddpx::health {
namespace {

std::atomic<void (*)(const RankReport&)> installed_raiser{nullptr};

// Netstrings: texts of any content, one behind the other.
void put(std::string& out, const std::string& text) {
  out += std::to_string(text.size()) + ":" + text;
}

template <class Number>
std::optional<Number> number(const std::string& text) {
  Number value = 0;
  const auto* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  return rest == end && error == std::errc() ? std::make_optional(value) : std::nullopt;
}

std::optional<std::string> take(const std::string& in, std::size_t& at) {
  const auto colon = in.find(':', at);
  if (colon == std::string::npos) {
    return std::nullopt;
  }
  const auto length = number<std::size_t>(in.substr(at, colon - at));
  if (!length || *length > in.size() - colon - 1) {
    return std::nullopt;
  }
  at = colon + 1 + *length;
  return in.substr(colon + 1, *length);
}

std::optional<Casualty> take_casualty(const std::string& in, std::size_t& at) {
  std::array<std::string, 6> fields;
  for (auto& field : fields) {
    auto text = take(in, at);
    if (!text) {
      return std::nullopt;
    }
    field = std::move(*text);
  }
  const auto rank = number<int>(fields[0]);
  const auto pid = number<int>(fields[2]);
  if (!rank || !pid) {
    return std::nullopt;
  }
  return Casualty{*rank, fields[1], *pid, fields[3], fields[4], fields[5]};
}

std::string remedy(const Failure& failure) {
  switch (failure.kind) {
    case FailureKind::kStalled:
      if (failure.casualties.empty()) {
        return "Look at the connections between the ranks, and at what else their machines do. ";
      }
      return "Look at what that rank does, as ddpx.stack_of(model, rank) shows it: it may wait "
             "in a collective call that the others do not make. ";
    case FailureKind::kLeft:
      return "Give every rank the same number of steps, or use model.join() for uneven inputs. ";
    case FailureKind::kDead:
      return "";
    case FailureKind::kMismatch:
      return "Look for a collective call (dist.barrier(), dist.all_reduce(...), a forward or "
             "backward of another wrapper) that only some ranks make; one for some ranks needs a "
             "group of theirs, by dist.new_group(). Code that writes into gradients while backward "
             "runs "
             "shows in this way, too. ";
  }
  return "";
}

const char* consequence(FailureKind kind) {
  return kind == FailureKind::kMismatch
             ? "Tensors may have been summed with what does not belong to them. "
             : "The gradients of this step are not averaged. ";
}

const char* way_on(const Failure& failure) {
  switch (failure.kind) {
    case FailureKind::kMismatch:
      return "Start the job again from a checkpoint.";
    case FailureKind::kStalled:
      if (failure.casualties.empty()) {
        return "Start the job again from a checkpoint.";
      }
      return "Start the job again from a checkpoint; or end the process of the late rank, and then "
             "call ddpx.shrink(model) to go on without it.";
    case FailureKind::kDead:
    case FailureKind::kLeft:
      break;
  }
  return "Start the job again from a checkpoint. Where survivors live on, as under 'ddpx run "
         "--keep-survivors', they can catch ddpx.RankFailure and call ddpx.shrink(model, "
         "optimizer, step=step) instead.";
}

}  // namespace

const char* error_name(FailureKind kind) {
  switch (kind) {
    case FailureKind::kMismatch:
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
  std::string out;
  put(out, std::to_string(static_cast<int>(kind)));
  put(out, how);
  for (const auto& casualty : casualties) {
    put(out, std::to_string(casualty.rank));
    put(out, casualty.host);
    put(out, std::to_string(casualty.pid));
    put(out, casualty.what);
    put(out, casualty.cause);
    put(out, casualty.last_seen);
  }
  return out;
}

std::optional<Failure> Failure::from_text(const std::string& text) {
  std::size_t at = 0;
  const auto kind = take(text, at);
  const auto code = kind ? number<int>(*kind) : std::nullopt;
  auto how = code ? take(text, at) : std::nullopt;
  if (!how) {
    return std::nullopt;
  }
  Failure failure{static_cast<FailureKind>(*code), {}, std::move(*how)};
  while (auto casualty = take_casualty(text, at)) {
    failure.casualties.push_back(std::move(*casualty));
  }
  // Where it was too long for its place, the last ones are cut off.
  const bool nobody_lost = failure.kind == FailureKind::kMismatch ||
                           (failure.kind == FailureKind::kStalled && !failure.how.empty());
  return nobody_lost || !failure.casualties.empty() ? std::make_optional(failure) : std::nullopt;
}

std::string Failure::describe(const RankNames& names) const {
  if (casualties.empty()) {
    return how;
  }
  std::ostringstream out;
  const char* separator = "";
  for (const auto& casualty : casualties) {
    out << separator << "rank " << casualty.rank << " (" << names.prefix(casualty.rank) << "host "
        << casualty.host;
    if (casualty.pid != 0) {
      out << ", pid " << casualty.pid;
    }
    out << ") " << casualty.what;
    if (!casualty.cause.empty()) {
      out << " (" << casualty.cause << ")";
    }
    if (!casualty.last_seen.empty()) {
      out << "; it was last seen in " << casualty.last_seen;
    }
    separator = ". And ";
  }
  return out.str();
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
  out << ", phase " << to_string(doing) << "] " << described << ".";
  if (bucket && failure.kind != FailureKind::kMismatch) {
    out << " This rank was waiting for bucket " << *bucket << " (";
    constexpr std::size_t kMost = 8;
    for (std::size_t i = 0; i < params.size() && i < kMost; ++i) {
      out << (i == 0 ? "'" : ", '") << params[i] << "'";
    }
    if (params.size() > kMost) {
      out << " and " << params.size() - kMost << " more";
    }
    out << ").";
  }
  if (std::any_of(
          failure.casualties.begin(), failure.casualties.end(), [this](const Casualty& casualty) {
            return casualty.rank == rank;
          })) {
    out << " That is this rank: the others have given it up.";
  }
  out << ' ' << consequence(failure.kind) << remedy(failure) << way_on(failure);
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
