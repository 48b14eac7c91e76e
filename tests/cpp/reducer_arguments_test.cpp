// Arguments that make no sense are refused: the bindings take whatever Python has.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "buckets/grad_scaling.h"
#include "observe/event_log.h"
#include "replica.h"

namespace ddpx {
namespace {

std::shared_ptr<Reducer> reducer_over(const at::Tensor& tensor, ReducerOptions options) {
  return Reducer::create(
      {{tensor, "w", /*expect_sparse=*/true}},
      std::move(options),
      std::make_shared<FakeCollective>(0, 2));
}

const ReducerOptions kOptions{kOneBucket, GraphMode::kDefault, /*gradient_as_bucket_view=*/false};

TEST(ReducerArguments, ParamsAreLeavesThatRequireAGradient) {
  const auto leaf = at::ones({2}).set_requires_grad(true);
  EXPECT_THROW(reducer_over(at::ones({2}), kOptions), UserError);
  EXPECT_THROW(reducer_over(at::ones({2}, at::kLong), kOptions), UserError);
  EXPECT_THROW(reducer_over(leaf * 2, kOptions), UserError);
  EXPECT_NO_THROW(reducer_over(leaf, kOptions));
}

TEST(ReducerArguments, TheGateIsAParam) {
  auto options = kOptions;
  options.delay_trigger = 1;
  EXPECT_THROW(reducer_over(at::ones({2}).set_requires_grad(true), options), UserError);
}

TEST(ReducerArguments, RowsAreALineOfInt64OfAParam) {
  const auto reducer = reducer_over(at::ones({4, 2}).set_requires_grad(true), kOptions);
  const auto rows = at::zeros({1}, at::kLong);
  EXPECT_NO_THROW(set_sparse_rows(*reducer, {{0, rows}}));
  EXPECT_THROW(set_sparse_rows(*reducer, {{1, rows}}), UserError);
  EXPECT_THROW(set_sparse_rows(*reducer, {{0, at::zeros({1})}}), UserError);
  EXPECT_THROW(set_sparse_rows(*reducer, {{0, at::zeros({1, 1}, at::kLong)}}), UserError);
  EXPECT_THROW(
      set_sparse_rows(*reducer, {{0, at::zeros({1}, rows.options().device(at::kMeta))}}),
      UserError);
}

TEST(ReducerArguments, DivisorAndSampleRateArePositive) {
  Replica replica;
  EXPECT_THROW(set_divisor(*replica.reducer, 0), UserError);
  EXPECT_THROW(set_divisor(*replica.reducer, -3), UserError);
  EXPECT_THROW(set_sample_rate(*replica.reducer, 0), UserError);
  for (int step = 0; step < 12; ++step) {  // beyond the ten that are always sampled
    replica.step();
  }
}

TEST(ReducerArguments, AnEmptyHookResultIsNamed) {
  Replica replica;
  replica.step();
  class EmptyHook final : public CommHook {
   public:
    c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket&) override {
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::AnyType::get());
      future->markCompleted(c10::IValue());
      return future;
    }
    at::Tensor parseHookResult(const c10::IValue&) override {
      return {};
    }
  };
  set_comm_hook(*replica.reducer, std::make_shared<EmptyHook>());
  EXPECT_THROW(replica.step(), UserError);
}

TEST(EventLogArguments, ItsSizeIsBounded) {
  EXPECT_THROW(EventLog(std::numeric_limits<std::size_t>::max()), UserError);
  EXPECT_THROW(EventLog((std::size_t{1} << 63) + 1), UserError);
}

TEST(GradCopyArguments, AScalarHasAnEmptySparseGradient) {
  const auto grad = empty_sparse_grad(at::full({}, 1.0), at::kFloat);
  EXPECT_EQ(grad.dim(), 0);
  EXPECT_EQ(grad._nnz(), 0);
  EXPECT_EQ(grad.to_dense().item<double>(), 0.0);
}

}  // namespace
}  // namespace ddpx
