#pragma once

#include "kernels/kernels.hpp"

#include "cuda/launch.hpp"
#include "kernels/formulas/half.hpp"

// Elements in memory and in the compute type. Everything in this folder's
// headers is compiled for the GPU and for the host alike: the tests run it
// without a GPU. A function that takes `thread` and `threads` does that
// thread's share; (0, 1) does all.
#if defined(__CUDA_ARCH__)
#define FUSEDPG_UNROLL _Pragma("unroll")
#else
#define FUSEDPG_UNROLL
#endif

namespace fusedpg::cuda {

// Threads of a block; also the lanes of the sums, so that the host adds in the
// same order.
constexpr int kThreads = 256;

using kernels::bfloat_to_float;
using kernels::bits_to_float;
using kernels::float_to_bfloat;
using kernels::float_to_bits;
using kernels::float_to_half;
using kernels::half_to_float;

FUSEDPG_HOST_DEVICE bool is_half(DType type) {
  return type == DType::kFloat16 || type == DType::kBFloat16;
}

FUSEDPG_HOST_DEVICE uint32_t float_size(DType type) {
  return is_half(type) ? 2 : type == DType::kFloat64 ? 8 : 4;
}

FUSEDPG_HOST_DEVICE bool is_aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

FUSEDPG_HOST_DEVICE char* at(const void* base, uint64_t i, DType type) {
  return static_cast<char*>(const_cast<void*>(base)) + i * float_size(type);
}

// Tells the compiler that `p` leads to global memory, which it cannot know of
// what comes out of a structure.
FUSEDPG_HOST_DEVICE void assume_global([[maybe_unused]] const void* p) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(p));
#endif
}

// 8 bytes, or a multiple of 16, from or to an address aligned to that or to 16.
template <int kBytes>
FUSEDPG_HOST_DEVICE void load_words(uint32_t* words, const char* from) {
  static_assert(kBytes == 8 || kBytes % 16 == 0);
  assume_global(from);
#if defined(__CUDA_ARCH__)
  if constexpr (kBytes == 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    words[0] = v.x;
    words[1] = v.y;
  }
  FUSEDPG_UNROLL
  for (int k = 0; k < kBytes / 16; ++k) {
    const uint4 v = reinterpret_cast<const uint4*>(from)[k];
    words[4 * k] = v.x;
    words[4 * k + 1] = v.y;
    words[4 * k + 2] = v.z;
    words[4 * k + 3] = v.w;
  }
#else
  __builtin_memcpy(words, from, kBytes);
#endif
}

// In assembler, because compilers merge the stores of two branches into
// narrower ones behind them.
template <int kBytes>
FUSEDPG_HOST_DEVICE void store_words(char* to, const uint32_t* words) {
  static_assert(kBytes == 8 || kBytes % 16 == 0);
#if defined(__CUDA_ARCH__)
  const size_t global = __cvta_generic_to_global(to);
  if constexpr (kBytes == 8) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};"
                 :
                 : "l"(global), "r"(words[0]), "r"(words[1])
                 : "memory");
  }
  FUSEDPG_UNROLL
  for (int k = 0; k < kBytes / 16; ++k) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(global + 16 * k),
                   "r"(words[4 * k]),
                   "r"(words[4 * k + 1]),
                   "r"(words[4 * k + 2]),
                   "r"(words[4 * k + 3])
                 : "memory");
  }
#else
  __builtin_memcpy(to, words, kBytes);
#endif
}

template <typename T>
FUSEDPG_HOST_DEVICE T load_as(const char* from) {
  assume_global(from);
  return *reinterpret_cast<const T*>(from);
}

template <typename T>
FUSEDPG_HOST_DEVICE void store_as(char* to, T value) {
  assume_global(to);
  *reinterpret_cast<T*>(to) = value;
}

// Elements of the compute type C that make 16 bytes.
template <typename C>
constexpr int kWidth = static_cast<int>(16 / sizeof(C));

// W elements with the bits that they have in memory; half types fill only the
// first half of it.
template <typename C, int W>
struct Raw {
  uint32_t words[W * sizeof(C) / 4];
};

// Elements of a tile. C is the compute type; what lies in memory is that or,
// where it is float, also a half type. Conditions on `type` and `aligned` are
// uniform over a block.
template <typename C>
struct Column {
  char* base = nullptr;
  DType type = DType::kFloat32;
  bool aligned = false;

  Column() = default;
  FUSEDPG_HOST_DEVICE Column(const void* array, uint64_t first, DType of)
      : base(at(array, first, of)),
        type(of),
        aligned(is_aligned(base)) {}

  FUSEDPG_HOST_DEVICE bool narrow() const {
    return sizeof(C) == sizeof(float) && is_half(type);
  }

  // Elements [i, i + W) of an aligned column; i is a multiple of W.
  template <int W>
  FUSEDPG_HOST_DEVICE void load(Raw<C, W>& raw, uint32_t i) const {
    if (narrow()) {
      load_words<W * sizeof(C) / 2>(raw.words, base + i * 2);
    } else {
      load_words<W * sizeof(C)>(raw.words, base + i * sizeof(C));
    }
  }

  template <int W>
  FUSEDPG_HOST_DEVICE void store(const Raw<C, W>& raw, uint32_t i) const {
    if (narrow()) {
      store_words<W * sizeof(C) / 2>(base + i * 2, raw.words);
    } else {
      store_words<W * sizeof(C)>(base + i * sizeof(C), raw.words);
    }
  }

  // Elements [i, i + W) of the first n of any column; those beyond are zero.
  template <int W>
  FUSEDPG_HOST_DEVICE void load(Raw<C, W>& raw, uint32_t i, uint32_t n) const {
    if (aligned && i + W <= n) {
      return load(raw, i);
    }
    raw = {};
    FUSEDPG_UNROLL
    for (int e = 0; e < W; ++e) {
      if (i + e >= n) {
        continue;
      }
      if (narrow()) {
        const uint32_t bits = load_as<uint16_t>(base + (i + e) * 2);
        raw.words[e / 2] |= bits << (e % 2 * 16);
      } else {
        const C value = load_as<C>(base + (i + e) * sizeof(C));
        __builtin_memcpy(
            raw.words + e * (sizeof(C) / 4), &value, sizeof(value));
      }
    }
  }

  template <int W>
  FUSEDPG_HOST_DEVICE void store(const Raw<C, W>& raw, uint32_t i, uint32_t n)
      const {
    if (aligned && i + W <= n) {
      return store(raw, i);
    }
    FUSEDPG_UNROLL
    for (int e = 0; e < W; ++e) {
      if (i + e >= n) {
        continue;
      }
      if (narrow()) {
        store_as(
            base + (i + e) * 2,
            static_cast<uint16_t>(raw.words[e / 2] >> (e % 2 * 16)));
      } else {
        C value;
        __builtin_memcpy(
            &value, raw.words + e * (sizeof(C) / 4), sizeof(value));
        store_as(base + (i + e) * sizeof(C), value);
      }
    }
  }

  template <int W>
  FUSEDPG_HOST_DEVICE void widen(C* values, const Raw<C, W>& raw) const {
    if (narrow()) {
      const bool bfloat = type == DType::kBFloat16;
      FUSEDPG_UNROLL
      for (int e = 0; e < W; ++e) {
        const auto bits =
            static_cast<uint16_t>(raw.words[e / 2] >> (e % 2 * 16));
        values[e] = bfloat ? bfloat_to_float(bits) : half_to_float(bits);
      }
    } else {
      __builtin_memcpy(values, raw.words, W * sizeof(C));
    }
  }

  template <int W>
  FUSEDPG_HOST_DEVICE Raw<C, W> round(const C* values) const {
    Raw<C, W> raw{};
    if (narrow()) {
      const bool bfloat = type == DType::kBFloat16;
      FUSEDPG_UNROLL
      for (int e = 0; e < W; ++e) {
        const auto value = static_cast<float>(values[e]);
        const uint32_t bits =
            bfloat ? float_to_bfloat(value) : float_to_half(value);
        raw.words[e / 2] |= bits << (e % 2 * 16);
      }
    } else {
      __builtin_memcpy(raw.words, values, W * sizeof(C));
    }
    return raw;
  }
};

} // namespace fusedpg::cuda
