// A slow and simple reference of the results of an all-reduce, element by element.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "shm/types.h"

namespace ddpx::shm {

using Bytes = std::vector<std::byte>;

// ---- 16-bit floats: rounding by search instead of bit operations

inline double half_value(uint16_t bits) {
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  if (exponent == 31) {
    return mantissa ? std::nan("") : sign * INFINITY;
  }
  return exponent == 0 ? sign * std::ldexp(mantissa, -24)
                       : sign * std::ldexp(1024 + mantissa, exponent - 25);
}

// Rounds to nearest, ties to even. For finite values only.
inline uint16_t nearest_half(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  if (magnitude >= 65520) {
    return sign | 0x7c00;
  }
  uint16_t low = 0;
  uint16_t high = 0x7c00;  // stands for 65536 here
  const auto of = [](uint16_t bits) { return bits == 0x7c00 ? 65536.0 : half_value(bits); };
  while (high - low > 1) {
    const auto middle = static_cast<uint16_t>((low + high) / 2);
    (of(middle) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - of(low);
  const double above = of(high) - magnitude;
  const bool up = above < below || (above == below && (low & 1) != 0);
  return sign | (up ? high : low);
}

inline float brain_value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

inline uint16_t nearest_brain(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t rest = bits & 0xffff;
  uint32_t top = bits >> 16;
  if (rest > 0x8000 || (rest == 0x8000 && (top & 1) != 0)) {
    ++top;
  }
  return static_cast<uint16_t>(top);
}

// ---- one element

template <class T>
T combine_values(ReduceOp op, T local, T acc) {
  switch (op) {
    case ReduceOp::kMin:
      return std::min(local, acc);
    case ReduceOp::kMax:
      return std::max(local, acc);
    case ReduceOp::kProduct:
      return static_cast<T>(local * acc);
    default:
      return static_cast<T>(local + acc);
  }
}

// The element at `index` of all ranks' buffers, combined in the given order.
inline void combine_element(
    DType dtype,
    ReduceOp op,
    const std::vector<Bytes>& inputs,
    const std::vector<int>& ranks,
    std::size_t index,
    std::byte* result) {
  const auto fold = [&](auto zero, auto load, auto store) {
    using Stored = decltype(zero);
    const auto read = [&](int rank) {
      Stored stored;
      std::memcpy(&stored, inputs[rank].data() + index * sizeof(stored), sizeof(stored));
      return stored;
    };
    Stored acc = read(ranks[0]);
    for (std::size_t k = 1; k < ranks.size(); ++k) {
      acc = store(combine_values(op, load(read(ranks[k])), load(acc)));
    }
    if (op == ReduceOp::kAvg) {
      using Value = decltype(load(acc));
      acc = store(static_cast<Value>(load(acc) / static_cast<Value>(ranks.size())));
    }
    std::memcpy(result + index * sizeof(acc), &acc, sizeof(acc));
  };
  const auto same = [](auto value) { return value; };
  const auto half = [](uint16_t bits) { return static_cast<float>(half_value(bits)); };
  switch (dtype) {
    case DType::kFloat16:
      return fold(uint16_t{}, half, [](float value) { return nearest_half(value); });
    case DType::kBFloat16:
      return fold(uint16_t{}, brain_value, nearest_brain);
    case DType::kFloat32:
      return fold(float{}, same, same);
    case DType::kFloat64:
      return fold(double{}, same, same);
    case DType::kInt8:
      return fold(int8_t{}, same, same);
    case DType::kUint8:
      return fold(uint8_t{}, same, same);
    case DType::kInt16:
      return fold(int16_t{}, same, same);
    case DType::kInt32:
      return fold(int32_t{}, same, same);
    case DType::kInt64:
      return fold(int64_t{}, same, same);
    case DType::kBool:
      return fold(
          uint8_t{},
          [](uint8_t value) { return static_cast<int>(value); },
          [](int value) { return static_cast<uint8_t>(value != 0); });
  }
}

// Random values: for integers so small that products do not overflow, for floats of very different
// magnitudes.
inline Bytes random_input(DType dtype, std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Bytes bytes(count * size_of(dtype));
  const auto fill = [&](auto zero, auto make) {
    for (std::size_t i = 0; i < count; ++i) {
      auto value = zero;
      value = make();
      std::memcpy(bytes.data() + i * sizeof(value), &value, sizeof(value));
    }
  };
  const auto real = [&] {
    return normal(random) * std::ldexp(1.0, static_cast<int>(random() % 9));
  };
  const auto whole = [&] { return static_cast<int>(random() % 5) - 2; };
  switch (dtype) {
    case DType::kFloat16:
      fill(uint16_t{}, [&] { return nearest_half(real() * 0.01); });
      break;
    case DType::kBFloat16:
      fill(uint16_t{}, [&] { return nearest_brain(static_cast<float>(real())); });
      break;
    case DType::kFloat32:
      fill(float{}, [&] { return static_cast<float>(real()); });
      break;
    case DType::kFloat64:
      fill(double{}, real);
      break;
    case DType::kInt8:
      fill(int8_t{}, [&] { return static_cast<int8_t>(whole()); });
      break;
    case DType::kUint8:
      fill(uint8_t{}, [&] { return static_cast<uint8_t>(whole() + 2); });
      break;
    case DType::kInt16:
      fill(int16_t{}, [&] { return static_cast<int16_t>(whole()); });
      break;
    case DType::kInt32:
      fill(int32_t{}, [&] { return static_cast<int32_t>(whole()); });
      break;
    case DType::kInt64:
      fill(int64_t{}, [&] { return static_cast<int64_t>(whole()); });
      break;
    case DType::kBool:
      fill(uint8_t{}, [&] { return static_cast<uint8_t>(random() & 1); });
      break;
  }
  return bytes;
}

}  // namespace ddpx::shm
