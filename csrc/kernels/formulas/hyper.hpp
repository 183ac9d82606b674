#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/formulas/adam.hpp"
#include "kernels/formulas/lamb.hpp"
#include "kernels/formulas/sgd.hpp"

namespace fusedpg::kernels {

enum class Formula : uint8_t { kSgd, kAdam, kLamb };

// Hyperparameters of some tensors; which ones mean something depends on the
// formula.
struct Hyper {
  double lr = 0;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;
  bool first_step = false; // SGD: the momentum buffers hold nothing yet
  bool decoupled = true; // AdamW; else Adam
  bool amsgrad = false;
  bool maximize = false;
  bool trust_clip = false; // LAMB: trust ratios of at most 1
  bool always_adapt = false; // LAMB: also without weight decay
};

// Calls f(name, member) for each hyperparameter. Ranks compare them in this
// order; Python and the operators know them by these names.
template <typename H, typename F>
void for_each_hyper(H& h, F&& f) {
  f("lr", h.lr);
  f("beta1", h.beta1);
  f("beta2", h.beta2);
  f("eps", h.eps);
  f("weight_decay", h.weight_decay);
  f("momentum", h.momentum);
  f("dampening", h.dampening);
  f("nesterov", h.nesterov);
  f("first_step", h.first_step);
  f("decoupled", h.decoupled);
  f("amsgrad", h.amsgrad);
  f("maximize", h.maximize);
  f("trust_clip", h.trust_clip);
  f("always_adapt", h.always_adapt);
}

// The scalars of all formulas, as the update kernels take them.
struct StepScalars {
  SgdScalars<double> sgd;
  AdamScalars<double> adam;
  LambScalars<double> lamb;
};

// `step` counts from 1. LAMB's step_size is left to whoever knows the norms.
FUSEDPG_HOST_DEVICE void resolve_scalars(
    const Hyper& h,
    double step,
    StepScalars& s) {
  const double bias_correction1 = 1.0 - pow(h.beta1, step);
  const double bias_correction2 = 1.0 - pow(h.beta2, step);

  s.sgd.lr = h.lr;
  s.sgd.weight_decay = h.weight_decay;
  s.sgd.momentum = h.momentum;
  s.sgd.one_minus_dampening = 1.0 - h.dampening;
  s.sgd.nesterov = h.nesterov;
  s.sgd.first_step = h.first_step;

  s.adam.decay = h.decoupled ? 1.0 - h.lr * h.weight_decay : 1.0;
  s.adam.l2 = h.decoupled ? 0.0 : h.weight_decay;
  s.adam.beta1 = h.beta1;
  s.adam.one_minus_beta1 = 1.0 - h.beta1;
  s.adam.beta2 = h.beta2;
  s.adam.one_minus_beta2 = 1.0 - h.beta2;
  s.adam.eps = h.eps;
  s.adam.step_size = h.lr / bias_correction1;
  s.adam.bias_correction2_sqrt = square_root(bias_correction2);
  s.adam.decoupled = h.decoupled;
  s.adam.amsgrad = h.amsgrad;

  s.lamb.beta1 = h.beta1;
  s.lamb.one_minus_beta1 = 1.0 - h.beta1;
  s.lamb.beta2 = h.beta2;
  s.lamb.one_minus_beta2 = 1.0 - h.beta2;
  s.lamb.eps = h.eps;
  s.lamb.inverse_bias_correction1 = 1.0 / bias_correction1;
  s.lamb.inverse_bias_correction2 = 1.0 / bias_correction2;
  s.lamb.weight_decay = h.weight_decay;
}

// LAMB's trust ratio from the sums of squares of parameter and direction.
FUSEDPG_HOST_DEVICE double trust_ratio(
    const Hyper& h,
    double param,
    double direction) {
  if ((h.weight_decay == 0 && !h.always_adapt) || !(param > 0) ||
      !(direction > 0)) {
    return 1.0;
  }
  const double ratio = square_root(param) / square_root(direction);
  return h.trust_clip && ratio > 1.0 ? 1.0 : ratio;
}

} // namespace fusedpg::kernels
