// Compares every operation, in all its algorithms, with a slow reference. The ranks are threads.
#include <gtest/gtest.h>

#include <atomic>
#include <numeric>

#include "ranks.h"
#include "reference.h"
#include "shm/chunk_order.h"

namespace ddpx::shm {
namespace {

enum class Where { kArena, kPrivate, kMixed };

// A buffer in the arena or in private memory.
class Buffer {
 public:
  Buffer(const Rank& rank, Where where, std::size_t num_bytes) : num_bytes_(num_bytes) {
    if (where == Where::kArena || (where == Where::kMixed && rank.rank % 2 == 0)) {
      arena_ = rank.arena;
      data_ = static_cast<std::byte*>(arena_->allocate(num_bytes));
    } else {
      private_.resize(num_bytes + 1);
      data_ = private_.data();
    }
  }
  ~Buffer() {
    if (arena_) {
      arena_->free(data_);
    }
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::byte* data() const {
    return data_;
  }

  void fill(const Bytes& bytes) const {
    std::copy(bytes.begin(), bytes.end(), data_);
  }

  Bytes bytes() const {
    return Bytes(data_, data_ + num_bytes_);
  }

 private:
  std::size_t num_bytes_;
  std::shared_ptr<Arena> arena_;
  Bytes private_;
  std::byte* data_;
};

std::vector<Bytes> inputs_of(int size, DType dtype, std::size_t count, unsigned seed = 1) {
  std::vector<Bytes> inputs;
  for (int rank = 0; rank < size; ++rank) {
    inputs.push_back(random_input(dtype, count, seed * 1000 + static_cast<unsigned>(rank)));
  }
  return inputs;
}

Bytes expected_sum(
    const std::vector<Bytes>& inputs, DType dtype, ReduceOp op, Order order, std::size_t count) {
  const ChunkOrder chunks(order, static_cast<int>(inputs.size()), count, size_of(dtype));
  Bytes expected(inputs[0].size());
  for (std::size_t i = 0; i < count; ++i) {
    combine_element(dtype, op, inputs, chunks.ranks(i), i, expected.data());
  }
  return expected;
}

// Sizes of less than a cache line, of one-shot operations, and with a partial last piece.
constexpr std::size_t kCounts[] = {0, 1, 5, 100, 256, 1000, 1025, 5000, 20'011};

struct Setting {
  int size;
  Where where;
  Order order;
};

class OperationsTest : public testing::TestWithParam<Setting> {
 protected:
  void run(const std::function<void(const Rank&)>& work) const {
    auto options = test_options();
    options.order = GetParam().order;
    run_threads(GetParam().size, work, options);
  }

  int size() const {
    return GetParam().size;
  }
};

TEST_P(OperationsTest, AllReduceInPlace) {
  run([&](const Rank& rank) {
    for (const auto count : kCounts) {
      for (const auto op : {ReduceOp::kSum, ReduceOp::kAvg}) {
        const auto inputs = inputs_of(size(), DType::kFloat32, count);
        const Buffer buffer(rank, GetParam().where, count * 4);
        buffer.fill(inputs[rank.rank]);
        rank.group.run(all_reduce_call(buffer.data(), buffer.data(), count, DType::kFloat32, op));
        ASSERT_EQ(
            buffer.bytes(), expected_sum(inputs, DType::kFloat32, op, GetParam().order, count))
            << count;
      }
    }
  });
}

TEST_P(OperationsTest, AllReduceOfEveryDType) {
  run([&](const Rank& rank) {
    for (int dtype_index = 0; dtype_index <= static_cast<int>(DType::kBool); ++dtype_index) {
      const auto dtype = static_cast<DType>(dtype_index);
      for (const std::size_t count : {77u, 3333u}) {
        for (const auto op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kProduct}) {
          const auto inputs = inputs_of(size(), dtype, count);
          const Buffer buffer(rank, GetParam().where, inputs[0].size());
          buffer.fill(inputs[rank.rank]);
          rank.group.run(all_reduce_call(buffer.data(), buffer.data(), count, dtype, op));
          ASSERT_EQ(buffer.bytes(), expected_sum(inputs, dtype, op, GetParam().order, count))
              << name_of(dtype) << name_of(op);
        }
      }
    }
  });
}

TEST_P(OperationsTest, AllReduceIntoAnotherBuffer) {
  run([&](const Rank& rank) {
    for (const auto count : kCounts) {
      const auto inputs = inputs_of(size(), DType::kFloat32, count);
      const Buffer input(rank, GetParam().where, count * 4);
      const Buffer output(rank, GetParam().where, count * 4);
      input.fill(inputs[rank.rank]);
      rank.group.run(
          all_reduce_call(input.data(), output.data(), count, DType::kFloat32, ReduceOp::kSum));
      ASSERT_EQ(
          output.bytes(),
          expected_sum(inputs, DType::kFloat32, ReduceOp::kSum, GetParam().order, count));
      ASSERT_EQ(input.bytes(), inputs[rank.rank]);
    }
  });
}

TEST_P(OperationsTest, Broadcast) {
  run([&](const Rank& rank) {
    for (const auto count : kCounts) {
      for (int root = 0; root < size(); ++root) {
        const auto inputs = inputs_of(size(), DType::kFloat32, count);
        const Buffer buffer(rank, GetParam().where, count * 4);
        buffer.fill(inputs[rank.rank]);
        rank.group.run(broadcast_call(buffer.data(), count, DType::kFloat32, root));
        ASSERT_EQ(buffer.bytes(), inputs[root]) << count;
        buffer.fill(inputs[rank.rank]);  // no peer reads the buffer after the operation
      }
    }
  });
}

TEST_P(OperationsTest, AllGather) {
  run([&](const Rank& rank) {
    for (const auto count : kCounts) {
      const auto inputs = inputs_of(size(), DType::kFloat32, count);
      Bytes expected;
      for (const auto& input : inputs) {
        expected.insert(expected.end(), input.begin(), input.end());
      }
      const Buffer input(rank, GetParam().where, count * 4);
      input.fill(inputs[rank.rank]);
      Bytes output(expected.size());
      rank.group.run(all_gather_call(input.data(), output.data(), count, DType::kFloat32));
      ASSERT_EQ(output, expected) << count;

      std::vector<Bytes> list(static_cast<std::size_t>(size()), Bytes(count * 4));
      auto call = all_gather_call(input.data(), nullptr, count, DType::kFloat32);
      for (auto& bytes : list) {
        call.outputs.push_back(bytes.data());
      }
      rank.group.run(call);
      ASSERT_EQ(list, inputs) << count;

      // The input is this rank's part of the output.
      const Buffer whole(rank, GetParam().where, expected.size());
      auto* own = whole.data() + static_cast<std::size_t>(rank.rank) * count * 4;
      std::copy(inputs[rank.rank].begin(), inputs[rank.rank].end(), own);
      rank.group.run(all_gather_call(own, whole.data(), count, DType::kFloat32));
      ASSERT_EQ(whole.bytes(), expected) << count;
    }
  });
}

TEST_P(OperationsTest, ReduceScatter) {
  run([&](const Rank& rank) {
    for (const auto count : kCounts) {
      const auto total = count * static_cast<std::size_t>(size());
      const auto inputs = inputs_of(size(), DType::kFloat32, total);
      const auto sum =
          expected_sum(inputs, DType::kFloat32, ReduceOp::kSum, GetParam().order, total);
      const auto begin = sum.begin() + static_cast<std::ptrdiff_t>(
                                           static_cast<std::size_t>(rank.rank) * count * 4);
      const Bytes expected(begin, begin + static_cast<std::ptrdiff_t>(count * 4));
      const Buffer input(rank, GetParam().where, total * 4);
      input.fill(inputs[rank.rank]);
      Bytes output(count * 4);
      rank.group.run(
          reduce_scatter_call(input.data(), output.data(), count, DType::kFloat32, ReduceOp::kSum));
      ASSERT_EQ(output, expected) << count;

      Bytes again(count * 4);
      auto call =
          reduce_scatter_call(nullptr, again.data(), count, DType::kFloat32, ReduceOp::kSum);
      for (int part = 0; part < size(); ++part) {
        call.inputs.push_back(input.data() + static_cast<std::size_t>(part) * count * 4);
      }
      rank.group.run(call);
      // Separate parts are summed in the order of one all-reduce per part.
      std::vector<Bytes> own_parts;
      for (const auto& whole : inputs) {
        const auto first = whole.begin() + (begin - sum.begin());
        own_parts.emplace_back(first, first + static_cast<std::ptrdiff_t>(count * 4));
      }
      ASSERT_EQ(
          again, expected_sum(own_parts, DType::kFloat32, ReduceOp::kSum, GetParam().order, count))
          << count;
    }
  });
}

TEST_P(OperationsTest, NobodyPassesABarrierEarly) {
  std::atomic<int> arrived{0};
  run([&](const Rank& rank) {
    for (int round = 1; round <= 20; ++round) {
      arrived.fetch_add(1);
      rank.group.run(barrier_call());
      ASSERT_GE(arrived.load(), round * size());
    }
  });
}

// Many operations are pending at once. Each has its own result, and they end in the order in which
// they were submitted.
TEST_P(OperationsTest, ManyInFlight) {
  constexpr int kNumOperations = 40;
  run([&](const Rank& rank) {
    std::vector<std::unique_ptr<Buffer>> buffers;
    std::vector<OperationHandle> handles;
    std::vector<int> ended;
    for (int i = 0; i < kNumOperations; ++i) {
      const std::size_t count = i % 3 == 0 ? 50 : 3000;
      buffers.push_back(std::make_unique<Buffer>(rank, GetParam().where, count * 4));
      buffers.back()->fill(
          random_input(DType::kFloat32, count, static_cast<unsigned>(i * 1000 + rank.rank)));
      handles.push_back(rank.group.submit(
          all_reduce_call(
              buffers.back()->data(),
              buffers.back()->data(),
              count,
              DType::kFloat32,
              ReduceOp::kSum),
          [&ended, i](std::exception_ptr error) {
            EXPECT_FALSE(error);
            ended.push_back(i);
          }));
    }
    // The wait for one operation makes this thread run operations, too. The group's thread may run
    // the others.
    handles[7].wait();
    EXPECT_TRUE(handles[3].wait_for(std::chrono::milliseconds(0)));
    for (auto& handle : handles) {
      handle.wait();
      EXPECT_TRUE(handle.wait_for(std::chrono::milliseconds(0)));
    }
    for (int i = 0; i < kNumOperations; ++i) {
      ASSERT_EQ(ended[i], i);
      const std::size_t count = i % 3 == 0 ? 50 : 3000;
      const auto inputs = inputs_of(size(), DType::kFloat32, count, static_cast<unsigned>(i));
      ASSERT_EQ(
          buffers[i]->bytes(),
          expected_sum(inputs, DType::kFloat32, ReduceOp::kSum, GetParam().order, count));
    }
  });
}

// The second operation on a buffer reads the result of the first.
TEST_P(OperationsTest, QueuedOperationsOnOneBuffer) {
  run([&](const Rank& rank) {
    for (const std::size_t count : {10u, 2000u}) {
      const Buffer buffer(rank, GetParam().where, count * 4);
      auto* values = reinterpret_cast<float*>(buffer.data());
      std::fill_n(values, count, 1.0f);
      std::vector<OperationHandle> handles;
      for (int i = 0; i < 3; ++i) {
        handles.push_back(rank.group.submit(
            all_reduce_call(values, values, count, DType::kFloat32, ReduceOp::kSum)));
        handles.push_back(rank.group.submit(broadcast_call(values, count, DType::kFloat32, 0)));
      }
      handles.back().wait();
      const auto expected = static_cast<float>(size() * size() * size());
      for (std::size_t i = 0; i < count; ++i) {
        ASSERT_EQ(values[i], expected);
      }
    }
  });
}

std::string name_of_setting(const testing::TestParamInfo<Setting>& info) {
  constexpr const char* kWheres[] = {"Arena", "Private", "Mixed"};
  return std::to_string(info.param.size) + kWheres[static_cast<int>(info.param.where)] +
         (info.param.order == Order::kGloo ? "GlooOrder" : "FixedOrder");
}

INSTANTIATE_TEST_SUITE_P(
    Settings,
    OperationsTest,
    testing::Values(
        Setting{1, Where::kArena, Order::kGloo},
        Setting{1, Where::kPrivate, Order::kGloo},
        Setting{2, Where::kArena, Order::kGloo},
        Setting{2, Where::kPrivate, Order::kGloo},
        Setting{3, Where::kArena, Order::kGloo},
        Setting{3, Where::kPrivate, Order::kGloo},
        Setting{3, Where::kPrivate, Order::kFixed},
        Setting{4, Where::kArena, Order::kFixed},
        Setting{4, Where::kMixed, Order::kGloo},
        Setting{7, Where::kArena, Order::kGloo},
        Setting{7, Where::kPrivate, Order::kGloo}),
    name_of_setting);

// The same gradients in one bucket and in two buckets.
TEST(FixedOrderTest, DoesNotDependOnTheLayout) {
  auto options = test_options();
  options.order = Order::kFixed;
  run_threads(
      3,
      [](const Rank& rank) {
        const auto input = random_input(DType::kFloat32, 6000, static_cast<unsigned>(rank.rank));
        auto whole = input;
        auto parts = input;
        auto reduce = [&](std::byte* data, std::size_t count) {
          rank.group.run(all_reduce_call(data, data, count, DType::kFloat32, ReduceOp::kSum));
        };
        reduce(whole.data(), 6000);
        reduce(parts.data(), 77);
        reduce(parts.data() + 77 * 4, 6000 - 77);
        ASSERT_EQ(whole, parts);
      },
      options);
}

}  // namespace
}  // namespace ddpx::shm
