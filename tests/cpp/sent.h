// The tensors with which a reducer launches all-reduces.
#pragma once

#include <ATen/ops/zeros_like.h>

#include <cstdint>
#include <vector>

#include "replica.h"

namespace ddpx {

// What each all-reduce of the step was launched with.
struct Sent {
  explicit Sent(Replica& replica) {
    replica.collective->on_launch = [this, collective = replica.collective.get()](std::size_t i) {
      tensors.push_back(collective->all_reduces()[i].tensor.clone());
    };
  }

  std::vector<int64_t> sizes() const {
    std::vector<int64_t> all;
    for (const auto& tensor : tensors) {
      all.push_back(tensor.numel());
    }
    return all;
  }

  std::vector<at::Tensor> tensors;
};

inline bool all_zero(const at::Tensor& tensor) {
  return tensor.equal(at::zeros_like(tensor));
}

}  // namespace ddpx
