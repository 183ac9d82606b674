#pragma once

#include <vector>

#include "collectives/collectives.hpp"
#include "collectives/selector.hpp"
#include "collectives/two_shot.hpp"

// What the collectives that only reduce have in common.
namespace fusedpg {

// Throws Error(kInvalid) when the engine cannot reduce this dtype with this op.
OpDescriptor reduction_descriptor(OpCode op, const kernels::ReduceArgs& args);

// Fills in counts and hashes, and runs the NaN check.
void describe_tensors(
    Context& ctx,
    OpDescriptor& d,
    const std::vector<ReduceTensor>& tensors);

// The epilogue that stores the plain reduction.
Plan::Epilogue identity_epilogue(Context& ctx, const kernels::ReduceArgs& args);

// What a run of the plan, as its lanes are, moves between ranks.
OpStats lane_stats(const Plan& plan, Context& ctx);
// After enter().
DataPath data_path(const Path& path);

// A plan that reduces tensors where they lie.
Plan in_place(
    Context& ctx,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args);

} // namespace fusedpg
