#pragma once

#include "cuda/kernels/ptx.hpp"
#include "cuda/launch.hpp"
#include "kernels/formulas/half.hpp"

// Elements in memory and in the compute type. Everything in this folder's
// headers is compiled for the GPU and for the host alike: the tests run it
// without a GPU. A function that takes `thread` and `threads` does that
// thread's share; (0, 1) does all.
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

FUSEDPG_HOST_DEVICE char* at(const void* base, uint64_t i, DType type) {
  return static_cast<char*>(const_cast<void*>(base)) + i * float_size(type);
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
