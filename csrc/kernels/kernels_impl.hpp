// The kernels, included by exactly one file per instruction set (see the
// kernels_*.cpp), each compiled with its own flags. Everything here has
// internal linkage and no std:: function template is used: a weak symbol
// compiled with AVX could be the copy the linker keeps for every other file.

#include "kernels/formulas/half.hpp"
#include "kernels/formulas/rules.hpp"
#include "kernels/tables.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define FUSEDPG_INLINE static inline __attribute__((always_inline))

namespace fusedpg::kernels {
namespace {

// Through memcpy because spans may have any alignment.
template <typename T>
FUSEDPG_INLINE T load(const char* base, size_t i) {
  T value;
  __builtin_memcpy(&value, base + i * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
FUSEDPG_INLINE void store(char* base, size_t i, T value) {
  __builtin_memcpy(base + i * sizeof(T), &value, sizeof(T));
}

#include "kernels/half_impl.hpp"
#include "kernels/ops_impl.hpp"
#include "kernels/stores_impl.hpp"

// Small enough that a handful of tiles stay in L1, long enough that its ends do
// not matter; 4 to 16 KiB measure the same.
constexpr size_t kTileBytes = 8192;

// Elements of the first tile: short when that puts the following ones on line
// boundaries of `dst`.
FUSEDPG_INLINE size_t
first_tile(const void* dst, size_t element, size_t full, bool stream) {
  const size_t lead = stream ? to_line(dst) : 0;
  return lead % element == 0 && lead != 0 ? lead / element : full;
}

// tile = fold of `tile` (unless kFirst) and kNum sources. Nothing but the tile
// is written, so destinations may be identical to sources.
template <typename Op, size_t kNum, bool kFirst>
void fold(
    Op op,
    typename Op::Value* __restrict tile,
    const char* const* srcs,
    size_t n) {
  using T = typename Op::Value;
  const char* s0 = srcs[0];
  const char* s1 = kNum > 1 ? srcs[1] : nullptr;
  const char* s2 = kNum > 2 ? srcs[2] : nullptr;
  const char* s3 = kNum > 3 ? srcs[3] : nullptr;
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) {
    T a;
    if constexpr (kFirst) {
      a = op.first(load<T>(s0, i));
    } else {
      a = op.next(tile[i], load<T>(s0, i));
    }
    if constexpr (kNum > 1) {
      a = op.next(a, load<T>(s1, i));
    }
    if constexpr (kNum > 2) {
      a = op.next(a, load<T>(s2, i));
    }
    if constexpr (kNum > 3) {
      a = op.next(a, load<T>(s3, i));
    }
    tile[i] = a;
  }
}

// At most kFan sources in one pass over the tile.
template <typename Op, size_t kFan, bool kFirst>
FUSEDPG_INLINE void fold_some(
    Op op,
    typename Op::Value* tile,
    const char* const* srcs,
    size_t num,
    size_t n) {
  if constexpr (kFan > 1) {
    if (num < kFan) {
      return fold_some<Op, kFan - 1, kFirst>(op, tile, srcs, num, n);
    }
  }
  fold<Op, kFan, kFirst>(op, tile, srcs, n);
}

// tile = fold of elements [begin, begin + n) of all sources. T is the element
// type of the sources; where it differs from the accumulator the sources are
// widened in L1 first.
template <typename T, typename Op, size_t kFan>
FUSEDPG_INLINE void fold_all(
    Op op,
    typename Op::Value* tile,
    const void* const* srcs,
    size_t num_srcs,
    size_t begin,
    size_t n) {
  using Acc = typename Op::Value;
  constexpr bool kWiden = sizeof(T) != sizeof(Acc);
  constexpr size_t kSpace = kWiden ? kTileBytes / sizeof(Acc) : 1;
  alignas(kLine) Acc wide[kFan][kSpace];
  for (size_t k = 0; k < num_srcs; k += kFan) {
    const size_t num = smaller(kFan, num_srcs - k);
    const char* some[kFan] = {};
    for (size_t f = 0; f < num; ++f) {
      some[f] = static_cast<const char*>(srcs[k + f]) + begin * sizeof(T);
      if constexpr (kWiden) {
        widen(wide[f], static_cast<const T*>(nullptr), some[f], n);
        some[f] = reinterpret_cast<const char*>(wide[f]);
      }
    }
    if (k == 0) {
      fold_some<Op, kFan, true>(op, tile, some, num, n);
    } else {
      fold_some<Op, kFan, false>(op, tile, some, num, n);
    }
  }
}

struct Spans {
  void* const* dsts;
  size_t num_dsts;
  const void* const* srcs;
  size_t num_srcs;
  size_t count;
  bool stream;
  bool wide = false; // destinations are of the accumulator's type
};

// Division of an average, over one tile; nullptr for the other operations.
template <typename Acc>
using Finish = void (*)(Acc* tile, size_t n, int64_t divisor);

template <typename Acc>
static void multiply_by_reciprocal(Acc* tile, size_t n, int64_t divisor) {
  const Acc inverse = Acc(1) / static_cast<Acc>(divisor);
  for (size_t i = 0; i < n; ++i) {
    tile[i] *= inverse;
  }
}

template <typename Acc>
static void divide_real(Acc* tile, size_t n, int64_t divisor) {
  const auto by = static_cast<Acc>(divisor);
  if ((divisor & (divisor - 1)) == 0) {
    // The reciprocal is exact, so the product has the quotient's bits.
    return multiply_by_reciprocal(tile, n, divisor);
  }
  for (size_t i = 0; i < n; ++i) {
    tile[i] /= by;
  }
}

// The sum has wrapped in its own type; the quotient truncates. T is the element
// type, U the unsigned type of its size.
template <typename T, typename U>
static void divide_integer(U* tile, size_t n, int64_t divisor) {
  for (size_t i = 0; i < n; ++i) {
    if constexpr (static_cast<T>(-1) < static_cast<T>(0)) {
      tile[i] = static_cast<U>(
          static_cast<int64_t>(static_cast<T>(tile[i])) / divisor);
    } else {
      tile[i] = static_cast<U>(tile[i] / static_cast<uint64_t>(divisor));
    }
  }
}

template <typename T, size_t kFan, typename Op>
static void reduce_spans(
    const Spans& s,
    Op op,
    Finish<typename Op::Value> finish = nullptr,
    int64_t divisor = 1) {
  using Acc = typename Op::Value;
  constexpr size_t kTile = kTileBytes / sizeof(Acc);
  constexpr bool kNarrow = sizeof(T) != sizeof(Acc);
  alignas(kLine) Acc tile[kTile];
  alignas(kLine) char narrowed[kNarrow ? kTile * sizeof(T) : 1];
  size_t n = first_tile(s.dsts[0], sizeof(T), kTile, s.stream);
  for (size_t i = 0; i < s.count; i += n, n = kTile) {
    n = smaller(n, s.count - i);
    fold_all<T, Op, kFan>(op, tile, s.srcs, s.num_srcs, i, n);
    if (finish != nullptr) {
      finish(tile, n, divisor);
    }
    const void* result = tile;
    size_t element = sizeof(Acc);
    if constexpr (kNarrow) {
      if (!s.wide) {
        narrow(
            narrowed,
            static_cast<const T*>(nullptr),
            reinterpret_cast<const char*>(tile),
            n);
        result = narrowed;
        element = sizeof(T);
      }
    }
    store_tile(
        s.dsts,
        s.num_dsts,
        s.srcs,
        s.num_srcs,
        i * element,
        result,
        n * element,
        s.stream);
  }
  stream_fence(s.stream);
}

template <typename T, typename Acc>
static void reduce_weighted(const Spans& s, const double* weights) {
  constexpr size_t kTile = kTileBytes / sizeof(Acc);
  constexpr bool kWiden = sizeof(T) != sizeof(Acc);
  alignas(kLine) Acc tile[kTile];
  alignas(kLine) Acc wide[kWiden ? kTile : 1];
  alignas(kLine) T narrowed[kWiden ? kTile : 1];
  for (size_t i = 0, n = 0; i < s.count; i += n) {
    n = smaller(kTile, s.count - i);
    for (size_t k = 0; k < s.num_srcs; ++k) {
      const PremulSum<Acc> weighted{static_cast<Acc>(weights[k])};
      const char* src = static_cast<const char*>(s.srcs[k]) + i * sizeof(T);
      if constexpr (kWiden) {
        widen(wide, static_cast<const T*>(nullptr), src, n);
        src = reinterpret_cast<const char*>(wide);
      }
      if (k == 0) {
        fold<PremulSum<Acc>, 1, true>(weighted, tile, &src, n);
      } else {
        fold<PremulSum<Acc>, 1, false>(weighted, tile, &src, n);
      }
    }
    const void* result = tile;
    size_t element = sizeof(Acc);
    if constexpr (kWiden) {
      if (!s.wide) {
        narrow(
            reinterpret_cast<char*>(narrowed),
            static_cast<const T*>(nullptr),
            reinterpret_cast<const char*>(tile),
            n);
        result = narrowed;
        element = sizeof(T);
      }
    }
    store_tile(
        s.dsts,
        s.num_dsts,
        s.srcs,
        s.num_srcs,
        i * element,
        result,
        n * element,
        s.stream);
  }
  stream_fence(s.stream);
}

// Sums are worth four sources a pass; the rest (and the half types, whose
// widened sources need room in L1) take two.
template <typename T>
constexpr size_t kSumFan = sizeof(T) >= 4 ? 4 : 2;

template <typename T, typename Acc>
static void reduce_real(const Spans& s, const ReduceArgs& args) {
  switch (args.op) {
    case RedOp::kSum:
      return reduce_spans<T, kSumFan<T>>(s, Sum<Acc>());
    case RedOp::kAvg:
      return reduce_spans<T, kSumFan<T>>(
          s,
          Sum<Acc>(),
          args.reciprocal ? multiply_by_reciprocal<Acc> : divide_real<Acc>,
          args.divisor);
    case RedOp::kPremulSum:
      if (args.weights != nullptr) {
        return reduce_weighted<T, Acc>(s, args.weights);
      }
      return reduce_spans<T, 2>(
          s, PremulSum<Acc>{static_cast<Acc>(args.factor)});
    case RedOp::kProduct:
      return reduce_spans<T, 2>(s, Product<Acc>());
    case RedOp::kMin:
      return reduce_spans<T, 2>(s, Min<Acc>());
    case RedOp::kMax:
      return reduce_spans<T, 2>(s, Max<Acc>());
    default:
      return;
  }
}

// T is the element type, U the unsigned type of its size: wrapping and bitwise
// operations are shared between the two.
template <typename T, typename U>
static void reduce_integer(const Spans& s, const ReduceArgs& args) {
  switch (args.op) {
    case RedOp::kSum:
      return reduce_spans<U, 2>(s, Sum<U>());
    case RedOp::kAvg:
      return reduce_spans<U, 2>(
          s, Sum<U>(), divide_integer<T, U>, args.divisor);
    case RedOp::kProduct:
      return reduce_spans<U, 2>(s, Product<U>());
    case RedOp::kMin:
      return reduce_spans<T, 2>(s, Min<T>());
    case RedOp::kMax:
      return reduce_spans<T, 2>(s, Max<T>());
    case RedOp::kBand:
      return reduce_spans<U, 2>(s, And<U>());
    case RedOp::kBor:
      return reduce_spans<U, 2>(s, Or<U>());
    case RedOp::kBxor:
      return reduce_spans<U, 2>(s, Xor<U>());
    default:
      return;
  }
}

static void reduce_bool(const Spans& s, const ReduceArgs& args) {
  switch (args.op) {
    case RedOp::kSum:
    case RedOp::kMax:
    case RedOp::kBor:
      return reduce_spans<uint8_t, 2>(s, Logical<Or>());
    case RedOp::kProduct:
    case RedOp::kMin:
    case RedOp::kBand:
      return reduce_spans<uint8_t, 2>(s, Logical<And>());
    case RedOp::kBxor:
      return reduce_spans<uint8_t, 2>(s, Logical<Xor>());
    default:
      return;
  }
}

// Real and imaginary parts are kept apart: from interleaved ones GCC 12 makes
// fused multiply-adds, -ffp-contract=off or not.
template <typename T>
static void reduce_complex_product(const Spans& s) {
  constexpr size_t kTile = kTileBytes / (2 * sizeof(T));
  alignas(kLine) T re[kTile];
  alignas(kLine) T im[kTile];
  alignas(kLine) T tile[2 * kTile];
  size_t n = first_tile(s.dsts[0], 2 * sizeof(T), kTile, s.stream);
  for (size_t i = 0; i < s.count; i += n, n = kTile) {
    n = smaller(n, s.count - i);
    const size_t offset = i * 2 * sizeof(T);
    const char* src = static_cast<const char*>(s.srcs[0]) + offset;
    for (size_t e = 0; e < n; ++e) {
      re[e] = load<T>(src, 2 * e);
      im[e] = load<T>(src, 2 * e + 1);
    }
    for (size_t k = 1; k < s.num_srcs; ++k) {
      src = static_cast<const char*>(s.srcs[k]) + offset;
      for (size_t e = 0; e < n; ++e) {
        const T x = load<T>(src, 2 * e);
        const T y = load<T>(src, 2 * e + 1);
        const T a = re[e];
        const T b = im[e];
        re[e] = a * x - b * y;
        im[e] = a * y + b * x;
      }
    }
    for (size_t e = 0; e < n; ++e) {
      tile[2 * e] = re[e];
      tile[2 * e + 1] = im[e];
    }
    store_tile(
        s.dsts,
        s.num_dsts,
        s.srcs,
        s.num_srcs,
        offset,
        tile,
        n * 2 * sizeof(T),
        s.stream);
  }
  stream_fence(s.stream);
}

template <typename T>
static void reduce_complex(Spans s, const ReduceArgs& args) {
  switch (args.op) {
    case RedOp::kProduct:
      return reduce_complex_product<T>(s);
    case RedOp::kSum:
    case RedOp::kAvg:
    case RedOp::kPremulSum:
      s.count *= 2;
      return reduce_real<T, T>(s, args);
    default:
      return;
  }
}

static void reduce(
    const ReduceArgs& args,
    void* const* dsts,
    size_t num_dsts,
    const void* const* srcs,
    size_t num_srcs,
    size_t count,
    bool stream) {
  if (count == 0 || num_dsts == 0 || num_srcs == 0) {
    return;
  }
  const Spans s{dsts, num_dsts, srcs, num_srcs, count, stream, args.wide};
  switch (args.dtype) {
    case DType::kUInt8:
      return reduce_integer<uint8_t, uint8_t>(s, args);
    case DType::kInt8:
      return reduce_integer<int8_t, uint8_t>(s, args);
    case DType::kInt16:
      return reduce_integer<int16_t, uint16_t>(s, args);
    case DType::kInt32:
      return reduce_integer<int32_t, uint32_t>(s, args);
    case DType::kInt64:
      return reduce_integer<int64_t, uint64_t>(s, args);
    case DType::kUInt16:
      return reduce_integer<uint16_t, uint16_t>(s, args);
    case DType::kUInt32:
      return reduce_integer<uint32_t, uint32_t>(s, args);
    case DType::kUInt64:
      return reduce_integer<uint64_t, uint64_t>(s, args);
    case DType::kFloat16:
      return reduce_real<Half, float>(s, args);
    case DType::kBFloat16:
      return reduce_real<BFloat, float>(s, args);
    case DType::kFloat32:
      return reduce_real<float, float>(s, args);
    case DType::kFloat64:
      return reduce_real<double, double>(s, args);
    case DType::kBool:
      return reduce_bool(s, args);
    case DType::kComplex64:
      return reduce_complex<float>(s, args);
    case DType::kComplex128:
      return reduce_complex<double>(s, args);
    case DType::kOpaque:
      return;
  }
}

#include "kernels/update_impl.hpp"

static void copy(void* dst, const void* src, size_t bytes, bool stream) {
  if (bytes == 0) {
    return;
  }
  if (!stream) {
    __builtin_memcpy(dst, src, bytes);
    return;
  }
  stream_store(static_cast<char*>(dst), static_cast<const char*>(src), bytes);
  stream_fence(stream);
}

// A NaN is what lies above the infinity when the sign is dropped. Compared as
// signed integers, which every instruction set can.
template <typename I>
static bool any_above(const char* base, size_t count, I infinity) {
  constexpr size_t kBlock = 4096 / sizeof(I);
  const I no_sign = static_cast<I>(~(static_cast<I>(1) << (8 * sizeof(I) - 1)));
  for (size_t i = 0; i < count; i += kBlock) {
    const size_t end = smaller(i + kBlock, count);
    I found = 0;
    for (size_t k = i; k < end; ++k) {
      found = static_cast<I>(
          found |
          (static_cast<I>(load<I>(base, k) & no_sign) > infinity ? 1 : 0));
    }
    if (found != 0) {
      return true;
    }
  }
  return false;
}

static bool has_nan(DType dtype, const void* src, size_t count) {
  const auto* base = static_cast<const char*>(src);
  switch (dtype) {
    case DType::kFloat16:
      return any_above<int16_t>(base, count, 0x7c00);
    case DType::kBFloat16:
      return any_above<int16_t>(base, count, 0x7f80);
    case DType::kComplex64:
      return any_above<int32_t>(base, 2 * count, 0x7f800000);
    case DType::kFloat32:
      return any_above<int32_t>(base, count, 0x7f800000);
    case DType::kComplex128:
      return any_above<int64_t>(base, 2 * count, 0x7ff0000000000000);
    case DType::kFloat64:
      return any_above<int64_t>(base, count, 0x7ff0000000000000);
    default:
      return false;
  }
}

static void cast(
    DType dst_type,
    void* dst,
    DType src_type,
    const void* src,
    size_t count) {
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
  const auto* half = static_cast<const Half*>(nullptr);
  const auto* bfloat = static_cast<const BFloat*>(nullptr);
  if (dst_type == src_type) {
    copy(dst, src, count * dtype_size(dst_type), false);
  } else if (dst_type == DType::kFloat32 && src_type == DType::kFloat16) {
    widen(static_cast<float*>(dst), half, from, count);
  } else if (dst_type == DType::kFloat32 && src_type == DType::kBFloat16) {
    widen(static_cast<float*>(dst), bfloat, from, count);
  } else if (dst_type == DType::kFloat16 && src_type == DType::kFloat32) {
    narrow(to, half, from, count);
  } else if (dst_type == DType::kBFloat16 && src_type == DType::kFloat32) {
    narrow(to, bfloat, from, count);
  }
}

#include "kernels/blocks_impl.hpp"
#include "kernels/compress_impl.hpp"
#include "kernels/compress_random_impl.hpp"

// Behind what it uses of them.
#include "kernels/block_float_impl.hpp"

} // namespace

namespace detail {

extern const Table FUSEDPG_KERNELS_TABLE = {
    FUSEDPG_KERNELS_NAME,
    reduce,
    update,
    lamb_moments,
    sum_squares,
    copy,
    has_nan,
    cast,
    find_blocks,
    find_blocks_above,
    {
        collect,
        sums,
        sum_signs,
        subtract_signs,
        unpack_signs,
        vote_signs,
        quantise,
        dequantise,
        ternary,
        unternary,
        natural,
        unnatural,
        dgc_accumulate,
    },
    {
        block_exponents,
        block_quantise,
        block_dequantise,
    },
};

} // namespace detail
} // namespace fusedpg::kernels
