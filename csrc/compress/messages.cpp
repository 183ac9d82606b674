#include "compress/messages.hpp"

#include <cmath>
#include <limits>

namespace fusedpg::compress {

using kernels::Compensation;
using kernels::CompressSums;
using kernels::CompressTable;
using kernels::Levels;
using kernels::RandomBits;
using kernels::SideSums;
using kernels::SignValues;

SignValues pack_signs(
    const CompressTable& table,
    const Compensation& v,
    const SignValues* owed,
    size_t count,
    bool scaled,
    uint8_t* packed) {
  const SideSums sums = table.sum_signs(v, owed, count, packed);
  const double mean = count == 0
      ? 0
      : (sums.high_sum - sums.low_sum) / static_cast<double>(count);
  const double one = std::isfinite(mean) ? 1.0 : std::nan("");
  const auto scale = static_cast<float>(scaled ? mean : one);
  return {-scale, scale};
}

SignValues pack_sides(
    const CompressTable& table,
    const Compensation& v,
    const SignValues* owed,
    size_t count,
    uint8_t* packed) {
  const SideSums sums = table.sum_signs(v, owed, count, packed);
  const auto mean = [](double sum, uint64_t n) {
    return static_cast<float>(n == 0 ? 0 : sum / static_cast<double>(n));
  };
  return {
      mean(sums.low_sum, sums.low_count),
      mean(sums.high_sum, count - sums.low_count)};
}

void quantise(
    const CompressTable& table,
    const Compensation& v,
    size_t count,
    Levels levels,
    size_t bucket_size,
    const RandomBits& random,
    void* codes,
    float* norms) {
  const size_t bucket = bucket_of(bucket_size, count);
  auto* to = static_cast<char*>(codes);
  for (size_t begin = 0; begin < count; begin += bucket) {
    const size_t n = std::min(bucket, count - begin);
    const Compensation part = part_of(v, begin);
    const CompressSums sums = table.sums(part, n);
    levels.norm = static_cast<float>(std::sqrt(sums.square_sum));
    norms[begin / bucket] = levels.norm;
    table.quantise(
        written(part),
        n,
        levels,
        {random.seed, random.offset + begin},
        to + begin * (levels.wide ? 2 : 1));
  }
}

float pack_ternary(
    const CompressTable& table,
    const Compensation& v,
    size_t count,
    double clip_sigma,
    const RandomBits& random,
    uint8_t* packed) {
  const CompressSums sums = table.sums(v, count);
  float bound = std::numeric_limits<float>::infinity();
  if (clip_sigma > 0 && count > 0) {
    const auto n = static_cast<double>(count);
    const double mean = (sums.high_sum + sums.low_sum) / n;
    const double variance = std::max(0.0, sums.square_sum / n - mean * mean);
    // About 0: of a constant, without deviation, nothing would ever be sent.
    const double sigma = std::max(std::sqrt(variance), std::abs(mean));
    bound = static_cast<float>(clip_sigma * sigma);
  }
  // With a NaN or an infinity anywhere this is not finite either.
  const float scale = std::isfinite(sums.max_abs)
      ? std::min(bound, sums.max_abs)
      : std::numeric_limits<float>::quiet_NaN();
  table.ternary(written(v), count, bound, scale, random, packed);
  return scale;
}

} // namespace fusedpg::compress
