// Finds the first gradient that is not finite, on any rank, before it is lost in the average.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "../buckets/stream_join.h"
#include "../comm/collective.h"

namespace ddpx {

// Each rank notes the largest magnitude of every gradient, which is not finite if the gradient is
// not. A device is not waited for meanwhile. At the end of backward ranks tell each other the first
// such param, by summing a vector with a place for each rank.
// Owned by the reducer, guarded by its mutex; agree() may run without it.
class FiniteCheck {
 public:
  struct Finding {
    int rank;
    std::size_t param_index;
  };

  // Forgets what was seen.
  void begin_step();

  // The gradient of a param has arrived: the first that is not finite is named in this order.
  void note_arrival(std::size_t param_index) {
    order_.push_back(param_index);
  }

  // Looks at gradients of these params, in a few operations for all of them. Passes over integers,
  // and takes sparse gradients by their values.
  void look(const std::vector<std::size_t>& param_indices, const std::vector<at::Tensor>& grads);

  // Collective: starts to tell the other ranks what this rank found. Waits for the device.
  void launch(Collective& collective, c10::Device device);

  // Collective: what the ranks found, in order of rank, each its first.
  std::vector<Finding> agree(Collective& collective, c10::Device device);

 private:
  struct Look {
    std::vector<std::size_t> param_indices;
    at::Tensor finite;  // a bool for each param, where its gradient lies
  };

  std::vector<at::Tensor> finite_on_host();
  std::optional<std::size_t> first_not_finite();

  std::vector<std::size_t> order_;
  std::vector<Look> looks_;
  std::map<c10::DeviceIndex, StreamJoin> streams_;  // of looks; not of those on CPU
  at::Tensor found_;  // a place for each rank; in the hands of the backend
  Collective::Work work_;
};

}  // namespace ddpx
