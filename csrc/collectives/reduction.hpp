#pragma once

#include <vector>

#include "collectives/collectives.hpp"
#include "collectives/way.hpp"

// What the collectives that only reduce have in common.
namespace fusedpg {

// Throws Error(kInvalid) when the engine cannot reduce this dtype with this op.
OpDescriptor reduction_descriptor(OpCode op, const kernels::ReduceArgs& args);

// Of the tensors' sizes.
uint64_t shape_hash(const std::vector<ReduceTensor>& tensors);

// Fills in counts and hashes, and runs the NaN check.
void describe_tensors(
    Way& way,
    OpDescriptor& d,
    const std::vector<ReduceTensor>& tensors);

// The epilogue that stores the plain reduction.
Plan::Epilogue reduction_epilogue(
    const kernels::Table& kernels,
    const kernels::ReduceArgs& args);

// A plan that reduces tensors where they lie.
Plan in_place(
    Way& way,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args);

} // namespace fusedpg
