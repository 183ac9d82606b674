#pragma once

#include "kernels/formulas/hyper.hpp"

namespace fusedpg::kernels {

// A rule maps parameter, gradient and state of one element to the loop's
// output: the new parameter, or for LambMoments the direction.

template <typename C, bool has_momentum, bool nesterov>
struct SgdRule {
  using Value = C;
  static constexpr size_t kStates = has_momentum ? 1 : 0;
  static constexpr bool kFirstHalf = true;
  SgdScalars<C> a;
  FUSEDPG_HOST_DEVICE explicit SgdRule(const StepScalars& args)
      : a{static_cast<C>(args.sgd.lr),
          static_cast<C>(args.sgd.weight_decay),
          static_cast<C>(args.sgd.momentum),
          static_cast<C>(args.sgd.one_minus_dampening),
          args.sgd.nesterov,
          args.sgd.first_step} {}
  FUSEDPG_HOST_DEVICE C step(C param, C grad, C* s) const {
    SgdState<C> state{param, s[0]};
    sgd<has_momentum, nesterov>(a, grad, state);
    s[0] = state.momentum_buffer;
    return state.param;
  }
};

template <typename C, bool decoupled, bool amsgrad>
struct AdamRule {
  using Value = C;
  static constexpr size_t kStates = amsgrad ? 3 : 2;
  static constexpr bool kFirstHalf = true;
  AdamScalars<C> a;
  FUSEDPG_HOST_DEVICE explicit AdamRule(const StepScalars& args)
      : a{static_cast<C>(args.adam.decay),
          static_cast<C>(args.adam.l2),
          static_cast<C>(args.adam.beta1),
          static_cast<C>(args.adam.one_minus_beta1),
          static_cast<C>(args.adam.beta2),
          static_cast<C>(args.adam.one_minus_beta2),
          static_cast<C>(args.adam.eps),
          static_cast<C>(args.adam.step_size),
          static_cast<C>(args.adam.bias_correction2_sqrt),
          args.adam.decoupled,
          args.adam.amsgrad} {}
  FUSEDPG_HOST_DEVICE C step(C param, C grad, C* s) const {
    AdamState<C> state{param, s[0], s[1], s[2]};
    adam<decoupled, amsgrad>(a, grad, state);
    s[0] = state.exp_avg;
    s[1] = state.exp_avg_sq;
    s[2] = state.max_exp_avg_sq;
    return state.param;
  }
};

template <typename C, bool first_half>
struct LambRule {
  using Value = C;
  static constexpr size_t kStates = 2;
  static constexpr bool kFirstHalf = first_half;
  LambScalars<C> a;
  FUSEDPG_HOST_DEVICE explicit LambRule(const StepScalars& args)
      : a{static_cast<C>(args.lamb.beta1),
          static_cast<C>(args.lamb.one_minus_beta1),
          static_cast<C>(args.lamb.beta2),
          static_cast<C>(args.lamb.one_minus_beta2),
          static_cast<C>(args.lamb.eps),
          static_cast<C>(args.lamb.inverse_bias_correction1),
          static_cast<C>(args.lamb.inverse_bias_correction2),
          static_cast<C>(args.lamb.weight_decay),
          static_cast<C>(args.lamb.step_size)} {}
  FUSEDPG_HOST_DEVICE C step(C param, C grad, C* s) const {
    LambState<C> state{s[0], s[1]};
    if constexpr (!first_half) {
      return lamb_step(a, param, state);
    }
    lamb_moments(a, grad, state);
    s[0] = state.exp_avg;
    s[1] = state.exp_avg_sq;
    return lamb_direction(a, param, state);
  }
};

template <typename Rule>
struct RuleTag {
  using Type = Rule;
};

// Calls `call` with the RuleTag of the rule for an update. `options`: the formula,
// and those of its options that the compiler sees as types. LAMB's rule is that
// of its second half.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable // a host's call is not meant for the device
#endif
template <typename C, typename Options, typename Call>
FUSEDPG_HOST_DEVICE auto with_rule(const Options& options, Call&& call) {
  switch (options.formula) {
    case Formula::kSgd:
      if (!options.momentum) {
        return call(RuleTag<SgdRule<C, false, false>>());
      }
      return options.nesterov ? call(RuleTag<SgdRule<C, true, true>>())
                              : call(RuleTag<SgdRule<C, true, false>>());
    case Formula::kAdam:
      if (options.decoupled) {
        return options.amsgrad ? call(RuleTag<AdamRule<C, true, true>>())
                               : call(RuleTag<AdamRule<C, true, false>>());
      }
      return options.amsgrad ? call(RuleTag<AdamRule<C, false, true>>())
                             : call(RuleTag<AdamRule<C, false, false>>());
    case Formula::kLamb:
      break;
  }
  return call(RuleTag<LambRule<C, false>>());
}

} // namespace fusedpg::kernels
