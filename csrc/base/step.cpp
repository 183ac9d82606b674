#include "base/step.hpp"

#include "base/hash.hpp"

namespace fusedpg {

uint64_t hyper_hash(const StepHyper& h) {
  Hash hash;
  for (const double value :
       {h.lr,
        h.beta1,
        h.beta2,
        h.eps,
        h.weight_decay,
        h.momentum,
        h.dampening}) {
    hash.add(value);
  }
  for (const bool value :
       {h.nesterov,
        h.first_step,
        h.decoupled,
        h.amsgrad,
        h.maximize,
        h.trust_clip,
        h.always_adapt}) {
    hash.add(uint64_t(value));
  }
  return hash.value();
}

} // namespace fusedpg
