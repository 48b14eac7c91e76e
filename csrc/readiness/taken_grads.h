// Params whose local gradients autograd.grad() has returned to the script.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace ddpx {

// A script that applies local gradients to its params makes ranks diverge. Two facts show that a
// param has changed: the version of the tensor, and a sample of its elements on CPU. Fused
// optimizers and changes of `param.data` leave the version as it is.
// Empty until start(), so that a script without such calls pays nothing.
// The reducer owns this object, under its mutex.
class TakenGrads {
 public:
  bool empty() const {
    return contents_.empty();
  }

  // To be called before the other methods. `averaged`: gradients may have averages by now.
  void start(const std::vector<at::Tensor>& params, bool averaged);

  // autograd.grad() returns the local gradient of the param. `has_average`: the script may still
  // have the last average. Without effect if the param is unchanged since that average, because an
  // optimizer may apply the average.
  void take(std::size_t param_index, const at::Tensor& param, bool has_average);

  // `param.grad` has the average over ranks.
  void record_average(std::size_t param_index, const at::Tensor& param);

  // The params that changed after take(), without record_average() in between. Each is returned
  // once.
  std::vector<std::size_t> pop_changed(const std::vector<at::Tensor>& params);

  void clear() {
    contents_.clear();
  }

 private:
  struct Content {
    explicit Content(const at::Tensor& param);
    bool operator==(const Content&) const = default;

    int64_t version;
    uint64_t sample;
  };

  struct Contents {
    std::optional<Content> averaged;
    std::optional<Content> taken;
  };

  std::vector<Contents> contents_;  // per param, or empty
};

}  // namespace ddpx
