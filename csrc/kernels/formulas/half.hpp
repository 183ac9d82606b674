#pragma once

#include <cstdint>

#include "kernels/formulas/host_device.hpp"

// Conversions between the half types and fp32: nearest, ties to even. In
// software they give the bits of the F16C instructions, NaN payloads included.
namespace fusedpg::kernels {

FUSEDPG_HOST_DEVICE float bits_to_float(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
}

FUSEDPG_HOST_DEVICE uint32_t float_to_bits(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// On the host both sides of every select are computed so that loops vectorise,
// and compared as signed integers, which SSE can.
FUSEDPG_HOST_DEVICE float half_to_float(uint16_t half) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
#else
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
#endif
}

FUSEDPG_HOST_DEVICE uint16_t float_to_half(float value) {
#if defined(__CUDA_ARCH__)
  uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
#else
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
#endif
}

FUSEDPG_HOST_DEVICE float bfloat_to_float(uint16_t bfloat) {
  return bits_to_float(static_cast<uint32_t>(bfloat) << 16);
}

FUSEDPG_HOST_DEVICE uint16_t float_to_bfloat(float value) {
#if defined(__CUDA_ARCH__)
  uint16_t bfloat;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bfloat) : "f"(value));
  return bfloat;
#else
  const uint32_t bits = float_to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(
      (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
#endif
}

} // namespace fusedpg::kernels
