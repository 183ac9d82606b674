#pragma once

#include <cstddef>
#include <cstdint>

// Kernels of gradient compression, float32: as pure as those of kernels.hpp,
// and like those the same bits on every instruction set.
namespace fusedpg::kernels {

// Compressed values: v = beta * residual + gamma * grad, products rounded.
// Without a residual gamma * grad, without a gradient the residual itself.
struct Compensation {
  const float* grad = nullptr;
  float* residual = nullptr;
  float beta = 1;
  float gamma = 1;
};

// v once a kernel has written it to the residual.
inline Compensation written(const Compensation& v) {
  return v.residual == nullptr ? v : Compensation{nullptr, v.residual};
}

// Elements from `begin` on.
inline Compensation part_of(Compensation v, size_t begin) {
  v.grad += v.grad == nullptr ? 0 : begin;
  v.residual += v.residual == nullptr ? 0 : begin;
  return v;
}

// Values of clear and set bits of packed signs.
struct SignValues {
  float low = 0;
  float high = 0;
};

// Sums are taken over 16 fp64 partial sums a tile of kCompressTile elements,
// element i in sum i % 16, added in order; tiles in order.
constexpr size_t kCompressTile = 1024;

struct CompressSums {
  double high_sum = 0; // of v >= 0
  double low_sum = 0; // of all other v, and NaN if any is
  double square_sum = 0;
  uint64_t low_count = 0; // elements that are not >= 0
  float max_abs = 0; // NaN if any is
};

// Element i of a call has the 32 bits of Philox4x32-10 (Salmon et al. 2011)
// with key `seed` and counter ((offset + i) / 4, 0), word (offset + i) % 4. As
// a number it is the upper 24 of these bits / 2^24.
struct RandomBits {
  uint64_t seed = 0;
  uint64_t offset = 0;
};

// A quantised span: code * norm / levels.
struct Levels {
  int levels = 127;
  float norm = 0; // of the span
  bool wide = false; // int16 codes instead of int8
};

// CompressSums of v >= 0, and of all other v.
struct SideSums {
  double high_sum = 0;
  double low_sum = 0;
  uint64_t low_count = 0;
};

struct CompressTable {
  // Writes v to the residual, if there is one, and appends what is larger: the
  // index (from `base`) and value of every v whose magnitude's bits, as an
  // integer, are above `bound`; NaN always is. At most `capacity` are stored;
  // returns how many there are.
  size_t (*collect)(
      const Compensation& v,
      size_t count,
      uint32_t bound,
      uint32_t base,
      uint32_t* indices,
      float* values,
      size_t capacity);

  // Writes v to the residual, if there is one, and adds up.
  CompressSums (*sums)(const Compensation& v, size_t count);

  // Bit i % 8 of packed[i / 8] is v[i] >= 0, unused bits are 0. Adds up, and
  // writes v to the residual, if there is one. With `owed` an element r of the
  // residual counts as r - (r >= 0 ? high : low).
  SideSums (*sum_signs)(
      const Compensation& v,
      const SignValues* owed,
      size_t count,
      uint8_t* packed);

  // residual = r - (r >= 0 ? high : low).
  void (*subtract_signs)(float* residual, size_t count, const SignValues& owed);

  // out = the sum over ranks of their bits' values, in the order of ranks.
  void (*unpack_signs)(
      float* out,
      const uint8_t* const* packed,
      const SignValues* values,
      size_t ranks,
      size_t count);

  // out = value where at least half of `ranks` rows of `stride` bytes have the
  // bit, else -value.
  void (*vote_signs)(
      float* out,
      const uint8_t* packed,
      size_t stride,
      size_t ranks,
      size_t count,
      float value);

  // Stochastic rounding of levels * |v| / norm, with v's sign, and the residual
  // v - code * (norm / levels). Values that are not finite become 0: the norm
  // tells of them.
  void (*quantise)(
      const Compensation& v,
      size_t count,
      const Levels& levels,
      const RandomBits& random,
      void* codes);
  // out = alpha * code * (norm / levels), or += it.
  void (*dequantise)(
      float* out,
      const void* codes,
      size_t count,
      const Levels& levels,
      float alpha,
      bool add);

  // v is clamped to +-bound; element i is sign * scale with probability
  // |v| / scale. Code (0: zero, 1: +, 2: -) i % 4 of packed[i / 4], 2 bits.
  void (*ternary)(
      const Compensation& v,
      size_t count,
      float bound,
      float scale,
      const RandomBits& random,
      uint8_t* packed);
  // out = code's sign * value, or += it.
  void (*unternary)(
      float* out,
      const uint8_t* packed,
      size_t count,
      float value,
      bool add);

  // Stochastic rounding to powers of two. Sign in bit 7; code c is 2^(c - 64),
  // 0 is 0 (also what rounds to less than 2^-63), 126 also all that is larger,
  // 127 what is not finite, and NaN when decoded.
  void (*natural)(
      const Compensation& v,
      size_t count,
      const RandomBits& random,
      uint8_t* codes);
  void (*unnatural)(
      float* out,
      const uint8_t* codes,
      size_t count,
      float alpha,
      bool add);

  // u = momentum * u + gamma * grad; v += u.
  void (*dgc_accumulate)(
      float* u,
      float* v,
      const float* grad,
      size_t count,
      float momentum,
      float gamma);
};

} // namespace fusedpg::kernels
