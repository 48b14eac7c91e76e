// Which params got a gradient on this rank since the last agreement, and which on any rank.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../comm/collective.h"

namespace ddpx {

// A param that no rank used must keep its gradient as it is (None, or an accumulated one). Ranks
// agree by summing a vector of one integer per param. Its low 16 bits count the ranks that used the
// param; its high 16 bits count the ranks on which the param ever arrived in a nested graph task.
// Reading the sum back costs a device synchronisation, so it is put off until a param is found that
// this rank did not use.
// Not thread-safe: the reducer's mutex guards it.
class UsedMap {
 public:
  // What ranks agreed on once; never changed afterwards. Empty if ranks never agreed.
  struct Sums {
    at::Tensor of_ranks;         // on the params' device; undefined if there is no other rank
    std::vector<int32_t> alone;  // what this rank said, if it is the only one

    // One integer per param, as summed. Waits for the device.
    std::vector<int32_t> read() const;

    // Per param, how many ranks used it. Waits for the device.
    std::vector<int32_t> num_ranks_using() const;
  };

  UsedMap(std::size_t num_params, c10::Device device);

  // This rank used the param. Also called in backwards that are not synchronised.
  void mark(std::size_t param_index);

  // The next agreement tells that the param has arrived in a nested graph task on this rank.
  void mark_nested(std::size_t param_index);

  // Starts the agreement on what was marked since the last clear(). `collective` must live until
  // the next one, or as long as this.
  void launch(Collective& collective);

  // Whether this rank marked the param.
  bool marked(std::size_t param_index) const {
    return num_users(local_[param_index]) != 0;
  }

  // What each rank said of each param, summed: how many ranks used it. Waits for the agreement.
  const std::vector<int32_t>& num_ranks_using();

  // Per param, how many ranks told of it by mark_nested(); empty unless num_ranks_using() was read
  // since the last launch() or clear().
  const std::vector<int32_t>& num_ranks_nesting() const {
    return nesting_;
  }

  // Whether this rank marked every param; nobody can then have found one that no rank used.
  bool all_marked() const;

  // Waits for the agreement, if nobody has yet.
  void settle();

  // The last agreement that was waited for; after clear(), only if there is no newer one.
  const Sums& settled() const {
    return settled_;
  }

  // Leaves an agreement whose answer nobody needed to the backend.
  void abandon() {
    work_ = nullptr;
    agreed_ = false;
  }

  // Forgets all marks. An agreement whose answer nobody needed is waited for at the next launch.
  void clear();

 private:
  static constexpr int kNestedShift = 16;
  static constexpr int kMostRanks = (1 << (kNestedShift - 1)) - 1;  // for an int32_t

  static int32_t num_users(int32_t value) {
    return value & ((1 << kNestedShift) - 1);
  }
  static std::vector<int32_t> users_of(std::vector<int32_t> values);

  c10::Device device_;
  std::vector<int32_t> local_;
  std::vector<int32_t> global_;   // users; empty until the sum has been read back
  std::vector<int32_t> nesting_;  // likewise
  at::Tensor summed_;             // on the params' device, in the hands of the backend
  Collective::Work work_;
  Collective* launched_in_ = nullptr;
  bool agreed_ = false;  // since the last clear()
  Sums settled_;
};

}  // namespace ddpx
