#pragma once

#include <vector>

#include "base/hash.hpp"
#include "base/step.hpp"
#include "collectives/context.hpp"
#include "collectives/two_shot.hpp"

// Optimizer steps as one collective: reduce-scatter of the gradients, update of
// the owned slices, all-gather of the parameters; and its first third alone,
// for callers that decide something about the reduced gradients in between.
//
// Every tensor is cut by the ownership map (base/ownership.hpp), by itself, so
// that who owns what depends on neither the list nor its order.
namespace fusedpg {

// Counters are incremented unless a rank found an infinity.
void fused_step(Context& ctx, const StepCall& call);

// The scalars of one update of `tensor`, on a group of this size.
kernels::UpdateArgs update_args(
    const StepCall& call,
    const StepTensor& tensor,
    int world_size);

using kernels::trust_ratio;

// Of what a call's tensors are. Ranks must have the same, and that of the
// scalars too, or replicas drift apart silently.
Hash shape_hash(const StepCall& call);
uint64_t value_hash(const StepCall& call);

void reduce_shards(Context& ctx, const ShardsCall& call);

// Of a weighted mean, by rank. Zeros if their sum is not positive.
void divide_by_sum(std::vector<double>& weights);

// What owners do with the ranks' gradients. `weights` must outlive the result.
kernels::ReduceArgs shards_reduction(
    const ShardsCall& call,
    const std::vector<double>& weights,
    int world_size);

// --- shared by the files of this family --------------------------------------

// Publishes `used` with the operation and takes what nobody used out of it;
// returns the weights of a weighted mean, by rank, or nothing.
std::vector<double> begin_reduction(
    Context& ctx,
    TwoShot& plan,
    OpDescriptor& d,
    const GradReduction& reduction,
    uint8_t* used);

} // namespace fusedpg
