// A user's hook in the place of the all-reduce.
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../health/local_ranks.h"
#include "comm/comm_hook.h"
#include "replica.h"

namespace ddpx {
namespace {

using Future = c10::intrusive_ptr<c10::ivalue::Future>;

// Keeps what it got; a test makes the results.
class FakeHook final : public CommHook {
 public:
  struct Call {
    std::size_t index;
    bool last;
    at::Tensor buffer;
    std::vector<at::Tensor> params;
    Future future;
  };

  Future runHook(c10d::GradBucket& bucket) override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    calls.push_back(
        {bucket.getIndex(), bucket.isLast(), bucket.getBuffer(), bucket.getParameters(), future});
    on_run(calls.back());
    return future;
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    return result.toTensor();
  }

  std::vector<Call> calls;
  std::function<void(const Call&)> on_run = [](const Call& call) {
    call.future->markCompleted(call.buffer);
  };
};

class ReducerCommHook : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    set_comm_hook(*replica.reducer, hook);
  }

  std::shared_ptr<FakeHook> hook = std::make_shared<FakeHook>();
  Replica replica{GraphMode::kDefault, kParamABucket, /*gradient_as_bucket_view=*/GetParam()};
};

TEST_P(ReducerCommHook, GetsEveryBucketUndividedInsteadOfTheCollective) {
  std::vector<double> got;
  hook->on_run = [&](const FakeHook::Call& call) {
    got.push_back(call.buffer[0].item<double>());
    call.future->markCompleted(call.buffer);
  };
  replica.step();
  EXPECT_TRUE(replica.collective->all_reduces().empty());
  EXPECT_EQ(got, (std::vector<double>{6., 8., 12.}));
  ASSERT_EQ(hook->calls.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(hook->calls[i].index, i);
    EXPECT_EQ(hook->calls[i].last, i == 2);
    ASSERT_EQ(hook->calls[i].params.size(), 1u);
    EXPECT_TRUE(hook->calls[i].params[0].is_same(replica.params[2 - i]));
  }
  EXPECT_EQ(replica.grads(), kLocalGrads) << "what the hook made of them is not divided";
}

TEST_P(ReducerCommHook, ItsResultMayBeAnotherTensor) {
  hook->on_run = [](const FakeHook::Call& call) { call.future->markCompleted(call.buffer * 2.5); };
  for (int step = 0; step < 3; ++step) {
    replica.clear_grads();
    replica.step();
    EXPECT_EQ(replica.grads(), kMeanGrads);
  }
}

TEST_P(ReducerCommHook, ItsFuturesMayBeCompletedLaterAndInAnyOrder) {
  std::thread completer;
  hook->on_run = [&](const FakeHook::Call& call) {
    if (!call.last) {
      return;
    }
    completer = std::thread([calls = hook->calls] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      for (auto made = calls.rbegin(); made != calls.rend(); ++made) {
        made->future->markCompleted(made->buffer * 2.5);
      }
    });
  };
  for (int step = 0; step < 2; ++step) {
    replica.clear_grads();
    hook->calls.clear();
    replica.step();
    completer.join();
    EXPECT_EQ(replica.grads(), kMeanGrads);
  }
}

TEST_P(ReducerCommHook, ItMayLookAtTheReducer) {
  hook->on_run = [&](const FakeHook::Call& call) {
    EXPECT_EQ(replica.reducer->state().plan().buckets().size(), 3u);
    call.future->markCompleted(call.buffer);
  };
  replica.step();
  EXPECT_EQ(replica.grads(), kLocalGrads);
}

TEST_P(ReducerCommHook, AFailingHookIsReportedWithItsBucket) {
  for (const bool later : {false, true}) {
    hook->on_run = [later](const FakeHook::Call& call) {
      if (call.index != 1) {
        call.future->markCompleted(call.buffer);
      } else if (later) {
        call.future->setError(std::make_exception_ptr(std::runtime_error("no more memory")));
      } else {
        throw std::runtime_error("no more memory");
      }
    };
    for (int step = 0; step < 2; ++step) {
      expect_mentions(replica.failing_step(), {"bucket 1", "('w1')", "no more memory"});
      EXPECT_EQ(replica.reducer->state().phase(), Phase::kIdle);
    }
    hook->on_run = [](const FakeHook::Call& call) {
      call.future->markCompleted(call.buffer * 2.5);
    };
    replica.clear_grads();
    replica.step();
    EXPECT_EQ(replica.grads(), kMeanGrads);
  }
}

TEST(ReducerCommHookFailure, OnTheLastBucketNothingIsSentInTheStead) {
  // Peers would take it for their call of that bucket.
  Replica replica(GraphMode::kFindUnused);
  const auto hook = std::make_shared<FakeHook>();
  set_comm_hook(*replica.reducer, hook);
  set_check_finite(*replica.reducer, true);
  replica.learn();
  hook->on_run = [](const FakeHook::Call& call) {
    if (call.last) {
      throw std::runtime_error("broken");
    }
    call.future->markCompleted(call.buffer);
  };
  replica.failing_step();
  EXPECT_TRUE(replica.collective->all_reduces().empty());
}

// Peers wait for the check of finite values then, so they end no step either.
TEST_P(ReducerCommHook, AStepWithAWrongResultCountsUnlessPeersCheckValues) {
  hook->on_run = [](const FakeHook::Call& call) {
    call.future->markCompleted(call.buffer.to(at::kMeta));
  };
  replica.failing_step();
  EXPECT_EQ(replica.reducer->state().num_steps(), 1);
  set_check_finite(*replica.reducer, true);
  replica.failing_step();
  EXPECT_EQ(replica.reducer->state().num_steps(), 1);
}

// A hook may make other calls than the sum of the process group, and other results on each rank.
TEST(ReducerCommHookNotes, PeersCompareNeitherResultsNorTheHookBesideSumsOfTheGroup) {
  const auto watch = health::watch(
      health::group_of(0, Replica::kWorldSize),
      health::access_to(std::make_shared<health::FakeStore>()));
  Replica replica(ReducerOptions{kParamABucket, GraphMode::kDefault, false}, 0, watch);
  set_comm_hook(*replica.reducer, std::make_shared<FakeHook>());
  replica.step();
  const auto& page = watch->page().view();
  const auto calls = page.calls.find(page.activity().model, 0);
  ASSERT_TRUE(calls.has_value());
  EXPECT_EQ(calls->results, health::StepCalls::kNone);
  EXPECT_EQ(calls->settings, health::StepCalls::kKnown);
}

TEST_P(ReducerCommHook, AResultOnAnotherDeviceIsAnError) {
  hook->on_run = [](const FakeHook::Call& call) {
    call.future->markCompleted(call.buffer.to(at::kMeta));
  };
  expect_mentions(
      replica.failing_step(), {"has 3 elements on meta, but the bucket has 3 elements on cpu"});
}

TEST_P(ReducerCommHook, ThereIsOnlyOne) {
  try {
    set_comm_hook(*replica.reducer, std::make_shared<FakeHook>());
    ADD_FAILURE() << "no error";
  } catch (const UserError& error) {
    expect_mentions(error.what(), {"can only be called once"});
  }
}

INSTANTIATE_TEST_SUITE_P(Views, ReducerCommHook, testing::Bool(), [](const auto& info) {
  return info.param ? "View" : "Copy";
});

TEST(ReducerCommHookUnused, AHookGetsEachBucketOnce) {
  Replica replica(GraphMode::kFindUnused);
  const auto hook = std::make_shared<FakeHook>();
  set_comm_hook(*replica.reducer, hook);
  replica.learn({2, 0});
  hook->calls.clear();
  replica.step({2, 1, 0});
  EXPECT_EQ(hook->calls.size(), 3u);
  EXPECT_EQ(replica.grads(), kLocalGrads);
}

}  // namespace
}  // namespace ddpx
