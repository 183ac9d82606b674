#pragma once

#include <vector>

#include "collectives/collectives.hpp"
#include "collectives/way.hpp"

// What the collectives that only reduce have in common.
namespace fusedpg {

// The call of an operation. Throws Error(kInvalid) when the engine cannot reduce
// this dtype with this op.
SumCall sum_call(
    OpCode op,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args);

// The facts, and what the NaN check says.
OpDescriptor describe_sum(
    const OpContext& ctx,
    const SumCall& call,
    const std::vector<ReduceTensor>& tensors);

// The epilogue that stores the plain reduction.
Plan::Epilogue reduction_epilogue(
    const kernels::Table& kernels,
    const kernels::ReduceArgs& args);

// A plan that reduces tensors where they lie.
Plan in_place(
    const kernels::Table& kernels,
    int world_size,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args);

} // namespace fusedpg
