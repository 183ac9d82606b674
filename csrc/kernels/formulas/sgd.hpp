#pragma once

#include "kernels/formulas/host_device.hpp"

namespace fusedpg::kernels {

// SGD with momentum as torch.optim.SGD defines it (Sutskever et al. 2013, with
// the learning rate outside the momentum buffer).
template <typename T>
struct SgdScalars {
  T lr = 0;
  T weight_decay = 0;
  T momentum = 0; // 0: no buffer
  T one_minus_dampening = 1; // rounded from double
  bool nesterov = false;
  bool first_step = false; // the buffer becomes the gradient
};

template <typename T>
struct SgdState {
  T param;
  T momentum_buffer;
};

// `grad` is the reduced gradient after its factor.
template <bool has_momentum, bool nesterov, typename T>
FUSEDPG_HOST_DEVICE void sgd(const SgdScalars<T>& a, T grad, SgdState<T>& s) {
  // An infinite parameter must not make 0 * inf.
  grad = a.weight_decay != 0 ? grad + a.weight_decay * s.param : grad;
  if constexpr (has_momentum) {
    s.momentum_buffer = a.first_step
        ? grad
        : a.momentum * s.momentum_buffer + a.one_minus_dampening * grad;
    grad = nesterov ? grad + a.momentum * s.momentum_buffer : s.momentum_buffer;
  }
  s.param = s.param - a.lr * grad;
}

} // namespace fusedpg::kernels
