#include "cause_search.h"

#include <algorithm>

#include "lost_ranks.h"

namespace ddpx::health {
namespace {

std::optional<Failure> find_declared(const GroupState& state) {
  const auto* table = state.table();
  const auto text = table == nullptr ? std::nullopt : table->declared();
  return text ? Failure::decode(*text) : std::nullopt;
}

std::optional<Failure> find_ended(const GroupState& state, bool also_left) {
  if (auto declared = find_declared(state)) {
    return declared;
  }
  auto dead = find_dead(state.peers, also_left ? Left::kOfThisHost : Left::kNone);
  // A rank may have declared a failure meanwhile, and ended because of this failure.
  auto declared = dead ? find_declared(state) : std::nullopt;
  return declared ? declared : dead;
}

// Finds ranks whose scripts have caught an error of a step, and have not begun another step. An
// error of the module's own code in a forward does not count: the script may need time to try the
// step again, for example after a lack of memory. An error of a step in which this rank raised an
// error, too, does not count: the script may handle the error on all ranks, and one rank may take
// longer. Warnings about the late rank have the error.
std::optional<Failure> find_fault(const GroupState& state, const Wait& wait) {
  const auto ours = state.page.view().faulty.load();
  const auto is_faulty = [&ours](const std::shared_ptr<Peer>& peer) {
    const auto& page = *peer->page();
    const auto theirs = page.faulty.load();
    const bool raised_too =
        ours.since_ns != 0 && ours.model == theirs.model && ours.step == theirs.step;
    return page.fault == Fault::kOfStep && now_ns() - theirs.since_ns > times::kNextStep &&
           !raised_too;
  };
  const auto peers = state.peers.with_page();
  if (std::none_of(peers->begin(), peers->end(), is_faulty)) {
    return std::nullopt;
  }
  Failure failure;
  for (const int rank : missing_ranks(state.peers, wait)) {
    const auto peer = state.peers.peer(rank);
    if (peer && peer->page() != nullptr && is_faulty(peer)) {
      auto lost = state.peers.lost_rank(
          rank, "raised an error in a step, and has not begun another step since");
      lost.cause = peer->page()->fault_text.read();
      failure.lost.push_back(std::move(lost));
    }
  }
  return failure.lost.empty() ? std::nullopt : std::make_optional(failure);
}

// A rank that has left is lost only if it is missing in the call: it may have done its part before.
std::optional<Failure> find_left(const GroupState& state, const Wait& wait) {
  auto left = find_dead(state.peers, Left::kAll);
  const auto missing = left ? missing_ranks(state.peers, wait) : std::vector<int>();
  const bool matters =
      left && std::any_of(left->lost.begin(), left->lost.end(), [&missing](const auto& each) {
        return std::count(missing.begin(), missing.end(), each.rank) > 0;
      });
  return matters ? left : std::nullopt;
}

std::optional<Failure> find_silent_or_unknown(const GroupState& state, int64_t since_ns) {
  const auto store = state.channel->store_state();
  const auto* table = state.table();
  const bool is_prompt = store == StoreState::kAnswers && table != nullptr;
  auto silent = is_prompt ? find_silent(state.peers, since_ns, table->read_ns) : std::nullopt;
  return silent ? silent : find_unknown(state.peers, /*store_answers=*/store < StoreState::kLost);
}

// Without the store, ranks do not learn of failures of other hosts. Before all ranks are known,
// only the end of the store is a failure, and only if the rank that serves the store is unknown.
std::optional<Failure> find_lost_store(const GroupState& state, StoreState least) {
  const auto store = state.channel->store_state();
  const auto* table = state.table();
  const auto stage = state.stage();
  if (store < least || stage == HostTable::Stage::kOneHost ||
      (table != nullptr && table->store_may_end)) {
    return std::nullopt;
  }
  if (stage == HostTable::Stage::kManyHosts) {
    return store_lost(state.peers, store != StoreState::kEnded);
  }
  const auto serving = state.peers.store_rank();
  const bool server_is_unknown =
      !serving || (*serving != state.group.rank && !state.peers.peer(*serving));
  return server_is_unknown && store == StoreState::kEnded
             ? find_unknown(state.peers, /*store_answers=*/false)
             : std::nullopt;
}

}  // namespace

std::optional<Failure> find_cause(
    const GroupState& state, Reason reason, int64_t since_ns, const std::optional<Wait>& wait) {
  const auto lasted_ns = now_ns() - since_ns;
  const auto left_ns =
      wait && !wait->is_certain() ? times::kUncertainLeftMatters : times::kLeftMatters;
  const bool call_failed = reason >= Reason::kCallFailed;
  const bool also_left = call_failed && !state.is_terminated();
  const bool waits_for_long = reason == Reason::kWaits && lasted_ns > left_ns;
  const bool waits_in_step =
      reason == Reason::kWaits && !(wait && wait->kind == Wait::Kind::kCalls);
  auto failure = find_ended(state, also_left);
  if (!failure && waits_in_step && lasted_ns > times::kFaultMatters) {
    failure = find_fault(state, wait.value_or(Wait{state.activity()}));
  }
  if (!failure && (waits_for_long || also_left)) {
    failure = find_left(state, wait.value_or(Wait{state.activity()}));
  }
  if (!failure && reason >= Reason::kAllHadTime) {
    failure = find_silent_or_unknown(state, since_ns);
  }
  if (!failure && reason == Reason::kWaits && lasted_ns > times::kStoreMatters) {
    failure = find_lost_store(state, StoreState::kSilent);
  }
  if (!failure && reason == Reason::kHasNoLease) {
    failure = lasted_ns > times::lease_wait(state.group.lease_ns)
                  ? store_lost(state.peers, /*silent=*/true)
                  : find_lost_store(state, StoreState::kEnded);
  }
  if (!failure && reason == Reason::kSearchIsOver) {
    const auto serving = state.peers.store_rank();
    const auto server = serving ? state.peers.peer(*serving) : nullptr;
    const bool is_far = !serving || (server && !server->local());
    failure = is_far ? find_lost_store(state, StoreState::kLost) : std::nullopt;
    if (!failure && also_left) {
      failure = find_dead(state.peers, Left::kAll);
    }
  }
  return failure;
}

}  // namespace ddpx::health
