#pragma once

#include <cstddef>
#include <cstdint>

// Block floating point, after SwitchML (Sapio et al. 2021): the elements of a
// block share an exponent and are integers, whose sum is the same in every
// order.
namespace fusedpg::kernels {

// Values in place of the exponent for blocks that have none. Between ranks the
// largest exponent counts, so one element that is not finite decides for its
// block, and a block of zeros for nothing.
constexpr int32_t kZeroBlock = -1024;
constexpr int32_t kNotFiniteBlock = 1024;

// A code is at most 2^bits in magnitude. float32 has 24 bits, so where `bits`
// are as many, codes are below 2^bits, and `ranks` of them add up to less than
// 2^31; where they are fewer, a magnitude may round up to 2^bits, and one bit
// less is left.
constexpr int block_float_bits(uint32_t ranks) {
  // A patched NCCL has this file, too, and is C++17: no std::bit_width.
  int carry = 0;
  while (carry < 32 && (ranks - 1) >> carry != 0) {
    ++carry;
  }
  return carry <= 7 ? 31 - carry : 30 - carry;
}

struct BlockFloatTable {
  // exponents[b] is the least e with |v| < 2^e for all v of block b.
  void (*exponents)(
      const float* v,
      size_t count,
      size_t block,
      int32_t* exponents);

  // codes = v * 2^(bits - exponent), rounded to nearest, ties to even. No
  // exponent is smaller than what `exponents` gives for v. Blocks without an
  // exponent become 0.
  void (*quantise)(
      const float* v,
      size_t count,
      size_t block,
      const int32_t* exponents,
      int bits,
      int32_t* codes);

  // out = code * 2^(exponent - bits) * alpha, in fp64, rounded to float32. All
  // elements of a kNotFiniteBlock become NaN, those of a kZeroBlock +0.
  void (*dequantise)(
      float* out,
      const int32_t* codes,
      size_t count,
      size_t block,
      const int32_t* exponents,
      int bits,
      double alpha);
};

} // namespace fusedpg::kernels
