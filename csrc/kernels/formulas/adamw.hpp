#pragma once

#include <cmath>

#if defined(__CUDACC__)
#define FUSEDPG_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FUSEDPG_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace fusedpg::kernels {

// Scalars of one AdamW update, resolved once per call and tensor. Formula:
// Loshchilov and Hutter 2019 (arXiv:1711.05101), algorithm 2, in the order of
// operations of torch's fused kernel.
struct AdamwArgs {
  float decay; // 1 - lr * weight_decay
  float beta1;
  float one_minus_beta1; // rounded from double
  float beta2;
  float one_minus_beta2; // rounded from double
  float eps;
  float step_size; // lr / (1 - beta1^step)
  float bias_correction2_sqrt; // sqrt(1 - beta2^step)
  float grad_factor; // 1 / (grad_scale * divisor), negated when maximizing
  bool amsgrad;
};

struct AdamwState {
  float param;
  float exp_avg;
  float exp_avg_sq;
  float max_exp_avg_sq;
};

// `grad` is the reduced gradient after grad_factor.
template <bool amsgrad>
FUSEDPG_HOST_DEVICE void adamw(const AdamwArgs& a, float grad, AdamwState& s) {
  float param = s.param * a.decay;
  s.exp_avg = a.beta1 * s.exp_avg + a.one_minus_beta1 * grad;
  s.exp_avg_sq = a.beta2 * s.exp_avg_sq + a.one_minus_beta2 * (grad * grad);
  float second = s.exp_avg_sq;
  if constexpr (amsgrad) {
    // A NaN moment must stay visible, so no plain max.
    second = s.max_exp_avg_sq < second || second != second ? second
                                                           : s.max_exp_avg_sq;
    s.max_exp_avg_sq = second;
  }
  const float denom = sqrtf(second) / a.bias_correction2_sqrt + a.eps;
  s.param = param - a.step_size * (s.exp_avg / denom);
}

} // namespace fusedpg::kernels
