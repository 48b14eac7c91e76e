// The texts that ranks of different hosts exchange through the store after a failure.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <optional>
#include <string>

namespace ddpx {

// Owned by BetweenHosts. Thread-safe; needs no lock. All functions throw the errors of the store.
class Bulletin {
 public:
  // Uses a connection of its own, since another thread may wait on `store` for long.
  explicit Bulletin(const c10::intrusive_ptr<c10d::Store>& store);

  // The reason why the group cannot continue. `post` keeps the first failure only, and returns it.
  std::string post(const std::string& failure);
  std::optional<std::string> failure();

  // Asks all leaders for the number of all-reduces between hosts that they have begun.
  void start_query();
  bool query_started();
  void answer(int rank, uint64_t num_begun);
  std::optional<uint64_t> answer_of(int rank);  // nullopt if there is no valid answer

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace ddpx
