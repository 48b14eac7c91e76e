// The params that got a gradient since the last exchange: on this rank, and on any rank.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "../comm/collective.h"

namespace ddpx {

// A param that no rank used must keep its gradient unchanged (None, or an accumulated gradient). To
// find such params, ranks sum a vector of one integer per param. The low 16 bits count the ranks
// that used the param. The high 16 bits count the ranks on which the param ever arrived in a nested
// graph task. Reading the sum costs a device synchronization, so the read waits until a param is
// found that this rank did not use.
// The reducer owns the map, under its mutex.
class UsedMap {
 public:
  // The result of one exchange; never changed afterwards. Empty if ranks never exchanged.
  struct Sums {
    at::Tensor of_ranks;  // on the params' device; undefined if there is no other rank
    std::optional<c10::Stream> stream;  // that waited for the exchange; nullopt on CPU
    std::vector<int32_t> alone;         // the marks of this rank, if no other rank exists

    // One integer per param, as summed. Waits for the device. Any thread may read, on any stream.
    std::vector<int32_t> read() const;

    // Per param, how many ranks used it. Waits for the device.
    std::vector<int32_t> num_ranks_using() const;
  };

  UsedMap(std::size_t num_params, c10::Device device);

  // This rank used the param. Also called in backwards that are not synchronized.
  void mark(std::size_t param_index);

  // Takes the mark back: the gradient of the param is gone.
  void unmark(std::size_t param_index);

  // The next exchange informs other ranks that the param has arrived in a nested graph task on this
  // rank.
  void mark_nested(std::size_t param_index);

  // Launches the exchange of what was marked since the last clear(). `collective` must live until
  // the next launch, or as long as the map. UserError if there are more ranks than 16 bits count.
  void launch(Collective& collective);

  // Whether this rank marked the param.
  bool marked(std::size_t param_index) const {
    return num_users(local_[param_index]) != 0;
  }

  // Per param, how many ranks used it. Waits for the exchange.
  const std::vector<int32_t>& num_ranks_using();

  // Per param, on how many ranks mark_nested() was called; empty unless num_ranks_using() was read
  // since the last launch() or clear().
  const std::vector<int32_t>& num_ranks_nesting() const {
    return nesting_;
  }

  // Waits for the exchange, unless it was waited for before.
  void wait();

  // The last exchange that was waited for; after clear(), only if no newer exchange was launched.
  const Sums& last_sums() const {
    return last_sums_;
  }

  // Leaves an exchange whose sums were not read to the backend.
  void abandon() {
    work_ = nullptr;
    exchanged_ = false;
  }

  // Forgets all marks. An unread exchange is waited for before the next one is launched.
  void clear();

 private:
  static constexpr int kNestedShift = 16;
  static constexpr int kMostRanks = (1 << (kNestedShift - 1)) - 1;  // for an int32_t

  static constexpr int32_t kUsers = (1 << kNestedShift) - 1;

  static int32_t num_users(int32_t value) {
    return value & kUsers;
  }
  static std::vector<int32_t> users_of(std::vector<int32_t> values);

  c10::Device device_;
  std::vector<int32_t> local_;
  std::vector<int32_t>
      global_;  // number of ranks that used the param; empty until the sum was read
  std::vector<int32_t> nesting_;  // number of ranks with nested arrivals; empty until then
  at::Tensor summed_;             // on the device of the params; the backend writes to it
  Collective::Work work_;
  Collective* collective_ = nullptr;
  bool exchanged_ = false;  // since the last clear()
  Sums last_sums_;
};

}  // namespace ddpx
