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

void write(const CompressTable& table, const Compensation& v, size_t count) {
  if (v.residual != nullptr && v.grad != nullptr) {
    table.collect(v, count, kMagnitude, 0, nullptr, nullptr, 0);
  }
}

// The k-th largest (k >= 1).
uint32_t kth(std::vector<uint32_t>& bits, size_t k) {
  // For large inputs, first narrow to one of 4096 classes: after one look at
  // each element most are known to be smaller or larger.
  constexpr size_t kMany = 1 << 14;
  constexpr int kClasses = 12;
  if (bits.size() >= kMany) {
    const auto [least, most] = std::minmax_element(bits.begin(), bits.end());
    const uint32_t low = *least;
    const int shift =
        std::max(static_cast<int>(std::bit_width(*most - low)) - kClasses, 0);
    std::vector<uint32_t> counts(size_t{1} << kClasses);
    for (const uint32_t one : bits) {
      ++counts[(one - low) >> shift];
    }
    uint32_t which = counts.size() - 1;
    while (counts[which] < k) {
      k -= counts[which--];
    }
    size_t inside = 0;
    for (const uint32_t one : bits) {
      bits[inside] = one;
      inside += (one - low) >> shift == which ? 1 : 0;
    }
    bits.resize(inside);
  }
  const auto at = bits.begin() + static_cast<ptrdiff_t>(k - 1);
  std::nth_element(bits.begin(), at, bits.end(), std::greater<>());
  return *at;
}

// A magnitude that the k largest probably reach, and not many more exceed: an
// order statistic of elements at random places, as regular ones can be fooled.
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
  return kth(bits, static_cast<size_t>(rank));
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

// Takes the elements above `threshold`, and of those that equal it the first,
// up to k in all.
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

// Takes the elements above `bound`; false if they are more than `limit`. The
// residual becomes v without them: set to 0 part by part, while it is in the
// cache.
bool take_above(
    const CompressTable& table,
    const Compensation& v,
    size_t count,
    uint32_t bound,
    size_t limit,
    Selected& found) {
  constexpr size_t kPart = 1 << 16;
  size_t size = 0;
  for (size_t begin = 0; begin < count; begin += kPart) {
    const size_t n = std::min(kPart, count - begin);
    const size_t room = size > limit ? 0 : n;
    if (found.indices.size() < size + room) {
      found.indices.resize(2 * (size + room));
      found.values.resize(2 * (size + room));
    }
    const size_t now = table.collect(
        part_of(v, begin),
        n,
        bound,
        static_cast<uint32_t>(begin),
        found.indices.data() + size,
        found.values.data() + size,
        room);
    if (room == 0) {
      continue;
    }
    if (v.residual != nullptr) {
      for (size_t i = size; i < size + now; ++i) {
        v.residual[found.indices[i]] = 0;
      }
    }
    size += now;
  }
  found.indices.resize(size);
  found.values.resize(size);
  return size <= limit;
}

// Undoes that.
void give_back(float* residual, const Selected& found) {
  if (residual != nullptr) {
    for (size_t i = 0; i < found.indices.size(); ++i) {
      residual[found.indices[i]] = found.values[i];
    }
  }
}

// The k largest of candidates that have all of them; the residual gets others.
void reduce_to(Selected& found, size_t k, float* residual) {
  const size_t size = found.values.size();
  if (size == k) {
    return;
  }
  std::vector<uint32_t> bits(size);
  std::transform(
      found.values.begin(), found.values.end(), bits.begin(), magnitude);
  const uint32_t threshold = kth(bits, k);
  size_t equal = k;
  for (const float x : found.values) {
    equal -= magnitude(x) > threshold ? 1 : 0;
  }
  Selected others;
  others.indices.resize(size - k + 1);
  others.values.resize(size - k + 1);
  // Without branches: which of the candidates stay cannot be foretold.
  size_t kept = 0;
  size_t left = 0;
  for (size_t i = 0; i < size; ++i) {
    const float x = found.values[i];
    const uint32_t index = found.indices[i];
    const uint32_t one = magnitude(x);
    const bool same = one == threshold && equal > 0;
    equal -= same ? 1 : 0;
    const bool stays = one > threshold || same;
    others.indices[left] = index;
    others.values[left] = x;
    left += stays ? 0 : 1;
    found.indices[kept] = index;
    found.values[kept] = x;
    kept += stays ? 1 : 0;
  }
  others.indices.resize(left);
  others.values.resize(left);
  give_back(residual, others);
  found.indices.resize(k);
  found.values.resize(k);
}

// The first `wanted` elements whose magnitude is exactly `bound`, of what
// take_above has left. Fewer if there are not as many. `taken` is what it has
// found, which may be zeros by now.
Selected first_equal(
    const CompressTable& table,
    const Compensation& left,
    size_t count,
    uint32_t bound,
    size_t wanted,
    const Selected& taken) {
  constexpr size_t kPart = 1 << 14;
  size_t behind = 0; // the next of `taken`
  Selected equal;
  Selected part;
  part.indices.resize(kPart);
  part.values.resize(kPart);
  for (size_t begin = 0; begin < count && equal.indices.size() < wanted;
       begin += kPart) {
    const size_t n = std::min(kPart, count - begin);
    size_t now = n;
    if (bound > 0) {
      now = table.collect(
          part_of(left, begin),
          n,
          bound - 1,
          static_cast<uint32_t>(begin),
          part.indices.data(),
          part.values.data(),
          n);
    } else { // no bound below 0: all of them
      for (size_t i = 0; i < n; ++i) {
        part.indices[i] = static_cast<uint32_t>(begin + i);
        part.values[i] = value(left, begin + i);
      }
    }
    for (size_t i = 0; i < now && equal.indices.size() < wanted; ++i) {
      const uint32_t index = part.indices[i];
      while (behind < taken.indices.size() && taken.indices[behind] < index) {
        ++behind;
      }
      const bool free =
          behind == taken.indices.size() || taken.indices[behind] != index;
      if (free && magnitude(part.values[i]) == bound) {
        equal.indices.push_back(index);
        equal.values.push_back(part.values[i]);
      }
    }
  }
  return equal;
}

// Both, in the order of indices; they have none in common.
void merge(Selected& found, const Selected& others) {
  const size_t size = found.indices.size() + others.indices.size();
  Selected both;
  both.indices.resize(size);
  both.values.resize(size);
  size_t a = 0;
  size_t b = 0;
  for (size_t i = 0; i < size; ++i) {
    const bool first = b == others.indices.size() ||
        (a < found.indices.size() && found.indices[a] < others.indices[b]);
    both.indices[i] = first ? found.indices[a] : others.indices[b];
    both.values[i] = first ? found.values[a++] : others.values[b++];
  }
  found = std::move(both);
}

void clear(float* residual, const Selected& found) {
  if (residual != nullptr) {
    for (const uint32_t i : found.indices) {
      residual[i] = 0;
    }
  }
}

// By one pass with a bound that is probably right. False: it was not, and the
// residual is v.
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
  const size_t limit = std::min(count, 2 * candidates + 1024);
  if (!take_above(table, v, count, bound, limit, found)) {
    give_back(v.residual, found);
    return false;
  }
  if (found.indices.size() >= k) {
    reduce_to(found, k, v.residual);
    return true;
  }
  // Many elements are alike (zeros, rounded values), and the bound is theirs.
  const size_t missing = k - found.indices.size();
  const Selected equal =
      first_equal(table, written(v), count, bound, missing, found);
  if (equal.indices.size() < missing) {
    give_back(v.residual, found);
    return false;
  }
  clear(v.residual, equal);
  merge(found, equal);
  return true;
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
    clear(v.residual, found);
  }
}

void above(
    const CompressTable& table,
    const Compensation& v,
    size_t count,
    float threshold,
    size_t at_least,
    Selected& found) {
  take_above(table, v, count, magnitude(threshold), count, found);
  if (found.indices.size() < at_least) {
    give_back(v.residual, found);
    top_k(table, written(v), count, at_least, found);
  }
}

std::optional<int64_t> scatter(
    float* out,
    size_t count,
    float alpha,
    std::vector<Picked>& ranks) {
  constexpr size_t kPart = 1 << 15;
  const auto bound = static_cast<uint32_t>(count);
  for (size_t begin = 0; begin < count; begin += kPart) {
    const size_t end = std::min(begin + kPart, count);
    std::fill(out + begin, out + end, 0.0F);
    for (Picked& rest : ranks) {
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
  for (const Picked& rest : ranks) {
    if (rest.count != 0) {
      return rest.indices[0];
    }
  }
  return std::nullopt;
}

} // namespace fusedpg::compress
