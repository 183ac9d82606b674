#pragma once

#include "kernels/formulas/host_device.hpp"

namespace fusedpg::kernels {

// LAMB: You et al. 2020 (arXiv:1904.00962), algorithm 2, phi the identity:
//   x -= lr * (|x| / |u|) * u,  u = m^ / (sqrt(v^) + eps) + weight_decay * x
template <typename T>
struct LambScalars {
  T beta1 = 0;
  T one_minus_beta1 = 0; // rounded from double
  T beta2 = 0;
  T one_minus_beta2 = 0; // rounded from double
  T eps = 0;
  // Reciprocals, because divisions would bound the speed.
  T inverse_bias_correction1 = 1; // 1 / (1 - beta1^step)
  T inverse_bias_correction2 = 1; // 1 / (1 - beta2^step)
  T weight_decay = 0;
  T step_size = 0; // lr * trust ratio; second half
};

template <typename T>
struct LambState {
  T exp_avg;
  T exp_avg_sq;
};

// `grad` is the reduced gradient after its factor.
template <typename T>
FUSEDPG_HOST_DEVICE void lamb_moments(
    const LambScalars<T>& a,
    T grad,
    LambState<T>& s) {
  s.exp_avg = a.beta1 * s.exp_avg + a.one_minus_beta1 * grad;
  s.exp_avg_sq = a.beta2 * s.exp_avg_sq + a.one_minus_beta2 * (grad * grad);
}

// u
template <typename T>
FUSEDPG_HOST_DEVICE T
lamb_direction(const LambScalars<T>& a, T param, const LambState<T>& s) {
  const T denom =
      square_root(s.exp_avg_sq * a.inverse_bias_correction2) + a.eps;
  const T step = (s.exp_avg * a.inverse_bias_correction1) / denom;
  // An infinite parameter must not make 0 * inf.
  return a.weight_decay != 0 ? step + a.weight_decay * param : step;
}

template <typename T>
FUSEDPG_HOST_DEVICE T
lamb_step(const LambScalars<T>& a, T param, const LambState<T>& s) {
  return param - a.step_size * lamb_direction(a, param, s);
}

} // namespace fusedpg::kernels
