#pragma once

#include "base/stats.hpp"
#include "collectives/find_blocks.hpp"
#include "collectives/net_exchange.hpp"

// The all-reduce that skips blocks of zeros, between machines: every rank sends
// the blocks it has to their owners; owners add them in rank order and send the
// union to everybody. Bitmaps go first, so everybody knows the length of every
// message before it comes, and nobody waits for a rank that has nothing.
namespace fusedpg {

// In place. What it moved is added to ctx.moved.
void net_sparse_all_reduce(
    NetContext& ctx,
    const ReduceTensor& tensor,
    const kernels::ReduceArgs& args,
    const SparseOptions& options);

// Without the way back: only this rank's shard_range of the tensor is reduced.
void net_sparse_reduce_scatter(
    NetContext& ctx,
    const ReduceTensor& tensor,
    const kernels::ReduceArgs& args,
    const SparseOptions& options);

// Of the share of blocks that any rank has, by a sample: see sample_blocks().
double net_sampled_density(
    NetContext& ctx,
    const ReduceTensor& tensor,
    DType dtype,
    size_t block);

} // namespace fusedpg
