// Part of kernels_impl.hpp: compression by stochastic rounding.

// Blocks of Philox that are computed side by side.
constexpr size_t kPhiloxLanes = 8;

#if defined(__AVX2__)
// Four blocks side by side: a word in the lower half of each 64-bit lane, which
// is where products are made; what the upper halves hold does not matter.
struct PhiloxLanes {
  __m256i word[4];
};

FUSEDPG_INLINE void philox_round(PhiloxLanes& c, __m256i key0, __m256i key1) {
  const __m256i product0 = _mm256_mul_epu32(
      c.word[0], _mm256_set1_epi64x(static_cast<int64_t>(0xD2511F53U)));
  const __m256i product1 = _mm256_mul_epu32(
      c.word[2], _mm256_set1_epi64x(static_cast<int64_t>(0xCD9E8D57U)));
  c.word[0] = _mm256_xor_si256(
      _mm256_xor_si256(_mm256_srli_epi64(product1, 32), c.word[1]), key0);
  c.word[2] = _mm256_xor_si256(
      _mm256_xor_si256(_mm256_srli_epi64(product0, 32), c.word[3]), key1);
  c.word[1] = product1;
  c.word[3] = product0;
}

FUSEDPG_INLINE void philox_store(const PhiloxLanes& c, uint32_t* out) {
  // The lower word of each pair from one, the upper from the other.
  const auto pairs = [](__m256i low, __m256i high) {
    return _mm256_blend_epi32(low, _mm256_slli_epi64(high, 32), 0xaa);
  };
  const __m256i first = pairs(c.word[0], c.word[1]);
  const __m256i second = pairs(c.word[2], c.word[3]);
  const __m256i even = _mm256_unpacklo_epi64(first, second);
  const __m256i odd = _mm256_unpackhi_epi64(first, second);
  auto* to = reinterpret_cast<__m256i*>(out);
  _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
  _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
}

FUSEDPG_INLINE void philox_blocks(
    uint64_t seed,
    uint64_t block,
    uint32_t* out) {
  constexpr size_t kSets = kPhiloxLanes / 4;
  PhiloxLanes c[kSets];
  for (size_t s = 0; s < kSets; ++s) {
    const __m256i counter = _mm256_add_epi64(
        _mm256_set1_epi64x(static_cast<int64_t>(block + 4 * s)),
        _mm256_setr_epi64x(0, 1, 2, 3));
    c[s].word[0] = counter;
    c[s].word[1] = _mm256_srli_epi64(counter, 32);
    c[s].word[2] = c[s].word[3] = _mm256_setzero_si256();
  }
  auto key0 = static_cast<uint32_t>(seed);
  auto key1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const __m256i keys0 = _mm256_set1_epi32(static_cast<int>(key0));
    const __m256i keys1 = _mm256_set1_epi32(static_cast<int>(key1));
#pragma GCC unroll 4
    for (size_t s = 0; s < kSets; ++s) {
      philox_round(c[s], keys0, keys1);
    }
    key0 += 0x9E3779B9U;
    key1 += 0xBB67AE85U;
  }
  for (size_t s = 0; s < kSets; ++s) {
    philox_store(c[s], out + 16 * s);
  }
}
#else
FUSEDPG_INLINE void philox_blocks(
    uint64_t seed,
    uint64_t block,
    uint32_t* out) {
  uint32_t c0[kPhiloxLanes];
  uint32_t c1[kPhiloxLanes];
  uint32_t c2[kPhiloxLanes];
  uint32_t c3[kPhiloxLanes];
  for (size_t k = 0; k < kPhiloxLanes; ++k) {
    const uint64_t counter = block + k;
    c0[k] = static_cast<uint32_t>(counter);
    c1[k] = static_cast<uint32_t>(counter >> 32);
    c2[k] = 0;
    c3[k] = 0;
  }
  auto key0 = static_cast<uint32_t>(seed);
  auto key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (size_t k = 0; k < kPhiloxLanes; ++k) {
      const uint64_t product0 = static_cast<uint64_t>(c0[k]) * 0xD2511F53U;
      const uint64_t product1 = static_cast<uint64_t>(c2[k]) * 0xCD9E8D57U;
      const auto high0 = static_cast<uint32_t>(product0 >> 32);
      const auto high1 = static_cast<uint32_t>(product1 >> 32);
      c0[k] = high1 ^ c1[k] ^ key0;
      c2[k] = high0 ^ c3[k] ^ key1;
      c1[k] = static_cast<uint32_t>(product1);
      c3[k] = static_cast<uint32_t>(product0);
    }
    key0 += 0x9E3779B9U;
    key1 += 0xBB67AE85U;
  }
  for (size_t k = 0; k < kPhiloxLanes; ++k) {
    out[4 * k] = c0[k];
    out[4 * k + 1] = c1[k];
    out[4 * k + 2] = c2[k];
    out[4 * k + 3] = c3[k];
  }
}
#endif

// Words for a tile that begins anywhere in a block of four, and lanes that may
// be more than needed.
constexpr size_t kRandomWords = kCompressTile + 8 * kPhiloxLanes;

// The words of elements [begin, begin + n); in `words`.
FUSEDPG_INLINE const uint32_t* random_words(
    const RandomBits& r,
    size_t begin,
    size_t n,
    uint32_t* words) {
  const uint64_t first = r.offset + begin;
  const size_t skipped = first % 4;
  uint64_t block = first / 4;
  for (size_t i = 0; i < skipped + n; i += 4 * kPhiloxLanes) {
    philox_blocks(r.seed, block, words + i);
    block += kPhiloxLanes;
  }
  return words + skipped;
}

FUSEDPG_INLINE float uniform(uint32_t word) {
  return static_cast<float>(static_cast<int32_t>(word >> 8)) * 0x1p-24F;
}

FUSEDPG_INLINE float absolute(float x) {
  const uint32_t bits = magnitude(x);
  float result = 0;
  __builtin_memcpy(&result, &bits, sizeof(result));
  return result;
}

template <typename Code>
FUSEDPG_INLINE void quantise_as(
    const Compensation& c,
    size_t count,
    const Levels& levels,
    const RandomBits& random,
    Code* codes) {
  alignas(kLine) float tile[kCompressTile];
  alignas(kLine) uint32_t words[kRandomWords];
  alignas(kLine) int32_t found[kCompressTile];
  const auto most = static_cast<float>(levels.levels);
  const float factor = most / levels.norm;
  const float unit = levels.norm / most;
  // 0 for a norm of 0, and for what is not finite.
  const bool usable = factor <= 0x1.fffffep127F && factor > 0;
  for (size_t begin = 0; begin < count; begin += kCompressTile) {
    const size_t n = smaller(kCompressTile, count - begin);
    const float* v = compensated(c, begin, n, tile);
    if (!usable) {
      for (size_t i = 0; i < n; ++i) {
        codes[begin + i] = 0;
      }
      keep(c, begin, v, n);
      continue;
    }
    const uint32_t* word = random_words(random, begin, n, words);
    for (size_t i = 0; i < n; ++i) {
      float scaled = absolute(v[i]) * factor;
      scaled = scaled < most ? scaled : most;
      const auto low = static_cast<int32_t>(scaled);
      const float rest = scaled - static_cast<float>(low);
      const int32_t code = low + (uniform(word[i]) < rest ? 1 : 0);
      found[i] = v[i] < 0 ? -code : code;
    }
    for (size_t i = 0; i < n; ++i) {
      codes[begin + i] = static_cast<Code>(found[i]);
    }
    if (c.residual != nullptr) {
      float* residual = c.residual + begin;
#pragma GCC ivdep
      for (size_t i = 0; i < n; ++i) {
        residual[i] = v[i] - static_cast<float>(found[i]) * unit;
      }
    }
  }
}

static void quantise(
    const Compensation& c,
    size_t count,
    const Levels& levels,
    const RandomBits& random,
    void* codes) {
  if (levels.wide) {
    quantise_as(c, count, levels, random, static_cast<int16_t*>(codes));
  } else {
    quantise_as(c, count, levels, random, static_cast<int8_t*>(codes));
  }
}

template <bool kAdd, typename Code>
FUSEDPG_INLINE void dequantise_as(
    float* out,
    const Code* codes,
    size_t count,
    float unit,
    float alpha) {
  for (size_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(codes[i]) * unit;
    put<kAdd>(out + i, alpha * value);
  }
}

static void dequantise(
    float* out,
    const void* codes,
    size_t count,
    const Levels& levels,
    float alpha,
    bool add) {
  const float unit = levels.norm / static_cast<float>(levels.levels);
  const auto* narrow = static_cast<const int8_t*>(codes);
  const auto* wide = static_cast<const int16_t*>(codes);
  if (levels.wide) {
    add ? dequantise_as<true>(out, wide, count, unit, alpha)
        : dequantise_as<false>(out, wide, count, unit, alpha);
  } else {
    add ? dequantise_as<true>(out, narrow, count, unit, alpha)
        : dequantise_as<false>(out, narrow, count, unit, alpha);
  }
}

static void ternary(
    const Compensation& c,
    size_t count,
    float bound,
    float scale,
    const RandomBits& random,
    uint8_t* packed) {
  alignas(kLine) float tile[kCompressTile];
  alignas(kLine) uint32_t words[kRandomWords];
  alignas(kLine) uint8_t codes[kCompressTile + 4];
  for (size_t begin = 0; begin < count; begin += kCompressTile) {
    const size_t n = smaller(kCompressTile, count - begin);
    const float* v = compensated(c, begin, n, tile);
    const uint32_t* word = random_words(random, begin, n, words);
    for (size_t i = 0; i < n; ++i) {
      const float size = absolute(v[i]);
      const float clamped = size < bound ? size : bound;
      // u < |v| / scale, by a product: exact, as u has 24 bits, up to one rounding.
      const bool sent = uniform(word[i]) * scale < clamped;
      codes[i] = static_cast<uint8_t>(sent ? (v[i] < 0 ? 2 : 1) : 0);
    }
    for (size_t i = n; i < (n + 3) / 4 * 4; ++i) {
      codes[i] = 0;
    }
    uint8_t* to = packed + begin / 4;
    for (size_t i = 0; i < n; i += 4) {
      uint32_t four = 0;
      __builtin_memcpy(&four, codes + i, sizeof(four));
      to[i / 4] =
          static_cast<uint8_t>(four | four >> 6 | four >> 12 | four >> 18);
    }
    if (c.residual != nullptr) {
      float* residual = c.residual + begin;
#pragma GCC ivdep
      for (size_t i = 0; i < n; ++i) {
        const float sent =
            codes[i] == 1 ? scale : (codes[i] == 2 ? -scale : 0.0F);
        residual[i] = v[i] - sent;
      }
    }
  }
}

template <bool kAdd>
FUSEDPG_INLINE void unternary_as(
    float* out,
    const uint8_t* packed,
    size_t count,
    float value) {
  const float values[4] = {0.0F, value, -value, 0.0F};
  size_t i = 0;
#if defined(__AVX2__)
  const __m256 each = _mm256_setr_ps(0, value, -value, 0, 0, value, -value, 0);
  const __m256i shifts = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
  for (; i + 8 <= count; i += 8) {
    uint16_t codes = 0;
    __builtin_memcpy(&codes, packed + i / 4, sizeof(codes));
    // Only two bits of each code count.
    __m256 x = _mm256_permutevar_ps(
        each, _mm256_srlv_epi32(_mm256_set1_epi32(codes), shifts));
    if constexpr (kAdd) {
      x = _mm256_add_ps(_mm256_loadu_ps(out + i), x);
    }
    _mm256_storeu_ps(out + i, x);
  }
#endif
  for (; i < count; ++i) {
    put<kAdd>(out + i, values[packed[i / 4] >> (2 * (i % 4)) & 3]);
  }
}

static void unternary(
    float* out,
    const uint8_t* packed,
    size_t count,
    float value,
    bool add) {
  if (add) {
    unternary_as<true>(out, packed, count, value);
  } else {
    decode_into(out, count, [&](float* to, size_t begin, size_t n) {
      unternary_as<false>(to, packed + begin / 4, n, value);
    });
  }
}

FUSEDPG_INLINE float power_of(uint32_t code) {
  const uint32_t exponent = code & 127;
  // 2^(c - 64) has the biased exponent c + 63.
  uint32_t bits = exponent == 0 ? 0 : (exponent + 63) << 23;
  bits = exponent == 127 ? 0x7fc00000U : bits;
  bits |= (code & 128) << 24;
  float value = 0;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

static void natural(
    const Compensation& c,
    size_t count,
    const RandomBits& random,
    uint8_t* codes) {
  alignas(kLine) float tile[kCompressTile];
  alignas(kLine) uint32_t words[kRandomWords];
  alignas(kLine) uint32_t found[kCompressTile];
  for (size_t begin = 0; begin < count; begin += kCompressTile) {
    const size_t n = smaller(kCompressTile, count - begin);
    const float* v = compensated(c, begin, n, tile);
    const uint32_t* word = random_words(random, begin, n, words);
    for (size_t i = 0; i < n; ++i) {
      const auto bits = static_cast<int32_t>(magnitude(v[i]));
      const int32_t exponent = bits >> 23;
      const int32_t rest = (bits & 0x7fffff) << 1;
      const auto drawn = static_cast<int32_t>(word[i] >> 8);
      int32_t code = exponent - 63 + (drawn < rest ? 1 : 0);
      code = code < 1 ? 0 : code;
      code = code > 126 ? 126 : code;
      code = exponent == 255 ? 127 : code;
      found[i] = static_cast<uint32_t>(code) | (v[i] < 0 ? 128U : 0U);
    }
    for (size_t i = 0; i < n; ++i) {
      codes[begin + i] = static_cast<uint8_t>(found[i]);
    }
    if (c.residual != nullptr) {
      float* residual = c.residual + begin;
#pragma GCC ivdep
      for (size_t i = 0; i < n; ++i) {
        residual[i] = v[i] - power_of(found[i]);
      }
    }
  }
}

template <bool kAdd>
FUSEDPG_INLINE void unnatural_as(
    float* out,
    const uint8_t* codes,
    size_t count,
    float alpha) {
  float values[256];
  for (uint32_t code = 0; code < 256; ++code) {
    values[code] = alpha * power_of(code);
  }
  size_t i = 0;
#if defined(__AVX2__)
  const __m256 factor = _mm256_set1_ps(alpha);
  const __m256i seven = _mm256_set1_epi32(127);
  const __m256i bias = _mm256_set1_epi32(63);
  const __m256i nan = _mm256_set1_epi32(0x7fc00000);
  for (; i + 8 <= count; i += 8) {
    const __m256i code = _mm256_cvtepu8_epi32(
        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
    const __m256i exponent = _mm256_and_si256(code, seven);
    __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(exponent, bias), 23);
    bits = _mm256_andnot_si256(
        _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256()), bits);
    bits = _mm256_blendv_epi8(bits, nan, _mm256_cmpeq_epi32(exponent, seven));
    // Bit 7 of the code is the sign.
    bits = _mm256_or_si256(
        bits, _mm256_slli_epi32(_mm256_srli_epi32(code, 7), 31));
    __m256 value = _mm256_mul_ps(factor, _mm256_castsi256_ps(bits));
    if constexpr (kAdd) {
      value = _mm256_add_ps(_mm256_loadu_ps(out + i), value);
    }
    _mm256_storeu_ps(out + i, value);
  }
#endif
  for (; i < count; ++i) {
    put<kAdd>(out + i, values[codes[i]]);
  }
}

static void unnatural(
    float* out,
    const uint8_t* codes,
    size_t count,
    float alpha,
    bool add) {
  if (add) {
    unnatural_as<true>(out, codes, count, alpha);
  } else {
    decode_into(out, count, [&](float* to, size_t begin, size_t n) {
      unnatural_as<false>(to, codes + begin, n, alpha);
    });
  }
}
