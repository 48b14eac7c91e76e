#include "group_state.h"

#include <optional>
#include <utility>

#include "calls/call_comparison.h"
#include "machine/record.h"

namespace ddpx::health {
namespace {

std::vector<Introduction> introductions_from(const std::vector<std::string>& texts) {
  std::vector<Introduction> ranks;
  for (const auto& text : texts) {
    if (auto rank = Introduction::decode(text)) {
      ranks.push_back(std::move(*rank));
    }
  }
  return ranks;
}

}  // namespace

class GroupState::Probe final : public HostProbe {
 public:
  Probe(std::weak_ptr<GroupState> state, std::shared_ptr<HostTable> own, uint64_t token)
      : state_(std::move(state)), own_(std::move(own)), token_(token) {}

  std::shared_ptr<HostTable> open(const Introduction& rank) override {
    if (rank.token == token_) {
      return own_;
    }
    const auto state = state_.lock();
    const bool is_near = state && rank.process.machine == state->own.process.machine;
    const auto page = is_near ? open_page(rank, state->group.world_size) : nullptr;
    return page ? std::shared_ptr<HostTable>(page, &page->host) : nullptr;
  }
  bool lives(int rank) override {
    const auto state = state_.lock();
    if (!state || rank == state->group.rank) {
      return state != nullptr;
    }
    const auto peer = state->peers.peer(rank);
    return peer && peer->local() && !peer->ended() &&
           (peer->presence() == Presence::kThere || peer->presence() == Presence::kTerminated);
  }
  std::string describe_lost(const std::vector<int>& ranks, int64_t silent_ns) override {
    Failure failure;
    const auto state = state_.lock();
    for (const int rank : ranks) {
      if (state) {
        failure.lost.push_back(state->peers.lost_rank(
            rank,
            "has not been heard of for " + in_seconds(silent_ns) +
                " s: its machine, or the network to it, is lost or stopped"));
      }
    }
    return failure.encode();
  }
  std::string calls() override {
    const auto state = state_.lock();
    if (!state) {
      return {};
    }
    const auto& page = state->page.view();
    return encode(page.calls.reduced(), page.frozen.encode_all());
  }
  std::optional<std::string> compare_calls(int rank, const std::string& calls) override {
    const auto state = state_.lock();
    std::vector<StepCalls> steps;
    std::string frozen;
    std::string_view record = calls;
    if (!state || !decode(record, steps, frozen)) {
      return std::nullopt;
    }
    const auto& page = state->page.view();
    const auto found = page.calls.find_mismatch(steps);
    if (!found) {
      return std::nullopt;
    }
    const CallsByRank ranks{{state->group.rank, found->first}, {rank, found->second}};
    const auto frozen_by = [&](int by) { return by == rank ? frozen : page.frozen.encode_all(); };
    const auto names = state->peers.names().params(model_of(found->first.wrapper));
    return mismatch_of(ranks, frozen_by, names).encode();
  }

 private:
  const std::weak_ptr<GroupState> state_;
  const std::shared_ptr<HostTable> own_;
  const uint64_t token_;
};

std::shared_ptr<GroupState> GroupState::create(WatchedGroup group, StoreAccess store) {
  std::shared_ptr<GroupState> state(new GroupState(std::move(group), new_token()));
  state->channel = std::make_shared<ChannelThreads>(
      HostChannel::Settings{state->own, state->group.world_size, state->group.lease_ns},
      std::make_shared<Probe>(state, state->page.host(), state->own.token),
      std::move(store));
  return state;
}

GroupState::GroupState(WatchedGroup watched, uint64_t token)
    : group(std::move(watched)),
      page(token, group.world_size),
      own(Introduction::own(group.rank, group.identity, page.fd(), token)),
      peers(group.rank, group.world_size) {}

GroupState::~GroupState() {
  if (channel) {
    channel->stop();
  }
}

// ---- the start ---------------------------------------------------------------------------------

std::string GroupState::introduction() const {
  return has_met_ ? std::string() : own.encode();
}

uint64_t GroupState::find_host(const std::vector<std::string>& introductions) {
  return channel->channel().find_host(introductions_from(introductions));
}

void GroupState::meet(
    const std::vector<std::string>& introductions, const std::vector<uint64_t>& hosts) {
  channel->channel().meet(introductions_from(introductions), hosts);
  has_met_ = true;
  meet();
}

void GroupState::meet() {
  if (const auto table = channel->channel().table()) {
    peers.meet(table, own.process);
  }
}

// ---- hosts -------------------------------------------------------------------------------------

void GroupState::publish_to_hosts() {
  if (auto* known = table()) {
    known->rank(group.rank).activity.store(activity());
    known->rank(group.rank).num_calls = page.view().num_calls.load();
  }
}

void GroupState::want_states() {
  if (auto* known = table()) {
    known->wanted_until_ns = now_ns() + times::kRequest;
  }
}

// ---- this rank ---------------------------------------------------------------------------------

void GroupState::publish_calls() {
  if (group.on_device && group.same_sequence) {
    // The number never decreases. The watchdog and the end of the script may call this function at
    // the same time, and a group that is gone has the number 0.
    auto& published = page.view().num_calls;
    const auto number = group.sequence();
    auto before = published.load();
    while (before < number && !published.compare_exchange_weak(before, number)) {
    }
  }
}

void GroupState::log(const char* event, std::string message, int about) const {
  const auto now = activity();
  LogQueue::instance().add(
      Record{
          event,
          std::move(message),
          {{"rank", std::to_string(group.rank)},
           {"about_rank", std::to_string(about)},
           {"step", std::to_string(now.training_step())},
           {"phase", to_string(now.doing)}},
          weak_from_this()});
}

}  // namespace ddpx::health
