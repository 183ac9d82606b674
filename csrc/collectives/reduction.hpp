#pragma once

#include "collectives/plan.hpp"
#include "collectives/way.hpp"

// The collectives that only reduce.
namespace fusedpg {

void all_reduce(Way& way, const Call& call);
// Skips blocks of zeros. The result is that of all_reduce(), bit for bit but
// for NaN payloads. Throws Error(kInvalid) when !can_skip(), or for a threshold
// with several tensors.
void sparse_all_reduce(Way& way, const Call& call);
void reduce(Way& way, const Call& call);
void reduce_scatter(Way& way, const Call& call);

// --- what they are made of ---------------------------------------------------

// Throws Error(kInvalid) when the engine cannot reduce this dtype with this op.
void check_reduction(OpCode op, DType dtype, RedOp red_op);

// The epilogue that stores the plain reduction.
Plan::Epilogue reduction_epilogue(
    const kernels::Table& kernels,
    const kernels::ReduceArgs& args);

// A plan that reduces tensors where they lie.
Plan in_place(
    const kernels::Table& kernels,
    int world_size,
    Buffers tensors,
    const kernels::ReduceArgs& args);

} // namespace fusedpg
