// Part of kernels_impl.hpp: conversions between the half types and fp32. The
// software conversions give the bits of the F16C instructions, NaN payloads
// included.

struct Half {
  uint16_t bits;
};

struct BFloat {
  uint16_t bits;
};

FUSEDPG_INLINE float bits_to_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

FUSEDPG_INLINE uint32_t float_to_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Both sides of every select are computed so that the loops vectorise, and
// compared as signed integers, which SSE can.
[[maybe_unused]] FUSEDPG_INLINE float half_to_float(uint16_t half) {
  const int32_t sign = (half & 0x8000) << 15 << 1;
  const int32_t magnitude = (half & 0x7fff) << 13;
  // Exponent bias 15 -> 127.
  const int32_t normal = magnitude + 0x38000000;
  const int32_t infinite = magnitude + 0x70000000;
  const int32_t denormal = static_cast<int32_t>(float_to_bits(
      bits_to_float(magnitude + 0x38800000) - bits_to_float(0x38800000)));
  int32_t bits = magnitude < 0x00800000 ? denormal : normal;
  bits = magnitude >= 0x0f800000 ? infinite : bits;
  bits |= magnitude > 0x0f800000 ? 0x00400000 : 0;
  return bits_to_float(static_cast<uint32_t>(bits | sign));
}

[[maybe_unused]] FUSEDPG_INLINE uint16_t float_to_half(float value) {
  const auto all = static_cast<int32_t>(float_to_bits(value));
  const int32_t sign = (all >> 16) & 0x8000;
  const int32_t magnitude = all & 0x7fffffff;
  // Bias 127 -> 15 and half of the last place, ties to even.
  const int32_t normal =
      (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Adding 0.5 leaves the denormal's rounded mantissa in the low bits.
  const int32_t denormal =
      static_cast<int32_t>(float_to_bits(bits_to_float(magnitude) + 0.5f)) -
      0x3f000000;
  const int32_t nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  int32_t bits = magnitude < 0x38800000 ? denormal : normal;
  bits = magnitude >= 0x47800000 ? 0x7c00 : bits;
  bits = magnitude > 0x7f800000 ? nan : bits;
  return static_cast<uint16_t>(bits | sign);
}

FUSEDPG_INLINE uint16_t float_to_bfloat(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(
      (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

static void widen(
    float* __restrict out,
    const Half* /*tag*/,
    const char* in,
    size_t n) {
  size_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(
        out + i,
        _mm256_cvtph_ps(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + 2 * i))));
  }
#endif
#pragma GCC ivdep
  for (; i < n; ++i) {
    out[i] = half_to_float(load<uint16_t>(in, i));
  }
}

static void narrow(
    char* __restrict out,
    const Half* /*tag*/,
    const char* in,
    size_t n) {
  size_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(out + 2 * i),
        _mm256_cvtps_ph(
            _mm256_loadu_ps(reinterpret_cast<const float*>(in + 4 * i)),
            _MM_FROUND_TO_NEAREST_INT));
  }
#endif
#pragma GCC ivdep
  for (; i < n; ++i) {
    store(out, i, float_to_half(load<float>(in, i)));
  }
}

static void widen(
    float* __restrict out,
    const BFloat* /*tag*/,
    const char* in,
    size_t n) {
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) {
    out[i] = bits_to_float(static_cast<uint32_t>(load<uint16_t>(in, i)) << 16);
  }
}

static void narrow(
    char* __restrict out,
    const BFloat* /*tag*/,
    const char* in,
    size_t n) {
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) {
    store(out, i, float_to_bfloat(load<float>(in, i)));
  }
}
