#pragma once

#include "kernels/formulas/host_device.hpp"

namespace fusedpg::kernels {

// Adam: Kingma and Ba 2015 (arXiv:1412.6980), algorithm 1; with amsgrad Reddi
// et al. 2018, algorithm 2. AdamW: Loshchilov and Hutter 2019
// (arXiv:1711.05101), algorithm 2. In the order of operations of torch's fused
// kernels.
template <typename T>
struct AdamScalars {
  T decay = 1; // AdamW: 1 - lr * weight_decay
  T l2 = 0; // Adam: weight_decay
  T beta1 = 0;
  T one_minus_beta1 = 0; // rounded from double
  T beta2 = 0;
  T one_minus_beta2 = 0; // rounded from double
  T eps = 0;
  T step_size = 0; // lr / (1 - beta1^step)
  T bias_correction2_sqrt = 1; // sqrt(1 - beta2^step)
  bool decoupled = true; // AdamW; else Adam
  bool amsgrad = false;
};

template <typename T>
struct AdamState {
  T param;
  T exp_avg;
  T exp_avg_sq;
  T max_exp_avg_sq;
};

// `grad` is the reduced gradient after its factor.
template <bool decoupled, bool amsgrad, typename T>
FUSEDPG_HOST_DEVICE void adam(
    const AdamScalars<T>& a,
    T grad,
    AdamState<T>& s) {
  T param = s.param;
  if constexpr (decoupled) {
    param = param * a.decay;
  } else {
    // An infinite parameter must not make inf * 0.
    grad = a.l2 != 0 ? grad + param * a.l2 : grad;
  }
  s.exp_avg = a.beta1 * s.exp_avg + a.one_minus_beta1 * grad;
  s.exp_avg_sq = a.beta2 * s.exp_avg_sq + a.one_minus_beta2 * (grad * grad);
  T second = s.exp_avg_sq;
  if constexpr (amsgrad) {
    // A NaN moment must stay visible, so no plain max.
    second = s.max_exp_avg_sq < second || second != second ? second
                                                           : s.max_exp_avg_sq;
    s.max_exp_avg_sq = second;
  }
  const T denom = square_root(second) / a.bias_correction2_sqrt + a.eps;
  s.param = param - a.step_size * (s.exp_avg / denom);
}

} // namespace fusedpg::kernels
