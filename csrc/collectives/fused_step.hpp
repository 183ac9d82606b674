#pragma once

#include <vector>

#include "base/call.hpp"
#include "base/hash.hpp"
#include "collectives/way.hpp"

// Optimizer steps as one collective: reduce-scatter of the gradients, update of
// the owned slices, all-gather of the parameters; and its first third alone,
// for callers that decide something about the reduced gradients in between.
//
// Every tensor is cut by the ownership map (base/ownership.hpp), by itself, so
// that who owns what depends on neither the list nor its order.
namespace fusedpg {

// Counters are incremented unless a rank found an infinity.
void fused_step(Way& way, const StepCall& call);

// The scalars of one update of `tensor`, on a group of this size.
kernels::UpdateArgs update_args(
    const StepCall& call,
    const StepTensor& tensor,
    int world_size);

using kernels::trust_ratio;

void reduce_shards(Way& way, const ShardsCall& call);

// --- shared by the files of this family --------------------------------------

// Enters the plan, with `used`, and takes what nobody used out of it; leaves
// the weights of a weighted mean in the plan.
void begin_reduction(
    Way& way,
    Plan& plan,
    OpDescriptor& d,
    const GradReduction& reduction,
    uint8_t* used);

} // namespace fusedpg
