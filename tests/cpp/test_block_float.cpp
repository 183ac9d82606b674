// Block floating point: instruction sets against each other, and sums that are
// as large as they can be.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "check.hpp"
#include "kernels_reference.hpp"

using namespace fusedpg;
using namespace fusedpg::kernels;

namespace {

// Any bits: denormal, huge, infinite, NaN; and in half of the cases zeros.
std::vector<float> any_floats(size_t count, uint32_t seed) {
  std::mt19937 draw(seed);
  std::vector<float> v(count);
  for (float& x : v) {
    const bool finite = draw() % 64 != 0;
    const auto bits = static_cast<uint32_t>(draw());
    x = std::bit_cast<float>(finite ? bits & 0xbfffffffU : bits);
    x = seed % 2 == 0 && draw() % 3 == 0 ? 0.0F : x;
  }
  return v;
}

} // namespace

TEST(block_float_is_the_same_on_every_instruction_set) {
  const BlockFloatTable& best = kernels::table()->block_float;
  for (const kernels::Table* found : test::tables()) {
    const BlockFloatTable& other = found->block_float;
    for (const size_t n : {0, 1, 7, 8, 31, 64, 257, 1000, 5003}) {
      for (const size_t block : {1, 3, 16, 256, 6000}) {
        const auto v = any_floats(n, static_cast<uint32_t>(n + block));
        const size_t blocks = (n + block - 1) / block;
        std::vector<int32_t> exponents(blocks), others(blocks);
        best.exponents(v.data(), n, block, exponents.data());
        other.exponents(v.data(), n, block, others.data());
        CHECK(exponents == others);
        for (const uint32_t ranks : {1U, 2U, 3U, 128U, 129U, 1000U}) {
          const int bits = block_float_bits(ranks);
          std::vector<int32_t> codes(n), theirs(n);
          best.quantise(
              v.data(), n, block, exponents.data(), bits, codes.data());
          other.quantise(
              v.data(), n, block, exponents.data(), bits, theirs.data());
          CHECK(codes == theirs);
          std::vector<float> out(n), back(n);
          best.dequantise(
              out.data(), codes.data(), n, block, exponents.data(), bits, 0.3);
          other.dequantise(
              back.data(), codes.data(), n, block, exponents.data(), bits, 0.3);
          CHECK(
              std::equal(
                  out.begin(), out.end(), back.begin(), [](auto a, auto b) {
                    return std::isnan(a) ? std::isnan(b)
                                         : std::bit_cast<uint32_t>(a) ==
                            std::bit_cast<uint32_t>(b);
                  }));
        }
      }
    }
  }
}

TEST(sums_of_block_float_do_not_overflow) {
  const BlockFloatTable& table = kernels::table()->block_float;
  // The largest magnitude below each of these powers, and what rounds up to it.
  for (const float largest :
       {std::numeric_limits<float>::max(),
        std::nextafter(1.0F, 0.0F),
        std::numeric_limits<float>::denorm_min(),
        std::nextafter(std::numeric_limits<float>::min(), 0.0F)}) {
    for (const float v : {largest, -largest}) {
      for (uint32_t ranks = 1; ranks <= 5000; ++ranks) {
        int32_t exponent = 0;
        table.exponents(&v, 1, 1, &exponent);
        CHECK(std::abs(v) < std::ldexp(1.0, exponent));
        CHECK(std::abs(v) >= std::ldexp(0.5, exponent));
        int32_t code = 0;
        const int bits = block_float_bits(ranks);
        table.quantise(&v, 1, 1, &exponent, bits, &code);
        const int64_t sum = static_cast<int64_t>(code) * ranks;
        CHECK(sum <= std::numeric_limits<int32_t>::max());
        CHECK(sum >= std::numeric_limits<int32_t>::min());
        // It is not cut off: half a unit at most is lost.
        CHECK(
            std::abs(
                code - std::ldexp(static_cast<double>(v), bits - exponent)) <=
            0.5);
      }
    }
  }
}

TEST(blocks_without_an_exponent) {
  const BlockFloatTable& table = kernels::table()->block_float;
  const float v[] = {0, -0.0F, 1, NAN, INFINITY, 2, -INFINITY, 0};
  int32_t exponents[4];
  table.exponents(v, 8, 2, exponents);
  CHECK_EQ(exponents[0], kZeroBlock);
  CHECK_EQ(exponents[1], kNotFiniteBlock);
  CHECK_EQ(exponents[2], kNotFiniteBlock);
  CHECK_EQ(exponents[3], kNotFiniteBlock);
  int32_t codes[8] = {9, 9, 9, 9, 9, 9, 9, 9};
  table.quantise(v, 8, 2, exponents, 30, codes);
  for (const int32_t code : codes) {
    CHECK_EQ(code, 0);
  }
  float out[8] = {5, 5, 5, 5, 5, 5, 5, 5};
  table.dequantise(out, codes, 8, 2, exponents, 30, 1);
  for (size_t i = 0; i < 8; ++i) {
    CHECK(i < 2 ? std::bit_cast<uint32_t>(out[i]) == 0 : std::isnan(out[i]));
  }
}
