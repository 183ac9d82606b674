#pragma once

#if defined(__CUDACC__)
#define FUSEDPG_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FUSEDPG_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace fusedpg::kernels {

FUSEDPG_HOST_DEVICE float square_root(float x) {
  return __builtin_sqrtf(x);
}
FUSEDPG_HOST_DEVICE double square_root(double x) {
  return __builtin_sqrt(x);
}

} // namespace fusedpg::kernels
