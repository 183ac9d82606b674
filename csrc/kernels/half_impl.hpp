// Part of kernels_impl.hpp: conversions of spans between the half types and
// fp32.

struct Half {
  uint16_t bits;
};

struct BFloat {
  uint16_t bits;
};

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
    out[i] = bfloat_to_float(load<uint16_t>(in, i));
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
