// Part of kernels_impl.hpp: which blocks of a span hold anything.

// Whether any bit of four lines is set. By hand: compilers spend more on
// bringing the parts of a vector together than on the loads.
FUSEDPG_INLINE bool any_bit_of_lines(const char* base) {
#if defined(__AVX512F__)
  const auto line = [&](size_t k) {
    return _mm512_loadu_si512(base + k * kLine);
  };
  const __m512i any = _mm512_or_si512(
      _mm512_or_si512(line(0), line(1)), _mm512_or_si512(line(2), line(3)));
  return _mm512_test_epi64_mask(any, any) != 0;
#elif defined(__AVX2__)
  __m256i any = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (size_t k = 0; k < 8; ++k) {
    any = _mm256_or_si256(
        any,
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(base + 32 * k)));
  }
  return _mm256_testz_si256(any, any) == 0;
#elif defined(__SSE4_1__)
  __m128i any = _mm_setzero_si128();
#pragma GCC unroll 16
  for (size_t k = 0; k < 16; ++k) {
    any = _mm_or_si128(
        any, _mm_loadu_si128(reinterpret_cast<const __m128i*>(base + 16 * k)));
  }
  return _mm_testz_si128(any, any) == 0;
#else
  uint64_t any = 0;
  for (size_t k = 0; k < 4 * kLine / sizeof(any); ++k) {
    any |= load<uint64_t>(base, k);
  }
  return any != 0;
#endif
}

// Whether any bit of the span is set; ends early where data are dense.
FUSEDPG_INLINE bool any_bit(const char* base, size_t bytes) {
  size_t i = 0;
  for (; i + 4 * kLine <= bytes; i += 4 * kLine) {
    if (any_bit_of_lines(base + i)) {
      return true;
    }
  }
  uint64_t bits = 0;
  for (; i + sizeof(bits) <= bytes; i += sizeof(bits)) {
    bits |= load<uint64_t>(base + i, 0);
  }
  for (; i < bytes; ++i) {
    bits |= static_cast<unsigned char>(base[i]);
  }
  return bits != 0;
}

// bits[b / 64] gets bit b % 64 from present(offset, length) of block b. Several
// words at a time: one stream of loads is not as fast as memory is.
template <typename Present>
FUSEDPG_INLINE void fill_bits(
    size_t total,
    size_t block,
    uint64_t* bits,
    const Present& present) {
  constexpr size_t kStreams = 4;
  size_t at = 0;
  for (; at + kStreams * 64 * block <= total; at += kStreams * 64 * block) {
    uint64_t words[kStreams] = {};
    for (size_t b = 0; b < 64; ++b) {
      for (size_t s = 0; s < kStreams; ++s) {
        const bool found = present(at + (64 * s + b) * block, block);
        words[s] |= static_cast<uint64_t>(found) << b;
      }
    }
    for (size_t s = 0; s < kStreams; ++s) {
      *bits++ = words[s];
    }
  }
  while (at < total) {
    uint64_t word = 0;
    for (int b = 0; b < 64 && at < total; ++b, at += block) {
      const bool found = present(at, smaller(block, total - at));
      word |= static_cast<uint64_t>(found) << b;
    }
    *bits++ = word;
  }
}

static void find_blocks(
    const void* src,
    size_t bytes,
    size_t block_bytes,
    uint64_t* bits) {
  const auto* base = static_cast<const char*>(src);
  fill_bits(bytes, block_bytes, bits, [&](size_t at, size_t n) {
    return any_bit(base + at, n);
  });
}

// Written so that NaN counts as above.
template <typename T>
FUSEDPG_INLINE bool any_above_magnitude(
    const char* base,
    size_t count,
    T threshold) {
  int above = 0;
  for (size_t i = 0; i < count; ++i) {
    const T x = load<T>(base, i);
    above |= !(x <= threshold && x >= -threshold);
  }
  return above != 0;
}

template <typename T>
FUSEDPG_INLINE bool any_half_above(
    const char* base,
    size_t count,
    float threshold) {
  constexpr size_t kSome = 256;
  float wide[kSome];
  for (size_t i = 0; i < count; i += kSome) {
    const size_t n = smaller(kSome, count - i);
    widen(wide, static_cast<const T*>(nullptr), base + 2 * i, n);
    if (any_above_magnitude<float>(
            reinterpret_cast<const char*>(wide), n, threshold)) {
      return true;
    }
  }
  return false;
}

static void find_blocks_above(
    DType dtype,
    const void* src,
    size_t count,
    size_t block,
    double threshold,
    uint64_t* bits) {
  const auto* base = static_cast<const char*>(src);
  const auto single = static_cast<float>(threshold);
  const auto fill = [&](size_t element, const auto& present) {
    fill_bits(count, block, bits, [&](size_t at, size_t n) {
      return present(base + at * element, n);
    });
  };
  switch (dtype) {
    case DType::kFloat16:
      return fill(2, [&](const char* p, size_t n) {
        return any_half_above<Half>(p, n, single);
      });
    case DType::kBFloat16:
      return fill(2, [&](const char* p, size_t n) {
        return any_half_above<BFloat>(p, n, single);
      });
    case DType::kFloat32:
      return fill(4, [&](const char* p, size_t n) {
        return any_above_magnitude<float>(p, n, single);
      });
    case DType::kFloat64:
      return fill(8, [&](const char* p, size_t n) {
        return any_above_magnitude<double>(p, n, threshold);
      });
    default:
      return;
  }
}
