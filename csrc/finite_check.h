// Finds the first gradient that is not finite, on any rank, before it is lost in the average.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "collective.h"

namespace ddpx {

// Each rank notes of every gradient whether it is finite, as it arrives; on a device without
// waiting for it. At the end of backward ranks tell each other the first that was not, by summing
// a vector with a place for each rank. Not thread-safe: the reducer's mutex guards it.
class FiniteCheck {
 public:
  struct Finding {
    int rank;
    std::size_t param_index;
  };

  // Forgets what was seen.
  void begin_step();

  // The gradient of a param has arrived. Nothing to do for integers; sparse ones by their values.
  void look(std::size_t param_index, const at::Tensor& grad);

  // Collective: what the ranks found, in order of rank, each its first. Waits for the device.
  std::vector<Finding> agree(Collective& collective, c10::Device device);

 private:
  struct Look {
    std::size_t param_index;
    at::Tensor finite;  // a bool, where the gradient lies
  };

  std::optional<std::size_t> first_not_finite() const;

  std::vector<Look> looks_;  // in order of arrival
};

}  // namespace ddpx
