// The loops of the kernels. One source per instruction set includes this file. That source first
// includes all headers that this file needs, then enables the instruction set, then defines
// DDPX_SHM_ISA, the name of a namespace.

namespace ddpx::shm {
namespace DDPX_SHM_ISA {
namespace {

// ---- dtypes: the stored form of a value, and its form in arithmetic

template <class T>
struct Plain {
  using Stored = T;
  static T load(T stored) {
    return stored;
  }
  static T round(T value) {
    return value;
  }
};

struct BFloat16 {
  using Stored = uint16_t;
  static float load(uint16_t stored) {
    return __builtin_bit_cast(float, static_cast<uint32_t>(stored) << 16);
  }
  // Rounds to nearest, ties to even. All NaN become the same NaN, as in c10::BFloat16.
  static uint16_t round(float value) {
    const auto bits = __builtin_bit_cast(uint32_t, value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded);
  }
};

struct Float16 {
  using Stored = uint16_t;
  // The multiplication rebiases the exponent, and normalizes denormals.
  static float load(uint16_t stored) {
    const uint32_t magnitude = (stored & 0x7fffu) << 13;
    const uint32_t sign = (stored & 0x8000u) << 16;
    const float scaled = __builtin_bit_cast(float, magnitude) * 0x1p112f;
    const uint32_t finite = __builtin_bit_cast(uint32_t, scaled);
    const uint32_t bits = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite;
    return __builtin_bit_cast(float, bits | sign);
  }
  // Rounds to nearest, ties to even. A NaN keeps only its sign, as in c10::Half.
  static uint16_t round(float value) {
    const auto bits = __builtin_bit_cast(uint32_t, value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    // Denormals of half are multiples of 2^-24, and so are floats in [0.5, 1). Adding 0.5 therefore
    // rounds to a denormal of half.
    const float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
    const uint32_t denormal = __builtin_bit_cast(uint32_t, shifted) - 0x3f000000u;
    uint32_t half = magnitude < 0x38800000u ? denormal : normal;
    half = magnitude >= 0x47800000u ? 0x7c00u : half;
    half = magnitude > 0x7f800000u ? 0x7e00u : half;
    return static_cast<uint16_t>(half | sign);
  }
};

// ---- ops

// Arithmetic on integers uses unsigned types, since signed overflow is undefined. Types smaller
// than 4 bytes use uint32_t.
template <class T>
using Wide = std::conditional_t<
    std::is_integral_v<T>,
    std::conditional_t<
        (sizeof(T) < 4),
        uint32_t,
        std::make_unsigned_t<std::conditional_t<std::is_integral_v<T>, T, int>>>,
    T>;

// An operation whose result is the combination of all values.
template <class T>
struct KeepsResult {
  static T finish(T acc, int) {
    return acc;
  }
};

template <class D>
struct Sum : KeepsResult<typename D::Stored> {
  using Stored = typename D::Stored;
  static Stored combine(Stored local, Stored acc) {
    const auto a = D::load(local);
    const auto b = D::load(acc);
    using W = Wide<std::remove_const_t<decltype(a)>>;
    return D::round(static_cast<decltype(a)>(static_cast<W>(a) + static_cast<W>(b)));
  }
};

template <class D>
struct Avg : Sum<D> {
  using Stored = typename D::Stored;
  static Stored finish(Stored acc, int divisor) {
    const auto value = D::load(acc);
    return D::round(value / static_cast<decltype(value)>(divisor));
  }
};

template <class D>
struct Product : KeepsResult<typename D::Stored> {
  using Stored = typename D::Stored;
  static Stored combine(Stored local, Stored acc) {
    const auto a = D::load(local);
    const auto b = D::load(acc);
    using W = Wide<std::remove_const_t<decltype(a)>>;
    return D::round(static_cast<decltype(a)>(static_cast<W>(a) * static_cast<W>(b)));
  }
};

// std::max(local, acc): the left operand unless it is less.
template <class D>
struct Max : KeepsResult<typename D::Stored> {
  using Stored = typename D::Stored;
  static Stored combine(Stored local, Stored acc) {
    return D::load(local) < D::load(acc) ? acc : local;
  }
};

// std::min(local, acc): the left operand unless the right operand is less.
template <class D>
struct Min : KeepsResult<typename D::Stored> {
  using Stored = typename D::Stored;
  static Stored combine(Stored local, Stored acc) {
    return D::load(acc) < D::load(local) ? acc : local;
  }
};

enum class Bits { kAnd, kOr, kXor };

template <class T, Bits kBits>
struct Bitwise : KeepsResult<T> {
  using Stored = T;
  static T combine(T local, T acc) {
    return static_cast<T>(
        kBits == Bits::kAnd  ? local & acc
        : kBits == Bits::kOr ? local | acc
                             : local ^ acc);
  }
};

// ---- loops

// One pass over memory: every cache line is read once and written once.
template <class F, int kSources, int kResults>
void fused(const Reduction& work) {
  using T = typename F::Stored;
  const T* sources[kSources];
  T* results[kResults];
  for (int k = 0; k < kSources; ++k) {
    sources[k] = reinterpret_cast<const T*>(work.sources[k]);
  }
  for (int k = 0; k < kResults; ++k) {
    results[k] = reinterpret_cast<T*>(work.results[k]);
  }
  const auto count = work.count;
  const auto divisor = work.divisor;
#if defined(__clang__)
#pragma clang loop vectorize(assume_safety)
#else
#pragma GCC ivdep
#endif
  for (std::size_t i = 0; i < count; ++i) {
    T acc = sources[0][i];
    for (int k = 1; k < kSources; ++k) {
      acc = F::combine(sources[k][i], acc);
    }
    acc = F::finish(acc, divisor);
    for (int k = 0; k < kResults; ++k) {
      results[k][i] = acc;
    }
  }
}

// For any numbers of sources and results: block by block, in the L1 cache.
template <class F>
void blockwise(const Reduction& work) {
  using T = typename F::Stored;
  constexpr std::size_t kBlock = 8192 / sizeof(T);
  alignas(64) T acc[kBlock];
  for (std::size_t begin = 0; begin < work.count; begin += kBlock) {
    const auto length = work.count - begin < kBlock ? work.count - begin : kBlock;
    const auto offset = begin * sizeof(T);
    std::memcpy(acc, work.sources[0] + offset, length * sizeof(T));
    for (int k = 1; k < work.num_sources; ++k) {
      const T* local = reinterpret_cast<const T*>(work.sources[k] + offset);
      for (std::size_t i = 0; i < length; ++i) {
        acc[i] = F::combine(local[i], acc[i]);
      }
    }
    for (std::size_t i = 0; i < length; ++i) {
      acc[i] = F::finish(acc[i], work.divisor);
    }
    for (int k = 0; k < work.num_results; ++k) {
      std::memcpy(work.results[k] + offset, acc, length * sizeof(T));
    }
  }
}

template <class F, int kSources>
void with_sources(const Reduction& work) {
  switch (work.num_results) {
    case 1:
      return fused<F, kSources, 1>(work);
    case 2:
      return fused<F, kSources, 2>(work);
    case kSources == 2 ? 0:
    kSources:
      return fused<F, kSources, kSources>(work);
    default:
      return blockwise<F>(work);
  }
}

template <class F>
void reduce(const Reduction& work) {
  switch (work.num_sources) {
    case 2:
      return with_sources<F, 2>(work);
    case 3:
      return with_sources<F, 3>(work);
    case 4:
      return with_sources<F, 4>(work);
    default:
      return blockwise<F>(work);
  }
}

template <class D>
Kernel floating(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce<Sum<D>>;
    case ReduceOp::kAvg:
      return reduce<Avg<D>>;
    case ReduceOp::kMin:
      return reduce<Min<D>>;
    case ReduceOp::kMax:
      return reduce<Max<D>>;
    case ReduceOp::kProduct:
      return reduce<Product<D>>;
    default:
      return nullptr;
  }
}

template <class T>
Kernel integral(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce<Sum<Plain<T>>>;
    case ReduceOp::kMin:
      return reduce<Min<Plain<T>>>;
    case ReduceOp::kMax:
      return reduce<Max<Plain<T>>>;
    case ReduceOp::kProduct:
      return reduce<Product<Plain<T>>>;
    case ReduceOp::kBitAnd:
      return reduce<Bitwise<T, Bits::kAnd>>;
    case ReduceOp::kBitOr:
      return reduce<Bitwise<T, Bits::kOr>>;
    case ReduceOp::kBitXor:
      return reduce<Bitwise<T, Bits::kXor>>;
    default:
      return nullptr;
  }
}

Kernel boolean(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBitOr:
      return reduce<Bitwise<uint8_t, Bits::kOr>>;
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBitAnd:
      return reduce<Bitwise<uint8_t, Bits::kAnd>>;
    case ReduceOp::kBitXor:
      return reduce<Bitwise<uint8_t, Bits::kXor>>;
    default:
      return nullptr;
  }
}

}  // namespace

Kernel find(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat16:
      return floating<Float16>(op);
    case DType::kBFloat16:
      return floating<BFloat16>(op);
    case DType::kFloat32:
      return floating<Plain<float>>(op);
    case DType::kFloat64:
      return floating<Plain<double>>(op);
    case DType::kInt8:
      return integral<int8_t>(op);
    case DType::kUint8:
      return integral<uint8_t>(op);
    case DType::kInt16:
      return integral<int16_t>(op);
    case DType::kInt32:
      return integral<int32_t>(op);
    case DType::kInt64:
      return integral<int64_t>(op);
    case DType::kBool:
      return boolean(op);
  }
  return nullptr;
}

}  // namespace DDPX_SHM_ISA
}  // namespace ddpx::shm
