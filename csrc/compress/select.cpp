#include "compress/select.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>

namespace fusedpg::compress {

namespace {

using kernels::Compensation;
using kernels::CompressTable;

constexpr uint32_t kMagnitude = 0x7fffffff;
// Elements of which all magnitudes are looked at, or as many of a longer span.
constexpr size_t kSample = 32768;

uint32_t magnitude(float x) {
  return std::bit_cast<uint32_t>(x) & kMagnitude;
}

float value(const Compensation& v, size_t i) {
  if (v.grad == nullptr) {
    return v.residual[i];
  }
  if (v.residual == nullptr) {
    return v.gamma * v.grad[i];
  }
  return v.beta * v.residual[i] + v.gamma * v.grad[i];
}

// v once it has been written to the residual.
Compensation written(const Compensation& v) {
  return v.residual == nullptr ? v : Compensation{nullptr, v.residual};
}

void write(const CompressTable& table, const Compensation& v, size_t count) {
  if (v.residual != nullptr && v.grad != nullptr) {
    table.collect(v, count, kMagnitude, 0, nullptr, nullptr, 0);
  }
}

// The k-th largest (k >= 1).
uint32_t kth(std::vector<uint32_t>& bits, size_t k) {
  const auto at = bits.begin() + static_cast<ptrdiff_t>(k - 1);
  std::nth_element(bits.begin(), at, bits.end(), std::greater<>());
  return *at;
}

// A bound that the k largest are probably above, and not many more: an order
// statistic of elements at random places, as regular ones can be fooled.
uint32_t sampled_bound(const Compensation& v, size_t count, double rank) {
  std::vector<uint32_t> bits(kSample);
  uint64_t state = count;
  for (uint32_t& one : bits) {
    state += 0x9E3779B97F4A7C15ULL;
    uint64_t x = state;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    x ^= x >> 31;
    // count < 2^31, so the product of 32 bits with it does not overflow.
    one = magnitude(value(v, (x >> 32) * count >> 32));
  }
  const uint32_t found = kth(bits, static_cast<size_t>(rank));
  return found == 0 ? 0 : found - 1;
}

// The magnitude of the k-th largest, of long spans by two histograms.
uint32_t exact_kth(const Compensation& v, size_t count, size_t k) {
  if (count <= kSample) {
    std::vector<uint32_t> bits(count);
    for (size_t i = 0; i < count; ++i) {
      bits[i] = magnitude(value(v, i));
    }
    return kth(bits, k);
  }
  constexpr unsigned kLow = 15;
  std::vector<uint32_t> high(1U << 16);
  for (size_t i = 0; i < count; ++i) {
    ++high[magnitude(value(v, i)) >> kLow];
  }
  size_t above = 0;
  uint32_t bin = (1U << 16) - 1;
  while (above + high[bin] < k) {
    above += high[bin--];
  }
  std::vector<uint32_t> low(1U << kLow);
  for (size_t i = 0; i < count; ++i) {
    const uint32_t bits = magnitude(value(v, i));
    low[bits & ((1U << kLow) - 1)] += bits >> kLow == bin ? 1 : 0;
  }
  uint32_t rest = (1U << kLow) - 1;
  while (above + low[rest] < k) {
    above += low[rest--];
  }
  return bin << kLow | rest;
}

// What is above `threshold`, and of what equals it the first up to k in all.
void at_least(
    const Compensation& v,
    size_t count,
    size_t k,
    uint32_t threshold,
    Selected& found) {
  size_t above = 0;
  for (size_t i = 0; i < count; ++i) {
    above += magnitude(value(v, i)) > threshold ? 1 : 0;
  }
  size_t equal = k - above;
  found.indices.resize(k);
  found.values.resize(k);
  size_t size = 0;
  for (size_t i = 0; size < k; ++i) {
    const float x = value(v, i);
    const uint32_t bits = magnitude(x);
    if (bits > threshold || (bits == threshold && equal > 0)) {
      equal -= bits == threshold ? 1 : 0;
      found.indices[size] = static_cast<uint32_t>(i);
      found.values[size] = x;
      ++size;
    }
  }
}

// The k largest of candidates that have all of them.
void reduce_to(Selected& found, size_t k) {
  if (found.values.size() == k) {
    return;
  }
  std::vector<uint32_t> bits(found.values.size());
  std::transform(
      found.values.begin(), found.values.end(), bits.begin(), magnitude);
  const uint32_t threshold = kth(bits, k);
  size_t equal = k;
  for (const float x : found.values) {
    equal -= magnitude(x) > threshold ? 1 : 0;
  }
  size_t kept = 0;
  for (size_t i = 0; kept < k; ++i) {
    const uint32_t one = magnitude(found.values[i]);
    if (one > threshold || (one == threshold && equal > 0)) {
      equal -= one == threshold ? 1 : 0;
      found.indices[kept] = found.indices[i];
      found.values[kept] = found.values[i];
      ++kept;
    }
  }
  found.indices.resize(k);
  found.values.resize(k);
}

// By one pass with a bound that is probably right. False: it was not.
bool by_sample(
    const CompressTable& table,
    const Compensation& v,
    size_t count,
    size_t k,
    Selected& found) {
  const double expected =
      static_cast<double>(k) / static_cast<double>(count) * kSample;
  const double rank = expected + 4 * std::sqrt(expected) + 4;
  if (count <= kSample || 2 * rank > kSample) {
    write(table, v, count);
    return false;
  }
  const uint32_t bound = sampled_bound(v, count, rank);
  const auto candidates =
      static_cast<size_t>(rank / kSample * static_cast<double>(count));
  const size_t capacity = std::min(count, 2 * candidates + 1024);
  found.indices.resize(capacity);
  found.values.resize(capacity);
  const size_t all = table.collect(
      v, count, bound, 0, found.indices.data(), found.values.data(), capacity);
  if (all < k || all > capacity) {
    return false;
  }
  found.indices.resize(all);
  found.values.resize(all);
  reduce_to(found, k);
  return true;
}

void clear(float* residual, const Selected& found) {
  if (residual != nullptr) {
    for (const uint32_t i : found.indices) {
      residual[i] = 0;
    }
  }
}

} // namespace

void top_k(
    const CompressTable& table,
    const Compensation& v,
    size_t count,
    size_t k,
    Selected& found) {
  if (k == 0) {
    write(table, v, count);
    found.indices.clear();
    found.values.clear();
    return;
  }
  if (!by_sample(table, v, count, k, found)) {
    const Compensation now = written(v);
    at_least(now, count, k, exact_kth(now, count, k), found);
  }
  clear(v.residual, found);
}

void above(
    const CompressTable& table,
    const Compensation& v,
    size_t count,
    float threshold,
    size_t at_least,
    Selected& found) {
  constexpr size_t kPart = 1 << 16;
  size_t size = 0;
  for (size_t begin = 0; begin < count; begin += kPart) {
    const size_t n = std::min(kPart, count - begin);
    if (found.indices.size() < size + n) {
      found.indices.resize(2 * (size + n));
      found.values.resize(2 * (size + n));
    }
    Compensation part = v;
    part.grad += v.grad == nullptr ? 0 : begin;
    part.residual += v.residual == nullptr ? 0 : begin;
    size += table.collect(
        part,
        n,
        magnitude(threshold),
        static_cast<uint32_t>(begin),
        found.indices.data() + size,
        found.values.data() + size,
        n);
  }
  found.indices.resize(size);
  found.values.resize(size);
  if (size < at_least) {
    top_k(table, written(v), count, at_least, found);
  } else {
    clear(v.residual, found);
  }
}

} // namespace fusedpg::compress
