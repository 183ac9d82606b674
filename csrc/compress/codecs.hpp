#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/compress.hpp"

// Messages that have a code for each element, and some scales: how a parameter's
// is written, and what those of several ranks come to.
namespace fusedpg::compress {

// The messages of all ranks about a parameter: the result is alpha times their
// sum.
struct Received {
  std::vector<const uint8_t*> codes; // by rank
  std::vector<const float*> scales;
  float alpha;

  size_t ranks() const {
    return codes.size();
  }
};

enum class CodeType : uint8_t { kUInt8, kInt8, kInt16 };

// Callers have the memory, and have checked sizes.
class Codec {
 public:
  explicit Codec(const kernels::CompressTable& table) : table_(table) {}
  virtual ~Codec() = default;

  virtual CodeType type() const {
    return CodeType::kUInt8;
  }
  virtual size_t codes(size_t count) const = 0; // how many of that type
  virtual size_t scales(size_t /* count */) const {
    return 1;
  }
  // Without a result the residual is what the message leaves out. With one, the
  // values of clear bits and of set ones, it is v: what the message says is still
  // to be subtracted from it, by CompressTable::subtract_signs or by the next
  // call, as `owed`.
  virtual std::optional<kernels::SignValues> encode(
      const kernels::Compensation& v,
      size_t count,
      const kernels::SignValues* owed,
      const kernels::RandomBits& random,
      void* codes,
      float* scales) const = 0;
  virtual void decode(float* out, size_t count, const Received& from) const = 0;

 protected:
  const kernels::CompressTable& table_;
};

using CodecPtr = std::unique_ptr<const Codec>;

// Bits, and the values that they stand for: the means of what is negative and of
// what is not with `two`, else one with either sign. That is the mean magnitude,
// or with `scaled` false 1; NaN if any v is not finite, as the sign of one would
// hide it.
CodecPtr signs(const kernels::CompressTable& table, bool two, bool scaled);
// Levels of a norm, of which every bucket of elements has one; 0: all are one
// bucket. Codes are int16 if levels.wide, else int8.
CodecPtr quantiser(
    const kernels::CompressTable& table,
    const kernels::Levels& levels,
    size_t bucket_size);
// -1, 0 or 1 times a scale, which is NaN if any v is not finite.
CodecPtr ternary(const kernels::CompressTable& table, double clip_sigma = 0);
// Powers of two.
CodecPtr powers(const kernels::CompressTable& table);

} // namespace fusedpg::compress
