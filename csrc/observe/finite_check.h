// Finds the first gradient that is not finite, on any rank, before the average hides its origin.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <map>
#include <optional>
#include <vector>

#include "../buckets/stream_set.h"
#include "../comm/collective.h"

namespace ddpx {

// Each rank computes the largest magnitude of every gradient. This magnitude is not finite if the
// gradient is not finite. The host does not wait for a device meanwhile. At the end of backward,
// ranks exchange their first such param by summing a vector with a place for each rank.
// The step owns the check, under the mutex of the reducer; agree() may run without the mutex.
class FiniteCheck {
 public:
  struct Finding {
    int rank;
    std::size_t param_index;
  };

  // The gradient of a param has arrived. "First" is by the order of arrivals.
  void record_arrival(std::size_t param_index) {
    order_.push_back(param_index);
  }

  // Checks the gradients of these params, in a few operations for all of them. Skips integers, and
  // checks sparse gradients by their values.
  void check(const std::vector<std::size_t>& param_indices, const std::vector<at::Tensor>& grads);

  // Collective: launches the exchange of what the ranks found. Waits for the device.
  void launch(Collective& collective, c10::Device device);

  // The first finding of each rank that has one, in order of rank. Collective: launches the
  // exchange unless launch() was called.
  std::vector<Finding> agree(Collective& collective, c10::Device device);

 private:
  struct Checked {
    std::vector<std::size_t> param_indices;
    at::Tensor finite;  // a bool for each param, on the device of its gradient
  };

  std::vector<at::Tensor> finite_on_host();
  std::optional<std::size_t> first_not_finite();

  std::vector<std::size_t> order_;
  std::vector<Checked> checked_;
  std::map<c10::DeviceIndex, StreamSet> streams_;  // that checked gradients
  at::Tensor found_;  // a place for each rank; the backend writes to it
  Collective::Work work_;
};

}  // namespace ddpx
