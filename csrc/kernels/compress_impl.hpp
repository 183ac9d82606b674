// Part of kernels_impl.hpp: compression of gradients, but for what is random.

// Fetches what a loop reads in the next tile: loops that compute much for each
// element do not look ahead far enough themselves. It may lie behind the end.
FUSEDPG_INLINE void fetch_after(const float* from, size_t n) {
  const auto* next = reinterpret_cast<const char*>(from) + n * sizeof(float);
  for (size_t at = 0; at < n * sizeof(float); at += kLine) {
    __builtin_prefetch(next + at);
  }
}

// Returns where v of elements [begin, begin + n) can be read: in `tile`, where
// it computes them, unless they lie somewhere already.
FUSEDPG_INLINE const float* compensated(
    const Compensation& c,
    size_t begin,
    size_t n,
    float* tile) {
  const float* grad = c.grad + begin;
  const float* residual = c.residual + begin;
  const float beta = c.beta;
  const float gamma = c.gamma;
  if (c.grad == nullptr) {
    fetch_after(residual, n);
    return residual;
  }
  if (c.residual == nullptr) {
    if (gamma == 1) {
      fetch_after(grad, n);
      return grad;
    }
    for (size_t i = 0; i < n; ++i) {
      tile[i] = gamma * grad[i];
    }
  } else if (beta == 1 && gamma == 1) {
    for (size_t i = 0; i < n; ++i) {
      tile[i] = residual[i] + grad[i];
    }
  } else {
    for (size_t i = 0; i < n; ++i) {
      tile[i] = beta * residual[i] + gamma * grad[i];
    }
  }
  return tile;
}

FUSEDPG_INLINE void keep(
    const Compensation& c,
    size_t begin,
    const float* v,
    size_t n) {
  float* to = c.residual + begin;
  if (c.residual != nullptr && to != v) {
    __builtin_memcpy(to, v, n * sizeof(float));
  }
}

FUSEDPG_INLINE uint32_t magnitude(float x) {
  uint32_t bits = 0;
  __builtin_memcpy(&bits, &x, sizeof(bits));
  return bits & 0x7fffffffU;
}

// Elements that are looked at together, at most 32.
constexpr size_t kLook = 32;

// Bit k: the magnitude of v[k], as an integer, is above the bound.
FUSEDPG_INLINE uint32_t larger_bits(const float* v, size_t n, uint32_t bound) {
  uint32_t larger = 0;
#if defined(__AVX2__)
  if (n == kLook) {
    const __m256i no_sign = _mm256_set1_epi32(0x7fffffff);
    const __m256i bounds = _mm256_set1_epi32(static_cast<int>(bound));
#pragma GCC unroll 4
    for (size_t k = 0; k < kLook; k += 8) {
      const __m256i bits = _mm256_and_si256(
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(v + k)), no_sign);
      const __m256 above =
          _mm256_castsi256_ps(_mm256_cmpgt_epi32(bits, bounds));
      larger |= static_cast<uint32_t>(_mm256_movemask_ps(above)) << k;
    }
    return larger;
  }
#endif
  for (size_t k = 0; k < n; ++k) {
    larger |= (magnitude(v[k]) > bound ? 1U : 0U) << k;
  }
  return larger;
}

static size_t collect(
    const Compensation& c,
    size_t count,
    uint32_t bound,
    uint32_t base,
    uint32_t* indices,
    float* values,
    size_t capacity) {
  alignas(kLine) float tile[kCompressTile];
  size_t found = 0;
  for (size_t begin = 0; begin < count; begin += kCompressTile) {
    const size_t n = smaller(kCompressTile, count - begin);
    const float* v = compensated(c, begin, n, tile);
    keep(c, begin, v, n);
    for (size_t i = 0; i < n; i += kLook) {
      const size_t some = smaller(kLook, n - i);
      uint32_t larger = larger_bits(v + i, some, bound);
      while (larger != 0) {
        const auto k = static_cast<size_t>(__builtin_ctz(larger));
        larger &= larger - 1;
        if (found < capacity) {
          indices[found] = base + static_cast<uint32_t>(begin + i + k);
          values[found] = v[i + k];
        }
        ++found;
      }
    }
  }
  return found;
}

constexpr size_t kSumLanes = 16;

// Partial sums of a tile; element i is in lane i % kSumLanes of each.
struct SumLanes {
  alignas(kLine) double high[kSumLanes];
  alignas(kLine) double low[kSumLanes];
  alignas(kLine) double square[kSumLanes];
  int32_t most; // the largest magnitude's bits
  uint32_t low_count;
};

// Adds up a multiple of kSumLanes elements.
FUSEDPG_INLINE void sum_lanes(const float* v, size_t n, SumLanes& to) {
#if defined(__AVX2__)
  // By hand: compilers keep these lanes in memory.
  const __m256 zero = _mm256_setzero_ps();
  const __m256 no_sign = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  __m256d high[4];
  __m256d low[4];
  __m256d square[4];
  for (size_t q = 0; q < 4; ++q) {
    high[q] = low[q] = square[q] = _mm256_setzero_pd();
  }
  __m256i most = _mm256_setzero_si256();
  uint32_t not_low = 0;
  for (size_t i = 0; i < n; i += kSumLanes) {
#pragma GCC unroll 2
    for (size_t h = 0; h < 2; ++h) {
      const __m256 x = _mm256_loadu_ps(v + i + 8 * h);
      const __m256 is_high = _mm256_cmp_ps(x, zero, _CMP_GE_OQ);
      not_low += static_cast<uint32_t>(__builtin_popcount(
          static_cast<unsigned>(_mm256_movemask_ps(is_high))));
      most = _mm256_max_epi32(
          most, _mm256_castps_si256(_mm256_and_ps(x, no_sign)));
      const __m256 highs = _mm256_and_ps(is_high, x);
      const __m256 lows = _mm256_andnot_ps(is_high, x);
#pragma GCC unroll 2
      for (size_t q = 0; q < 2; ++q) {
        const size_t k = 2 * h + q;
        const auto wide = [q](__m256 values) {
          return _mm256_cvtps_pd(
              q == 0 ? _mm256_castps256_ps128(values)
                     : _mm256_extractf128_ps(values, 1));
        };
        const __m256d all = wide(x);
        high[k] = _mm256_add_pd(high[k], wide(highs));
        low[k] = _mm256_add_pd(low[k], wide(lows));
        square[k] = _mm256_add_pd(square[k], _mm256_mul_pd(all, all));
      }
    }
  }
  for (size_t q = 0; q < 4; ++q) {
    _mm256_store_pd(to.high + 4 * q, high[q]);
    _mm256_store_pd(to.low + 4 * q, low[q]);
    _mm256_store_pd(to.square + 4 * q, square[q]);
  }
  alignas(kLine) int32_t each[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(each), most);
  to.most = 0;
  for (const int32_t one : each) {
    to.most = one > to.most ? one : to.most;
  }
  to.low_count = static_cast<uint32_t>(n) - not_low;
#else
  to = {};
  for (size_t i = 0; i < n; i += kSumLanes) {
    for (size_t k = 0; k < kSumLanes; ++k) {
      const float x = v[i + k];
      const double wide = x;
      to.high[k] += x >= 0 ? x : 0.0F;
      to.low[k] += x >= 0 ? 0.0F : x;
      to.square[k] += wide * wide;
    }
    for (size_t k = 0; k < kSumLanes; ++k) {
      const auto bits = static_cast<int32_t>(magnitude(v[i + k]));
      to.most = bits > to.most ? bits : to.most;
      to.low_count += v[i + k] >= 0 ? 0 : 1;
    }
  }
#endif
}

FUSEDPG_INLINE double added(const double* lanes) {
  double sum = 0;
  for (size_t k = 0; k < kSumLanes; ++k) {
    sum += lanes[k];
  }
  return sum;
}

FUSEDPG_INLINE void sum_tile(
    const float* v,
    size_t n,
    CompressSums& total,
    int32_t& most) {
  const size_t whole = n / kSumLanes * kSumLanes;
  const auto add = [&](const SumLanes& lanes) {
    total.high_sum += added(lanes.high);
    total.low_sum += added(lanes.low);
    total.square_sum += added(lanes.square);
    total.low_count += lanes.low_count;
    most = lanes.most > most ? lanes.most : most;
  };
  SumLanes lanes;
  if (whole != 0) {
    sum_lanes(v, whole, lanes);
    add(lanes);
  }
  if (whole < n) {
    // The rest goes into sums of its own; +0 changes none.
    alignas(kLine) float padded[kSumLanes] = {};
    __builtin_memcpy(padded, v + whole, (n - whole) * sizeof(float));
    sum_lanes(padded, kSumLanes, lanes);
    add(lanes);
  }
}

static CompressSums sums(const Compensation& c, size_t count) {
  alignas(kLine) float tile[kCompressTile];
  CompressSums total;
  int32_t most = 0;
  for (size_t begin = 0; begin < count; begin += kCompressTile) {
    const size_t n = smaller(kCompressTile, count - begin);
    const float* v = compensated(c, begin, n, tile);
    sum_tile(v, n, total, most);
    keep(c, begin, v, n);
  }
  // As integers NaNs are the largest.
  __builtin_memcpy(&total.max_abs, &most, sizeof(most));
  return total;
}

// The same where the residual lacks what the call before has sent.
FUSEDPG_INLINE const float* compensated_owed(
    const Compensation& c,
    const SignValues& owed,
    size_t begin,
    size_t n,
    float* tile) {
  const float* grad = c.grad + begin;
  const float* residual = c.residual + begin;
  const float beta = c.beta;
  const float gamma = c.gamma;
  const auto now = [&](size_t i) {
    return residual[i] - (residual[i] >= 0 ? owed.high : owed.low);
  };
  if (c.grad == nullptr) {
    for (size_t i = 0; i < n; ++i) {
      tile[i] = now(i);
    }
  } else if (beta == 1 && gamma == 1) {
    for (size_t i = 0; i < n; ++i) {
      tile[i] = now(i) + grad[i];
    }
  } else {
    for (size_t i = 0; i < n; ++i) {
      tile[i] = beta * now(i) + gamma * grad[i];
    }
  }
  return tile;
}

// Partial sums of a tile, as in SumLanes.
struct SideLanes {
  alignas(kLine) double high[kSumLanes];
  alignas(kLine) double low[kSumLanes];
  uint32_t high_count;
};

// Adds up and packs the signs of a multiple of kSumLanes elements.
FUSEDPG_INLINE void side_lanes(
    const float* v,
    size_t n,
    uint8_t* packed,
    SideLanes& to) {
  static_assert(kSumLanes == 16);
  to.high_count = 0;
#if defined(__AVX512F__) && defined(__AVX512DQ__)
  __m512d high[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  __m512d low[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  for (size_t i = 0; i < n; i += kSumLanes) {
    const __m512 x = _mm512_loadu_ps(v + i);
    const __mmask16 is_high =
        _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GE_OQ);
    __builtin_memcpy(packed + i / 8, &is_high, sizeof(is_high));
    to.high_count += static_cast<uint32_t>(__builtin_popcount(is_high));
#pragma GCC unroll 2
    for (unsigned h = 0; h < 2; ++h) {
      const __m512d wide = _mm512_cvtps_pd(
          h == 0 ? _mm512_castps512_ps256(x) : _mm512_extractf32x8_ps(x, 1));
      const auto mask = static_cast<__mmask8>(is_high >> (8 * h));
      const auto others = static_cast<__mmask8>(~mask);
      high[h] = _mm512_mask_add_pd(high[h], mask, high[h], wide);
      low[h] = _mm512_mask_add_pd(low[h], others, low[h], wide);
    }
  }
  for (size_t h = 0; h < 2; ++h) {
    _mm512_store_pd(to.high + 8 * h, high[h]);
    _mm512_store_pd(to.low + 8 * h, low[h]);
  }
#elif defined(__AVX2__)
  __m256d high[4];
  __m256d low[4];
  for (size_t q = 0; q < 4; ++q) {
    high[q] = low[q] = _mm256_setzero_pd();
  }
  for (size_t i = 0; i < n; i += kSumLanes) {
#pragma GCC unroll 2
    for (size_t h = 0; h < 2; ++h) {
      const __m256 x = _mm256_loadu_ps(v + i + 8 * h);
      const __m256 is_high = _mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_GE_OQ);
      const auto bits = static_cast<unsigned>(_mm256_movemask_ps(is_high));
      packed[i / 8 + h] = static_cast<uint8_t>(bits);
      to.high_count += static_cast<uint32_t>(__builtin_popcount(bits));
      const __m256 highs = _mm256_and_ps(is_high, x);
      const __m256 lows = _mm256_andnot_ps(is_high, x);
      const auto wide = [](__m256 values, size_t q) {
        return _mm256_cvtps_pd(
            q == 0 ? _mm256_castps256_ps128(values)
                   : _mm256_extractf128_ps(values, 1));
      };
#pragma GCC unroll 2
      for (size_t q = 0; q < 2; ++q) {
        const size_t k = 2 * h + q;
        high[k] = _mm256_add_pd(high[k], wide(highs, q));
        low[k] = _mm256_add_pd(low[k], wide(lows, q));
      }
    }
  }
  for (size_t q = 0; q < 4; ++q) {
    _mm256_store_pd(to.high + 4 * q, high[q]);
    _mm256_store_pd(to.low + 4 * q, low[q]);
  }
#else
  to = {};
  for (size_t i = 0; i < n; i += kSumLanes) {
    unsigned bits = 0;
    for (size_t k = 0; k < kSumLanes; ++k) {
      const float x = v[i + k];
      to.high[k] += x >= 0 ? x : 0.0F;
      to.low[k] += x >= 0 ? 0.0F : x;
    }
    for (unsigned k = 0; k < kSumLanes; ++k) {
      bits |= (v[i + k] >= 0 ? 1U : 0U) << k;
    }
    packed[i / 8] = static_cast<uint8_t>(bits);
    packed[i / 8 + 1] = static_cast<uint8_t>(bits >> 8);
    to.high_count += static_cast<uint32_t>(__builtin_popcount(bits));
  }
#endif
}

FUSEDPG_INLINE void side_tile(
    const float* v,
    size_t n,
    uint8_t* packed,
    SideSums& total) {
  const size_t whole = n / kSumLanes * kSumLanes;
  SideLanes lanes;
  const auto add = [&](size_t count) {
    total.high_sum += added(lanes.high);
    total.low_sum += added(lanes.low);
    total.low_count += count - lanes.high_count;
  };
  if (whole != 0) {
    side_lanes(v, whole, packed, lanes);
    add(whole);
  }
  if (whole < n) {
    // The rest goes into sums of its own; +0 changes none.
    const size_t rest = n - whole;
    alignas(kLine) float padded[kSumLanes] = {};
    __builtin_memcpy(padded, v + whole, rest * sizeof(float));
    uint8_t bits[2];
    side_lanes(padded, kSumLanes, bits, lanes);
    add(kSumLanes);
    const uint32_t used =
        (bits[0] | uint32_t{bits[1]} << 8) & ((1U << rest) - 1);
    packed[whole / 8] = static_cast<uint8_t>(used);
    if (rest > 8) {
      packed[whole / 8 + 1] = static_cast<uint8_t>(used >> 8);
    }
  }
}

static SideSums sum_signs(
    const Compensation& c,
    const SignValues* owed,
    size_t count,
    uint8_t* packed) {
  alignas(kLine) float tile[kCompressTile];
  SideSums total;
  for (size_t begin = 0; begin < count; begin += kCompressTile) {
    const size_t n = smaller(kCompressTile, count - begin);
    const float* v = owed != nullptr
        ? compensated_owed(c, *owed, begin, n, tile)
        : compensated(c, begin, n, tile);
    side_tile(v, n, packed + begin / 8, total);
    keep(c, begin, v, n);
  }
  return total;
}

static void subtract_signs(
    float* residual,
    size_t count,
    const SignValues& owed) {
  const float low = owed.low;
  const float high = owed.high;
  for (size_t i = 0; i < count; ++i) {
    residual[i] = residual[i] - (residual[i] >= 0 ? high : low);
  }
}

// From this size on, decoded values use streaming stores: they would have left
// the cache before anybody reads them.
constexpr size_t kStreamFrom = size_t{1} << 20;

// decode(to, begin, n) writes elements [begin, begin + n); begin is a multiple
// of 8.
template <class Decode>
FUSEDPG_INLINE void decode_into(float* out, size_t count, Decode decode) {
  if (count < kStreamFrom) {
    decode(out, 0, count);
    return;
  }
  alignas(kLine) float tile[kCompressTile];
  for (size_t begin = 0; begin < count; begin += kCompressTile) {
    const size_t n = smaller(kCompressTile, count - begin);
    decode(tile, begin, n);
    stream_store(
        reinterpret_cast<char*>(out + begin),
        reinterpret_cast<const char*>(tile),
        n * sizeof(float));
  }
  stream_fence(true);
}

template <bool kAdd>
FUSEDPG_INLINE void put(float* out, float value) {
  *out = kAdd ? *out + value : value;
}

template <bool kAdd>
FUSEDPG_INLINE void unpack_some(
    float* out,
    const uint8_t* packed,
    size_t count,
    float low,
    float high) {
  size_t i = 0;
#if defined(__AVX512F__)
  const __m512 lows16 = _mm512_set1_ps(low);
  const __m512 highs16 = _mm512_set1_ps(high);
  for (; i + 16 <= count; i += 16) {
    __mmask16 set = 0;
    __builtin_memcpy(&set, packed + i / 8, sizeof(set));
    __m512 value = _mm512_mask_blend_ps(set, lows16, highs16);
    if constexpr (kAdd) {
      value = _mm512_add_ps(_mm512_loadu_ps(out + i), value);
    }
    _mm512_storeu_ps(out + i, value);
  }
#endif
#if defined(__AVX2__)
  const __m256i which = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256 lows = _mm256_set1_ps(low);
  const __m256 highs = _mm256_set1_ps(high);
  for (; i + 8 <= count; i += 8) {
    const __m256i byte = _mm256_set1_epi32(packed[i / 8]);
    const __m256i set =
        _mm256_cmpeq_epi32(_mm256_and_si256(byte, which), which);
    __m256 value = _mm256_blendv_ps(lows, highs, _mm256_castsi256_ps(set));
    if constexpr (kAdd) {
      value = _mm256_add_ps(_mm256_loadu_ps(out + i), value);
    }
    _mm256_storeu_ps(out + i, value);
  }
#endif
  for (; i < count; ++i) {
    put<kAdd>(out + i, (packed[i / 8] >> (i % 8) & 1) != 0 ? high : low);
  }
}

// Tile by tile, which stays in the cache while ranks are added.
static void unpack_signs(
    float* out,
    const uint8_t* const* packed,
    const SignValues* values,
    size_t ranks,
    size_t count) {
  const auto decode = [&](float* to, size_t begin, size_t n) {
    for (size_t r = 0; r < ranks; ++r) {
      const uint8_t* bits = packed[r] + begin / 8;
      if (r == 0) {
        unpack_some<false>(to, bits, n, values[r].low, values[r].high);
      } else {
        unpack_some<true>(to, bits, n, values[r].low, values[r].high);
      }
    }
  };
  if (count >= kStreamFrom) {
    decode_into(out, count, decode);
    return;
  }
  for (size_t begin = 0; begin < count; begin += kCompressTile) {
    decode(out + begin, begin, smaller(kCompressTile, count - begin));
  }
}

// Bits of a byte as bytes: 0 or 1 each, the lowest first.
FUSEDPG_INLINE uint64_t spread_bits(uint64_t byte) {
  // Seven copies side by side; of each byte the bit that counts; then 0 or 1.
  const uint64_t copies = byte * 0x0101010101010101ULL;
  const uint64_t picked = copies & 0x8040201008040201ULL;
  return (picked + 0x00406070787c7e7fULL) >> 7 & 0x0101010101010101ULL;
}

// `spread`: spread_bits of each byte.
FUSEDPG_INLINE void vote_some(
    float* out,
    const uint8_t* packed,
    size_t stride,
    size_t ranks,
    size_t count,
    float value,
    const uint64_t* spread) {
  constexpr size_t kMost = 255; // ranks whose votes a byte can count
  size_t i = 0;
#if defined(__AVX2__)
  if (ranks <= kMost) {
    const __m256 high = _mm256_set1_ps(value);
    const __m256 low = _mm256_set1_ps(-value);
    const __m256i wanted =
        _mm256_set1_epi32(static_cast<int>((ranks + 1) / 2 - 1));
    for (; i + 8 <= count; i += 8) {
      uint64_t sums = 0;
      for (size_t r = 0; r < ranks; ++r) {
        sums += spread[packed[r * stride + i / 8]];
      }
      const __m256i votes =
          _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(sums)));
      const __m256i set = _mm256_cmpgt_epi32(votes, wanted);
      _mm256_storeu_ps(
          out + i, _mm256_blendv_ps(low, high, _mm256_castsi256_ps(set)));
    }
  }
#endif
  for (; i < count; i += 8) {
    uint32_t votes[8] = {};
    for (size_t first = 0; first < ranks; first += kMost) {
      const size_t end = smaller(first + kMost, ranks);
      uint64_t sums = 0;
      for (size_t r = first; r < end; ++r) {
        sums += spread[packed[r * stride + i / 8]];
      }
      for (size_t k = 0; k < 8; ++k) {
        votes[k] += static_cast<uint32_t>(sums >> (8 * k) & 0xff);
      }
    }
    const size_t n = smaller(8, count - i);
    for (size_t k = 0; k < n; ++k) {
      out[i + k] = 2 * votes[k] >= ranks ? value : -value;
    }
  }
}

static void vote_signs(
    float* out,
    const uint8_t* packed,
    size_t stride,
    size_t ranks,
    size_t count,
    float value) {
  uint64_t spread[256];
  for (uint64_t byte = 0; byte < 256; ++byte) {
    spread[byte] = spread_bits(byte);
  }
  decode_into(out, count, [&](float* to, size_t begin, size_t n) {
    vote_some(to, packed + begin / 8, stride, ranks, n, value, spread);
  });
}

static void dgc_accumulate(
    float* u,
    float* v,
    const float* grad,
    size_t count,
    float momentum,
    float gamma) {
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) {
    u[i] = momentum * u[i] + gamma * grad[i];
    v[i] += u[i];
  }
}
