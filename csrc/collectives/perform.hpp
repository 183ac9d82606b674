#pragma once

#include "base/call.hpp"
#include "collectives/way.hpp"

namespace fusedpg {

// Carries out an operation: this rank has its results, and peers no longer need
// its inputs, when it returns. Returns whether it has been done: a fused program
// is not where a rank has no function, and then nothing has been written on any.
// Throws Error; kMismatch and kInvalid leave the group usable, everything else
// means that it has failed.
//
// Reductions are left folds in rank order, so every rank gets the same bits
// (docs/reference/numerics.md); bytes and steps of each are in
// docs/develop/algorithms.md.
bool perform(Way& way, const Call& call);

} // namespace fusedpg
