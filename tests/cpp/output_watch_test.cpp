// The walk over the graphs of watched outputs.
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <thread>
#include <vector>

#include "autograd/output_watch.h"

namespace ddpx {
namespace {

at::Tensor chain(int num_nodes) {
  auto tensor = at::ones({}, at::kDouble).set_requires_grad(true);
  for (int i = 0; i < num_nodes; ++i) {
    tensor = tensor + 1;
  }
  return tensor;
}

TEST(OutputWatch, WalksTheGraphsOfOutputsThatAreAlive) {
  OutputWatch watch;
  const auto kept = chain(5);
  auto dropped = chain(50);
  watch.watch({kept, dropped}, ForwardSync::kOn, {});
  EXPECT_EQ(watch.nodes_to_come().size(), 57u);  // with an accumulator each
  dropped.reset();
  EXPECT_EQ(watch.nodes_to_come().size(), 6u);
}

TEST(OutputWatch, ANodeWithManyOutputsHasOneHook) {
  OutputWatch watch;
  const auto outputs = (at::ones({3}).set_requires_grad(true) * 2).unbind();
  watch.watch(outputs, ForwardSync::kOn, {});
  EXPECT_EQ(outputs[0].grad_fn()->pre_hooks().size(), 1u);
  watch.watch({outputs[1]}, ForwardSync::kOn, {});
  EXPECT_EQ(outputs[0].grad_fn()->pre_hooks().size(), 2u);
}

TEST(OutputWatch, AnotherThreadMayReleaseTheGraphsDuringAWalk) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer does not see the reference counts in torch's libraries";
#endif
  for (int round = 0; round < 5; ++round) {
    OutputWatch watch;
    std::vector<at::Tensor> outputs;
    for (int i = 0; i < 100; ++i) {
      outputs.push_back(chain(100));
    }
    watch.watch(outputs, ForwardSync::kOn, {});
    std::atomic<bool> walking{false};
    std::thread releaser([&] {
      while (!walking) {
      }
      outputs.clear();
    });
    walking = true;
    while (!watch.nodes_to_come().empty()) {
    }
    releaser.join();
  }
}

}  // namespace
}  // namespace ddpx
