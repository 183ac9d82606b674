#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "kernels/compress.hpp"

// Writes the message of one parameter, and reads several ranks' messages.
// Callers have the memory, and have checked sizes.
namespace fusedpg::compress {

// v once a kernel has written it to the residual.
inline kernels::Compensation written(const kernels::Compensation& v) {
  return v.residual == nullptr ? v : kernels::Compensation{nullptr, v.residual};
}

// Elements from `begin` on.
inline kernels::Compensation part_of(kernels::Compensation v, size_t begin) {
  v.grad += v.grad == nullptr ? 0 : begin;
  v.residual += v.residual == nullptr ? 0 : begin;
  return v;
}

inline size_t bytes_of_signs(size_t count) {
  return (count + 7) / 8;
}

inline size_t bytes_of_ternary(size_t count) {
  return (count + 3) / 4;
}

// Elements that share a norm; 0 stands for all.
inline size_t bucket_of(size_t size, size_t count) {
  return size == 0 ? std::max<size_t>(count, 1) : size;
}

inline size_t buckets_of(size_t size, size_t count) {
  const size_t bucket = bucket_of(size, count);
  return (count + bucket - 1) / bucket;
}

// The mean magnitude, or with `scaled` false 1; NaN if any v is not finite, as
// the sign of one would hide it. The residual becomes v: what the message says
// is still to be subtracted from it, by CompressTable::subtract_signs or by the
// next call, as `owed`.
kernels::SignValues pack_signs(
    const kernels::CompressTable& table,
    const kernels::Compensation& v,
    const kernels::SignValues* owed,
    size_t count,
    bool scaled,
    uint8_t* packed);

// The means of what is negative and of what is not; the residual as there.
kernels::SignValues pack_sides(
    const kernels::CompressTable& table,
    const kernels::Compensation& v,
    const kernels::SignValues* owed,
    size_t count,
    uint8_t* packed);

// Codes are int16 if levels.wide, else int8.
void quantise(
    const kernels::CompressTable& table,
    const kernels::Compensation& v,
    size_t count,
    kernels::Levels levels,
    size_t bucket_size,
    const kernels::RandomBits& random,
    void* codes,
    float* norms);

// Returns the scale, NaN if any v is not finite.
float pack_ternary(
    const kernels::CompressTable& table,
    const kernels::Compensation& v,
    size_t count,
    double clip_sigma,
    const kernels::RandomBits& random,
    uint8_t* packed);

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

// out = the sum of what `ranks` messages stand for. In all of these the
// functions give rank r's part of a message.
template <typename Codes, typename Norms>
void dequantise(
    const kernels::CompressTable& table,
    float* out,
    size_t count,
    size_t ranks,
    kernels::Levels levels,
    size_t bucket_size,
    float alpha,
    const Codes& codes,
    const Norms& norms) {
  const size_t bucket = bucket_of(bucket_size, count);
  const size_t width = levels.wide ? 2 : 1;
  for (size_t first = 0; first < count; first += bucket) {
    const size_t length = std::min(bucket, count - first);
    each_part(length, ranks, [&](size_t begin, size_t n) {
      const size_t at = first + begin;
      for (size_t r = 0; r < ranks; ++r) {
        levels.norm = norms(r)[first / bucket];
        table.dequantise(
            out + at, codes(r) + at * width, n, levels, alpha, r > 0);
      }
    });
  }
}

// A scale that is NaN makes all of the result NaN.
template <typename Packed, typename Scale>
void unpack_ternary(
    const kernels::CompressTable& table,
    float* out,
    size_t count,
    size_t ranks,
    float alpha,
    const Packed& packed,
    const Scale& scale) {
  for (size_t r = 0; r < ranks; ++r) {
    if (scale(r) != scale(r)) {
      std::fill(out, out + count, scale(r));
      return;
    }
  }
  each_part(count, ranks, [&](size_t begin, size_t n) {
    for (size_t r = 0; r < ranks; ++r) {
      table.unternary(
          out + begin, packed(r) + begin / 4, n, alpha * scale(r), r > 0);
    }
  });
}

template <typename Codes>
void unpack_powers(
    const kernels::CompressTable& table,
    float* out,
    size_t count,
    size_t ranks,
    float alpha,
    const Codes& codes) {
  each_part(count, ranks, [&](size_t begin, size_t n) {
    for (size_t r = 0; r < ranks; ++r) {
      table.unnatural(out + begin, codes(r) + begin, n, alpha, r > 0);
    }
  });
}

// Some elements of a rank, and which these are.
struct Picked {
  const int32_t* indices = nullptr;
  const float* values = nullptr;
  size_t count = 0;
};

// The rest is 0. Part by part, for which indices are best in order; in any other
// one the sums are the same but for the order of ranks. Returns an index that is
// out of bounds, if there is one.
template <typename Of>
std::optional<int64_t> scatter(
    float* out,
    size_t count,
    size_t ranks,
    float alpha,
    Picked* next,
    const Of& of) {
  constexpr size_t kPart = 1 << 15;
  for (size_t r = 0; r < ranks; ++r) {
    next[r] = of(r);
  }
  const auto bound = static_cast<uint32_t>(count);
  for (size_t begin = 0; begin < count; begin += kPart) {
    const size_t end = std::min(begin + kPart, count);
    std::fill(out + begin, out + end, 0.0F);
    for (size_t r = 0; r < ranks; ++r) {
      Picked& rest = next[r];
      size_t n = 0;
      for (; n < rest.count && rest.indices[n] < static_cast<int64_t>(end);
           ++n) {
        if (static_cast<uint32_t>(rest.indices[n]) >= bound) {
          return rest.indices[n];
        }
        out[rest.indices[n]] += alpha * rest.values[n];
      }
      rest.indices += n;
      rest.values += n;
      rest.count -= n;
    }
  }
  for (size_t r = 0; r < ranks; ++r) {
    if (next[r].count != 0) {
      return next[r].indices[0];
    }
  }
  return std::nullopt;
}

} // namespace fusedpg::compress
