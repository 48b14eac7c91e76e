// One rank's model over a reducer and a fake collective, made for exact numbers.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fake_collective.h"
#include "reducer/configure.h"
#include "reducer/reducer.h"

namespace ddpx {

using Indices = std::vector<std::size_t>;
using Grads = std::vector<std::optional<double>>;  // nothing for an undefined gradient
using Log = std::vector<std::string>;

const BucketCaps kOneBucket{1 << 20, 1 << 20, {1 << 20}};
const BucketCaps kParamABucket{0, 0, {0}};  // before a rebuild: param 2, then 1, then 0

// The product of sums of three params, "w0" to "w2", of 1 to 3 elements. The elements of a gradient
// are equal; the local ones are 12, 8 and 6 where all params are used. Of 4 ranks, each sends (its
// rank + 1) times what rank 0 does, so a mean is 2.5 times rank 0's.
class Replica {
 public:
  static constexpr std::size_t kNumParams = 3;
  static constexpr int kWorldSize = 4;  // a power of two: all quotients are exact

  explicit Replica(
      GraphMode mode = GraphMode::kDefault,
      const BucketCaps& caps = kParamABucket,
      bool gradient_as_bucket_view = false,
      int rank = 0)
      : Replica(ReducerOptions{caps, mode, gradient_as_bucket_view}, rank) {}

  explicit Replica(
      const ReducerOptions& options, int rank = 0, std::shared_ptr<health::Monitor> watch = nullptr)
      : collective(std::make_shared<FakeCollective>(rank, kWorldSize)) {
    std::vector<ReducerParam> reducer_params;
    for (std::size_t i = 0; i < kNumParams; ++i) {
      const double numel = static_cast<double>(i) + 1;
      params.push_back(at::full({static_cast<int64_t>(i) + 1}, (numel + 1) / numel, at::kDouble));
      params.back().set_requires_grad(true);
      params.back().register_hook([log = &collective->log, fake = collective, i](at::Tensor) {
        log->push_back("grad " + std::to_string(i));
      });
      reducer_params.push_back({params.back(), "w" + std::to_string(i), false});
    }
    reducer = Reducer::create(reducer_params, options, collective, {}, std::move(watch));
  }

  // A loss whose backward brings the gradients of these params in this order, and then the gradient
  // of `input`.
  at::Tensor forward(
      const Indices& arrival_order, const at::Tensor& input = at::ones({}, at::kDouble)) {
    reducer->prepare_forward();
    auto product = input * 1;
    for (auto param_index = arrival_order.rbegin(); param_index != arrival_order.rend();
         ++param_index) {
      product = product * params[*param_index].sum();
    }
    reducer->watch_outputs({product});
    return product;
  }

  void step(const Indices& arrival_order = {2, 1, 0}) {
    forward(arrival_order).backward();
  }

  // The first step, in which nothing leaves before the end of backward, and the rebuild by its
  // arrival order; then all is forgotten but what the reducer learned.
  void learn(const Indices& arrival_order = {2, 1, 0}) {
    step(arrival_order);
    reducer->prepare_forward();
    clear_grads();
    forget_calls();
  }

  // Waits for an agreement whose answer nobody needed, and forgets all calls.
  void forget_calls() {
    reducer->used_by_ranks();
    collective->clear();
  }

  // As step(), which must throw; returns the text of the error.
  std::string failing_step(const Indices& arrival_order = {2, 1, 0}) {
    try {
      step(arrival_order);
    } catch (const UserError& error) {
      return error.what();
    }
    ADD_FAILURE() << "the step raised no UserError";
    return "";
  }

  void clear_grads() {
    for (auto& param : params) {
      param.mutable_grad().reset();
    }
  }

  Grads grads() const {
    Grads values;
    for (const auto& param : params) {
      values.push_back(value_of(param.grad()));
    }
    return values;
  }

  std::shared_ptr<FakeCollective> collective;
  std::vector<at::Tensor> params;
  std::shared_ptr<Reducer> reducer;

 private:
  static std::optional<double> value_of(const at::Tensor& grad) {
    if (!grad.defined()) {
      return std::nullopt;
    }
    const auto* elements = grad.const_data_ptr<double>();
    for (int64_t i = 1; i < grad.numel(); ++i) {
      EXPECT_EQ(elements[i], elements[0]);
    }
    return elements[0];
  }
};

// The text of the UserError that `call` must throw.
inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const UserError& error) {
    return error.what();
  }
  ADD_FAILURE() << "no UserError";
  return "";
}

inline std::string mode_name(GraphMode mode) {
  switch (mode) {
    case GraphMode::kDefault:
      return "Default";
    case GraphMode::kFindUnused:
      return "FindUnused";
    case GraphMode::kStatic:
      return "Static";
  }
  return "unknown";
}

const Grads kLocalGrads = {12., 8., 6.};
const Grads kMeanGrads = {30., 20., 15.};

inline void expect_mentions(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "no \"" << part << "\" in: " << text;
  }
}

}  // namespace ddpx
