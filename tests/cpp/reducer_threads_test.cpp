// Gradients may come from several engine threads, and anyone may look on meanwhile. Made for
// -DDDPX_SANITIZE=thread.
#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <future>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "fake_collective.h"
#include "reducer/reducer.h"
#include "replica.h"

namespace ddpx {
namespace {

constexpr std::size_t kNumParams = 32;
constexpr int kNumSteps = 50;

struct WideModel {
  WideModel() {
    std::vector<ReducerParam> reducer_params;
    for (std::size_t i = 0; i < kNumParams; ++i) {
      params.push_back(at::full({8}, 1.0, at::kDouble).set_requires_grad(true));
      reducer_params.push_back({params.back(), "w" + std::to_string(i), false});
    }
    // Four params a bucket once rebuilt; the two threads below share every bucket.
    const BucketCaps caps{256, 256, {}};
    reducer = Reducer::create(
        reducer_params, ReducerOptions{caps, GraphMode::kDefault, false}, collective);
  }

  // The gradient of each element is 2.
  at::Tensor loss_of(const std::vector<std::size_t>& indices) const {
    auto loss = at::zeros({}, at::kDouble);
    for (const auto i : indices) {
      loss = loss + params[i].sum() * 2;
    }
    return loss;
  }

  // Of every second param, from `first` on.
  at::Tensor loss_of_half(std::size_t first) const {
    std::vector<std::size_t> indices;
    for (std::size_t i = first; i < kNumParams; i += 2) {
      indices.push_back(i);
    }
    return loss_of(indices);
  }

  std::vector<std::size_t> all() const {
    std::vector<std::size_t> indices(params.size());
    std::iota(indices.begin(), indices.end(), 0);
    return indices;
  }

  void clear_grads() {
    for (auto& param : params) {
      param.mutable_grad().reset();
    }
  }

  void expect_mean_grads() const {
    for (const auto& param : params) {
      ASSERT_TRUE(param.grad().defined());
      EXPECT_TRUE(param.grad().equal(at::full({8}, 3.0, at::kDouble))) << param.grad();
    }
  }

  // Rank 1, by the fake's default, sends twice what this rank does: the mean of 2 and 4 is 3.
  std::shared_ptr<FakeCollective> collective = std::make_shared<FakeCollective>(0, 2);
  std::vector<at::Tensor> params;
  std::shared_ptr<Reducer> reducer;
};

// Nobody leaves before everybody has come.
class Meeting {
 public:
  explicit Meeting(int num_expected) : num_expected_(num_expected) {}

  void come() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++num_come_;
    all_here_.notify_all();
    const bool met = all_here_.wait_for(
        lock, std::chrono::seconds(60), [&] { return num_come_ >= num_expected_; });
    EXPECT_TRUE(met);
  }

 private:
  int num_expected_;
  int num_come_ = 0;
  std::mutex mutex_;
  std::condition_variable all_here_;
};

TEST(ReducerThreads, BackwardsThatRunAtOnceAreOneStep) {
  WideModel model;
  for (int step = 0; step < kNumSteps; ++step) {
    model.clear_grads();
    model.reducer->prepare_forward();
    Meeting meeting(2);
    std::vector<std::thread> threads;
    for (const std::size_t first : {0, 1}) {
      threads.emplace_back([&, first] {
        const auto loss = model.loss_of_half(first);
        const auto output = loss * 1;
        // Between the two the backward has begun, and none of its gradients has arrived.
        model.reducer->watch_outputs({output});
        loss.register_hook([&](at::Tensor) { meeting.come(); });
        output.backward();
      });
    }
    for (auto& thread : threads) {
      thread.join();
    }
    model.expect_mean_grads();
    EXPECT_EQ(model.reducer->state().phase(), Phase::kIdle);
  }
}

// Two threads run backwards of one step. One of them brings the first bucket, whose launch fails.
TEST(ReducerThreads, NoThreadLaunchesAfterALaunchThatFailed) {
  WideModel model;
  const auto step = [&] {
    model.clear_grads();
    model.reducer->prepare_forward();
    model.loss_of(model.all()).backward();
  };
  step();
  step();  // by now the buckets are rebuilt
  const auto first_bucket = model.reducer->state().plan().buckets().front().param_indices;
  auto others = model.all();
  for (const auto param_index : first_bucket) {
    others.erase(std::find(others.begin(), others.end(), param_index));
  }
  const auto num_before = model.collective->all_reduces().size();
  model.collective->on_launch = [](std::size_t) { throw std::runtime_error("aborted"); };
  model.reducer->prepare_forward();
  Meeting begun(2);
  Meeting failed(2);
  const auto backward = [&](const std::vector<std::size_t>& params, bool waits) {
    const auto loss = model.loss_of(params);
    const auto output = loss * 1;
    model.reducer->watch_outputs({output});
    loss.register_hook([&](at::Tensor) {
      begun.come();
      if (waits) {
        failed.come();
      }
    });
    EXPECT_THROW(output.backward(), UserError);
  };
  std::thread later([&] { backward(others, /*waits=*/true); });
  backward(first_bucket, /*waits=*/false);
  failed.come();
  later.join();
  EXPECT_EQ(model.collective->all_reduces().size(), num_before + 1);
  EXPECT_EQ(model.reducer->state().phase(), Phase::kIdle);
  model.collective->on_launch = [](std::size_t) {};
  step();
  model.expect_mean_grads();
}

TEST(ReducerThreads, ItsStateMayBeReadWhileItWorks) {
  WideModel model;
  std::atomic<bool> done{false};
  std::thread reader([&] {
    while (!done) {
      EXPECT_NE(model.reducer->state().phase(), Phase::kFailed);
      EXPECT_FALSE(model.reducer->state().plan().buckets().empty());
      EXPECT_TRUE(model.reducer->sync_enabled());
    }
  });
  for (int step = 0; step < kNumSteps; ++step) {
    model.clear_grads();
    model.reducer->prepare_forward();
    (model.loss_of_half(0) + model.loss_of_half(1)).backward();
    model.expect_mean_grads();
  }
  done = true;
  reader.join();
}

// The thread that finalizes may wait for the thread that reads. So the reader gets the use of the
// step before.
TEST(ReducerThreads, TheUseOfParamsMayBeReadWhileAnotherThreadFinalizesAStep) {
  Replica replica(GraphMode::kFindUnused);
  replica.learn({2, 0});
  const auto before = replica.reducer->used_by_ranks();
  std::vector<int32_t> read;
  replica.collective->on_wait = [&](std::size_t index) {
    if (read.empty()) {
      auto reader =
          std::async(std::launch::async, [&] { return replica.reducer->used_by_ranks(); });
      ASSERT_EQ(reader.wait_for(std::chrono::seconds(10)), std::future_status::ready);
      read = reader.get();
    }
    replica.collective->complete(index);
  };
  replica.step({2, 1, 0});
  EXPECT_EQ(read, before);
  EXPECT_NE(replica.reducer->used_by_ranks(), before);
}

}  // namespace
}  // namespace ddpx
