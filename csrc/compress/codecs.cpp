#include "compress/codecs.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace fusedpg::compress {
namespace {

using kernels::Compensation;
using kernels::CompressSums;
using kernels::CompressTable;
using kernels::Levels;
using kernels::RandomBits;
using kernels::SideSums;
using kernels::SignValues;

// Calls with the beginning and the length of parts of a result. Each part stays
// in the cache while the messages of all ranks are decoded into it; of a single
// rank there is one part, as a kernel writes a large result past the cache. All
// parts begin at a whole byte of packed bits.
template <typename Function>
void each_part(size_t count, size_t ranks, Function&& function) {
  constexpr size_t kPart = 1 << 15;
  const size_t part = ranks == 1 ? std::max<size_t>(count, 1) : kPart;
  for (size_t begin = 0; begin < count; begin += part) {
    function(begin, std::min(part, count - begin));
  }
}

class Signs : public Codec {
 public:
  Signs(const CompressTable& table, bool two, bool scaled)
      : Codec(table),
        two_(two),
        scaled_(scaled) {}

  size_t codes(size_t count) const override {
    return (count + 7) / 8;
  }

  size_t scales(size_t /* count */) const override {
    return two_ ? 2 : 1;
  }

  std::optional<SignValues> encode(
      const Compensation& v,
      size_t count,
      const SignValues* owed,
      const RandomBits& /* random */,
      void* codes,
      float* scales) const override {
    const SideSums sums =
        table_.sum_signs(v, owed, count, static_cast<uint8_t*>(codes));
    const SignValues sent = two_ ? sides(sums, count) : magnitude(sums, count);
    scales[0] = two_ ? sent.low : sent.high;
    if (two_) {
      scales[1] = sent.high;
    }
    return sent;
  }

  void decode(float* out, size_t count, const Received& from) const override {
    std::vector<SignValues> values;
    values.reserve(from.ranks());
    for (const float* one : from.scales) {
      const float low = two_ ? one[0] : -one[0];
      values.push_back({from.alpha * low, from.alpha * one[two_ ? 1 : 0]});
    }
    table_.unpack_signs(
        out, from.codes.data(), values.data(), values.size(), count);
  }

 private:
  static SignValues sides(const SideSums& sums, size_t count) {
    const auto mean = [](double sum, uint64_t n) {
      return static_cast<float>(n == 0 ? 0 : sum / static_cast<double>(n));
    };
    return {
        mean(sums.low_sum, sums.low_count),
        mean(sums.high_sum, count - sums.low_count)};
  }

  SignValues magnitude(const SideSums& sums, size_t count) const {
    const double mean = count == 0
        ? 0
        : (sums.high_sum - sums.low_sum) / static_cast<double>(count);
    const double one = std::isfinite(mean) ? 1.0 : std::nan("");
    const auto scale = static_cast<float>(scaled_ ? mean : one);
    return {-scale, scale};
  }

  const bool two_;
  const bool scaled_;
};

class Quantiser : public Codec {
 public:
  Quantiser(const CompressTable& table, const Levels& levels, size_t bucket)
      : Codec(table),
        levels_(levels),
        bucket_size_(bucket) {}

  CodeType type() const override {
    return levels_.wide ? CodeType::kInt16 : CodeType::kInt8;
  }

  size_t codes(size_t count) const override {
    return count;
  }

  size_t scales(size_t count) const override {
    return (count + bucket(count) - 1) / bucket(count);
  }

  std::optional<SignValues> encode(
      const Compensation& v,
      size_t count,
      const SignValues* /* owed */,
      const RandomBits& random,
      void* codes,
      float* norms) const override {
    Levels levels = levels_;
    for (size_t begin = 0; begin < count; begin += bucket(count)) {
      const size_t n = std::min(bucket(count), count - begin);
      const Compensation part = part_of(v, begin);
      const CompressSums sums = table_.sums(part, n);
      levels.norm = static_cast<float>(std::sqrt(sums.square_sum));
      *norms++ = levels.norm;
      table_.quantise(
          written(part),
          n,
          levels,
          {random.seed, random.offset + begin},
          static_cast<char*>(codes) + begin * code_bytes());
    }
    return std::nullopt;
  }

  void decode(float* out, size_t count, const Received& from) const override {
    Levels levels = levels_;
    for (size_t first = 0; first < count; first += bucket(count)) {
      const size_t length = std::min(bucket(count), count - first);
      each_part(length, from.ranks(), [&](size_t begin, size_t n) {
        const size_t at = first + begin;
        for (size_t r = 0; r < from.ranks(); ++r) {
          levels.norm = from.scales[r][first / bucket(count)];
          const uint8_t* codes = from.codes[r] + at * code_bytes();
          table_.dequantise(out + at, codes, n, levels, from.alpha, r > 0);
        }
      });
    }
  }

 private:
  // Elements that share a norm.
  size_t bucket(size_t count) const {
    return bucket_size_ == 0 ? std::max<size_t>(count, 1) : bucket_size_;
  }

  size_t code_bytes() const {
    return levels_.wide ? sizeof(int16_t) : sizeof(int8_t);
  }

  const Levels levels_;
  const size_t bucket_size_;
};

class Ternary : public Codec {
 public:
  Ternary(const CompressTable& table, double clip_sigma)
      : Codec(table),
        clip_sigma_(clip_sigma) {}

  size_t codes(size_t count) const override {
    return (count + 3) / 4;
  }

  std::optional<SignValues> encode(
      const Compensation& v,
      size_t count,
      const SignValues* /* owed */,
      const RandomBits& random,
      void* codes,
      float* scale) const override {
    const CompressSums sums = table_.sums(v, count);
    float bound = std::numeric_limits<float>::infinity();
    if (clip_sigma_ > 0 && count > 0) {
      const auto n = static_cast<double>(count);
      const double mean = (sums.high_sum + sums.low_sum) / n;
      const double variance = std::max(0.0, sums.square_sum / n - mean * mean);
      // About 0: of a constant, without deviation, nothing would ever be sent.
      const double sigma = std::max(std::sqrt(variance), std::abs(mean));
      bound = static_cast<float>(clip_sigma_ * sigma);
    }
    // With a NaN or an infinity anywhere this is not finite either.
    *scale = std::isfinite(sums.max_abs)
        ? std::min(bound, sums.max_abs)
        : std::numeric_limits<float>::quiet_NaN();
    table_.ternary(
        written(v), count, bound, *scale, random, static_cast<uint8_t*>(codes));
    return std::nullopt;
  }

  void decode(float* out, size_t count, const Received& from) const override {
    for (const float* scale : from.scales) {
      if (std::isnan(*scale)) {
        std::fill(out, out + count, *scale);
        return;
      }
    }
    each_part(count, from.ranks(), [&](size_t begin, size_t n) {
      for (size_t r = 0; r < from.ranks(); ++r) {
        const float value = from.alpha * *from.scales[r];
        table_.unternary(
            out + begin, from.codes[r] + begin / 4, n, value, r > 0);
      }
    });
  }

 private:
  const double clip_sigma_;
};

class Powers : public Codec {
 public:
  using Codec::Codec;

  size_t codes(size_t count) const override {
    return count;
  }

  size_t scales(size_t /* count */) const override {
    return 0;
  }

  std::optional<SignValues> encode(
      const Compensation& v,
      size_t count,
      const SignValues* /* owed */,
      const RandomBits& random,
      void* codes,
      float* /* scales */) const override {
    table_.natural(v, count, random, static_cast<uint8_t*>(codes));
    return std::nullopt;
  }

  void decode(float* out, size_t count, const Received& from) const override {
    each_part(count, from.ranks(), [&](size_t begin, size_t n) {
      for (size_t r = 0; r < from.ranks(); ++r) {
        table_.unnatural(
            out + begin, from.codes[r] + begin, n, from.alpha, r > 0);
      }
    });
  }
};

} // namespace

CodecPtr signs(const CompressTable& table, bool two, bool scaled) {
  return std::make_unique<Signs>(table, two, scaled);
}

CodecPtr quantiser(
    const CompressTable& table,
    const Levels& levels,
    size_t bucket_size) {
  return std::make_unique<Quantiser>(table, levels, bucket_size);
}

CodecPtr ternary(const CompressTable& table, double clip_sigma) {
  return std::make_unique<Ternary>(table, clip_sigma);
}

CodecPtr powers(const CompressTable& table) {
  return std::make_unique<Powers>(table);
}

} // namespace fusedpg::compress
