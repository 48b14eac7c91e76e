// Channels of ranks that live in one process, without threads and with a clock that tests set.
#pragma once

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fake_store.h"
#include "health/hosts/host_channel.h"
#include "health/hosts/store.h"

namespace ddpx::health {

// Ranks that claim the same machine. They can open the pages of ranks with the same letter.
class Machine {
 public:
  explicit Machine(std::string letters) : letters_(std::move(letters)) {
    const auto size = static_cast<int>(letters_.size());
    for (int rank = 0; rank < size; ++rank) {
      auto* memory = std::calloc(1, HostTable::num_bytes(size));
      pages_.emplace_back(static_cast<HostTable*>(memory), std::free);
      introductions_.push_back({rank, "host", {"machine", 1, 1}, 1, token_of(rank)});
    }
    for (const auto& own : introductions_) {
      channels_.push_back(
          std::make_unique<HostChannel>(
              HostChannel::Settings{own, size}, std::make_shared<Probe>(*this, own.rank), [this] {
                return ++now_ns_;
              }));
    }
  }

  static uint64_t token_of(int rank) {
    return 100 + static_cast<uint64_t>(rank);
  }
  HostChannel& operator[](int rank) {
    return *channels_[static_cast<std::size_t>(rank)];
  }
  void introduce(int rank) {
    (*this)[rank].introduce(store_);
  }
  // Does the same as the threads of a keeper.
  void step(int rank) {
    (*this)[rank].step(store_);
  }
  void listen(int rank) {
    (*this)[rank].listen(store_);
  }
  void leave(int rank) {
    (*this)[rank].leave(store_, /*serves_store=*/rank == 0);
  }
  // Whether messages of the host whose first rank this is were read since clear_reads().
  bool has_read(int rank) const {
    return texts_->keys_read.contains(host_key(token_of(rank)));
  }
  void clear_reads() {
    texts_->keys_read.clear();
  }
  void pass(int64_t time_ns) {
    now_ns_ += time_ns;
  }
  int64_t now_ns() const {
    return now_ns_;
  }
  // The collective call. Returns the hosts of the ranks.
  std::vector<uint64_t> meet() {
    std::vector<uint64_t> hosts;
    for (const auto& channel : channels_) {
      hosts.push_back(channel->find_host(introductions_));
    }
    for (const auto& channel : channels_) {
      channel->meet(introductions_, hosts);
    }
    return hosts;
  }

 private:
  class Probe final : public HostProbe {
   public:
    Probe(Machine& machine, int rank) : machine_(machine), rank_(rank) {}

    std::shared_ptr<HostTable> open(const Introduction& rank) override {
      const auto& letters = machine_.letters_;
      const auto other = static_cast<std::size_t>(rank.rank);
      const bool opens = letters[static_cast<std::size_t>(rank_)] == letters[other];
      return opens ? machine_.pages_[other] : nullptr;
    }
    bool lives(int) override {
      return true;
    }
    std::string describe_lost(const std::vector<int>& ranks, int64_t) override {
      std::string text = "lost:";
      for (const int rank : ranks) {
        text += " " + std::to_string(rank);
      }
      return text;
    }
    std::string calls() override {
      return {};
    }
    std::optional<std::string> compare_calls(int, const std::string&) override {
      return std::nullopt;
    }

   private:
    Machine& machine_;
    const int rank_;
  };

  const std::string letters_;
  int64_t now_ns_ = 0;
  std::vector<std::shared_ptr<HostTable>> pages_;
  std::vector<Introduction> introductions_;
  const std::shared_ptr<FakeStore> texts_ = std::make_shared<FakeStore>();
  FakeConnection store_{texts_};
  std::vector<std::unique_ptr<HostChannel>> channels_;
};

}  // namespace ddpx::health
