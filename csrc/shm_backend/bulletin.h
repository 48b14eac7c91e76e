// What ranks of different hosts tell each other through the store when something has gone wrong.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <optional>
#include <string>

namespace ddpx {

// Thread-safe. Throws what the store throws; then nobody can be told anything.
class Bulletin {
 public:
  // Has a connection of its own, since another thread may wait on `store` for long.
  explicit Bulletin(const c10::intrusive_ptr<c10d::Store>& store);

  // Why the group cannot go on. The first failure stands, and is returned.
  std::string post(const std::string& failure);
  std::optional<std::string> failure();

  // Asks all leaders to say how many all-reduces between hosts they have begun.
  void call_roll();
  bool roll_is_called();
  void answer(int rank, uint64_t num_begun);
  std::optional<uint64_t> answer_of(int rank);

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace ddpx
