// torch's Store as the channel of the rendezvous.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <string>

#include "../shm/channel.h"

namespace ddpx {

// Lives on the stack of ShmBackend's constructor; the constructing thread uses it. Needs no lock.
class StoreChannel final : public shm::Channel {
 public:
  explicit StoreChannel(c10::intrusive_ptr<c10d::Store> store);

  void set(const std::string& key, const std::string& value) override;
  void append(const std::string& key, const std::string& value) override;
  int64_t count_up(const std::string& key) override;
  std::string get(const std::string& key, std::chrono::milliseconds timeout) override;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace ddpx
