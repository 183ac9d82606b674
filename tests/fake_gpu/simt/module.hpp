#pragma once

// What the source of a module needs of CUDA, for the ordinary C++ compiler, and
// how its kernels are found: nvrtc.cpp puts this before it, and
// FUSEDPG_FAKE_KERNEL behind it. Not for kernels whose threads wait for each
// other: nothing here lets them.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "module_kernel.hpp"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

namespace fusedpg_fake {

struct Index {
  unsigned x;
};

} // namespace fusedpg_fake

static thread_local fusedpg_fake::Index threadIdx, blockIdx, blockDim, gridDim;

static inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
static inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
static inline float __fsqrt_rn(float x) {
  return std::sqrt(x);
}
static inline double __dsqrt_rn(double x) {
  return std::sqrt(x);
}
static inline float half_value(uint16_t bits) {
  _Float16 half;
  std::memcpy(&half, &bits, sizeof half);
  return static_cast<float>(half);
}
static inline uint16_t half_bits(float value) {
  const auto half = static_cast<_Float16>(value);
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof bits);
  return bits;
}

namespace fusedpg_fake {

template <typename Function>
struct Caller;
template <typename... Parameters>
struct Caller<void(Parameters...)> {
  static inline const uint64_t sizes[] = {sizeof(Parameters)..., 0};

  template <void (*kKernel)(Parameters...)>
  static void run(const void* const* given, const Place& place) {
    threadIdx.x = place.threadIdx;
    blockIdx.x = place.blockIdx;
    blockDim.x = place.blockDim;
    gridDim.x = place.gridDim;
    call<kKernel>(given, std::index_sequence_for<Parameters...>());
  }
  template <void (*kKernel)(Parameters...), size_t... kIndex>
  static void call(
      const void* const* given,
      std::index_sequence<kIndex...> /* all */) {
    kKernel(*static_cast<const Parameters*>(given[kIndex])...);
  }
  template <void (*kKernel)(Parameters...)>
  static Kernel kernel() {
    return {sizeof...(Parameters), sizes, &run<kKernel>};
  }
};

} // namespace fusedpg_fake

#define FUSEDPG_FAKE_KERNEL(name)                                             \
  extern "C" __attribute__((visibility("default"))) void fusedpg_fake_##name( \
      fusedpg_fake::Kernel* kernel) {                                         \
    *kernel = fusedpg_fake::Caller<decltype(name)>::template kernel<name>();  \
  }
