// Compares the kernels with a slow reference, for every dtype, op, and number of sources and
// results.
#include "shm/kernels.h"

#include <gtest/gtest.h>

#include "reference.h"

namespace ddpx::shm {
namespace baseline {

Kernel find(DType dtype, ReduceOp op);

}  // namespace baseline

namespace {

constexpr DType kDTypes[] = {
    DType::kFloat16,
    DType::kBFloat16,
    DType::kFloat32,
    DType::kFloat64,
    DType::kInt8,
    DType::kUint8,
    DType::kInt16,
    DType::kInt32,
    DType::kInt64,
    DType::kBool};
constexpr ReduceOp kOps[] = {
    ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};

bool is_floating(DType dtype) {
  return dtype <= DType::kFloat64;
}

using Find = Kernel (*)(DType, ReduceOp);

class KernelsTest : public testing::TestWithParam<Find> {};

TEST_P(KernelsTest, AgreeWithTheReference) {
  for (const auto dtype : kDTypes) {
    for (const auto op : kOps) {
      const auto kernel = GetParam()(dtype, op);
      if (op == ReduceOp::kAvg && !is_floating(dtype)) {
        EXPECT_EQ(kernel, nullptr);
        continue;
      }
      ASSERT_NE(kernel, nullptr) << name_of(dtype) << name_of(op);
      for (const int num_ranks : {2, 3, 4, 5, 9}) {
        // One element, an odd count, and several blocks of the blockwise kernel.
        for (const std::size_t count : {1u, 37u, 9001u}) {
          std::vector<Bytes> inputs;
          std::vector<int> ranks;
          for (int rank = 0; rank < num_ranks; ++rank) {
            inputs.push_back(random_input(dtype, count, static_cast<unsigned>(rank) + 7));
            ranks.push_back(rank);
          }
          Bytes expected(inputs[0].size());
          for (std::size_t i = 0; i < count; ++i) {
            combine_element(dtype, op, inputs, ranks, i, expected.data());
          }
          // Results in place of all sources, of one source, and of the first two sources.
          for (const int num_results : {num_ranks, 1, 2}) {
            auto buffers = inputs;
            std::vector<const std::byte*> sources;
            std::vector<std::byte*> results;
            for (int rank = 0; rank < num_ranks; ++rank) {
              sources.push_back(buffers[rank].data());
              if (rank < num_results) {
                results.push_back(buffers[rank].data());
              }
            }
            kernel({sources.data(), num_ranks, results.data(), num_results, count, num_ranks});
            for (int rank = 0; rank < num_ranks; ++rank) {
              ASSERT_EQ(buffers[rank], rank < num_results ? expected : inputs[rank])
                  << name_of(dtype) << " " << name_of(op) << " ranks " << num_ranks << " count "
                  << count << " results " << num_results << " rank " << rank;
            }
          }
        }
      }
    }
  }
}

// Multiplies every half by 1, which tests load and rounding of all values.
TEST_P(KernelsTest, EveryHalfSurvives) {
  std::vector<uint16_t> halves(65536);
  for (std::size_t i = 0; i < halves.size(); ++i) {
    halves[i] = static_cast<uint16_t>(i);
  }
  const std::vector<uint16_t> ones(halves.size(), 0x3c00);
  std::vector<uint16_t> result(halves.size());
  const std::byte* sources[] = {
      reinterpret_cast<const std::byte*>(halves.data()),
      reinterpret_cast<const std::byte*>(ones.data())};
  std::byte* results[] = {reinterpret_cast<std::byte*>(result.data())};
  GetParam()(DType::kFloat16, ReduceOp::kProduct)({sources, 2, results, 1, halves.size(), 2});
  for (std::size_t i = 0; i < halves.size(); ++i) {
    const bool is_nan = (i & 0x7fff) > 0x7c00;
    ASSERT_EQ(result[i], is_nan ? ((i & 0x8000) | 0x7e00) : i);
  }
}

TEST_P(KernelsTest, HalvesAreRoundedToEven) {
  std::mt19937 random(3);
  std::vector<uint16_t> a(200'000);
  auto b = a;
  for (std::size_t i = 0; i < a.size(); ++i) {
    a[i] = static_cast<uint16_t>(random() % 0x7c00);
    b[i] = static_cast<uint16_t>(random() % 0x7c00) | (random() & 1 ? 0x8000 : 0);
  }
  for (const auto op : {ReduceOp::kSum, ReduceOp::kProduct}) {
    std::vector<uint16_t> result(a.size());
    const std::byte* sources[] = {
        reinterpret_cast<const std::byte*>(a.data()), reinterpret_cast<const std::byte*>(b.data())};
    std::byte* results[] = {reinterpret_cast<std::byte*>(result.data())};
    GetParam()(DType::kFloat16, op)({sources, 2, results, 1, a.size(), 2});
    for (std::size_t i = 0; i < a.size(); ++i) {
      const float exact = op == ReduceOp::kSum
                              ? static_cast<float>(half_value(a[i]) + half_value(b[i]))
                              : static_cast<float>(half_value(a[i]) * half_value(b[i]));
      ASSERT_EQ(result[i], nearest_half(exact)) << i;
    }
  }
}

TEST_P(KernelsTest, NanAndZerosAsGloo) {
  const float nan = std::nanf("");
  const float locals[] = {1, nan, -0.0f, 0.0f};
  const float accs[] = {nan, 1, 0.0f, -0.0f};
  const auto run = [&](ReduceOp op) {
    std::vector<float> result(4);
    const std::byte* sources[] = {
        reinterpret_cast<const std::byte*>(accs), reinterpret_cast<const std::byte*>(locals)};
    std::byte* results[] = {reinterpret_cast<std::byte*>(result.data())};
    GetParam()(DType::kFloat32, op)({sources, 2, results, 1, 4, 2});
    return result;
  };
  for (const auto op : {ReduceOp::kMax, ReduceOp::kMin}) {
    const auto result = run(op);
    EXPECT_EQ(result[0], 1);
    EXPECT_TRUE(std::isnan(result[1]));
    EXPECT_TRUE(std::signbit(result[2]));
    EXPECT_FALSE(std::signbit(result[3]));
  }
}

TEST(BitwiseKernelsTest, AreForIntegers) {
  EXPECT_EQ(find_kernel(DType::kFloat32, ReduceOp::kBitAnd), nullptr);
  const uint8_t a[] = {12}, b[] = {10};
  uint8_t result = 0;
  const std::byte* sources[] = {
      reinterpret_cast<const std::byte*>(a), reinterpret_cast<const std::byte*>(b)};
  std::byte* results[] = {reinterpret_cast<std::byte*>(&result)};
  const auto run = [&](ReduceOp op) {
    find_kernel(DType::kUint8, op)({sources, 2, results, 1, 1, 2});
    return static_cast<int>(result);
  };
  EXPECT_EQ(run(ReduceOp::kBitAnd), 8);
  EXPECT_EQ(run(ReduceOp::kBitOr), 14);
  EXPECT_EQ(run(ReduceOp::kBitXor), 6);
}

INSTANTIATE_TEST_SUITE_P(
    InstructionSets, KernelsTest, testing::Values(&baseline::find, &find_kernel));

}  // namespace
}  // namespace ddpx::shm
