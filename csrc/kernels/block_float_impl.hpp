// Part of kernels_impl.hpp: block floating point.

// For exponents that fp64 has as normal numbers.
FUSEDPG_INLINE double power_of_two(int exponent) {
  const uint64_t bits = static_cast<uint64_t>(1023 + exponent) << 52;
  double power = 0;
  __builtin_memcpy(&power, &bits, sizeof(power));
  return power;
}

static void block_exponents(
    const float* v,
    size_t count,
    size_t block,
    int32_t* exponents) {
  for (size_t begin = 0; begin < count; begin += block) {
    const size_t n = smaller(block, count - begin);
    const float* from = v + begin;
    int32_t most = 0; // of magnitudes' bits, which are in the order of values
    for (size_t i = 0; i < n; ++i) {
      const auto bits = static_cast<int32_t>(magnitude(from[i]));
      most = bits > most ? bits : most;
    }
    int32_t exponent = kZeroBlock;
    if (most >= 0x7f800000) {
      exponent = kNotFiniteBlock;
    } else if (most >= 0x00800000) {
      exponent = (most >> 23) - 126;
    } else if (most > 0) { // denormal
      exponent = -117 - __builtin_clz(static_cast<uint32_t>(most));
    }
    *exponents++ = exponent;
  }
}

// float32 has these exponents. Any other one comes from a fault, and is treated
// like that of a block without an exponent.
FUSEDPG_INLINE bool has_exponent(int32_t exponent) {
  return exponent >= -148 && exponent <= 128;
}

static void block_quantise(
    const float* v,
    size_t count,
    size_t block,
    const int32_t* exponents,
    int bits,
    int32_t* codes) {
  const double limit = power_of_two(bits) - (bits == 31 ? 1 : 0);
  for (size_t begin = 0; begin < count; begin += block) {
    const size_t n = smaller(block, count - begin);
    const int32_t exponent = *exponents++;
    int32_t* to = codes + begin;
    if (!has_exponent(exponent)) {
      __builtin_memset(to, 0, n * sizeof(int32_t));
      continue;
    }
    const double scale = power_of_two(bits - exponent);
    const float* from = v + begin;
    for (size_t i = 0; i < n; ++i) {
      // The bounds matter only if somebody writes v between the two passes.
      double x = __builtin_rint(static_cast<double>(from[i]) * scale);
      x = x < limit ? x : limit;
      x = x > -limit ? x : -limit;
      to[i] = static_cast<int32_t>(x);
    }
  }
}

static void block_dequantise(
    float* out,
    const int32_t* codes,
    size_t count,
    size_t block,
    const int32_t* exponents,
    int bits,
    double alpha) {
  for (size_t begin = 0; begin < count; begin += block) {
    const size_t n = smaller(block, count - begin);
    const int32_t exponent = *exponents++;
    float* to = out + begin;
    if (!has_exponent(exponent)) {
      const float value = exponent > 0 ? __builtin_nanf("") : 0.0F;
      for (size_t i = 0; i < n; ++i) {
        to[i] = value;
      }
      continue;
    }
    const double scale = power_of_two(exponent - bits) * alpha;
    const int32_t* from = codes + begin;
    for (size_t i = 0; i < n; ++i) {
      to[i] = static_cast<float>(static_cast<double>(from[i]) * scale);
    }
  }
}
