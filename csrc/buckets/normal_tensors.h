// Tensors that outlive the code that makes them.
#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <optional>

namespace ddpx {

// Tensors that are made in this scope are normal tensors without a graph, also if the script is in
// torch.inference_mode(). An inference tensor cannot be changed outside of that mode.
class NormalTensors {
 public:
  NormalTensors() {
    if (c10::InferenceMode::is_enabled()) {
      normal_.emplace(false);
    }
    no_grad_.emplace();  // the end of inference mode turns the grad mode on
  }

 private:
  std::optional<c10::InferenceMode> normal_;
  std::optional<at::NoGradGuard> no_grad_;
};

}  // namespace ddpx
