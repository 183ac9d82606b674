#pragma once

#include <vector>

#include "collectives/context.hpp"
#include "collectives/selector.hpp"
#include "host/pool.hpp"
#include "kernels/kernels.hpp"

// Which blocks of this rank's tensors hold anything. A block is present if any
// bit of it is set; where it is not, the rank adds +0.0.
namespace fusedpg {

// SUM and AVG of what is added: fp64, fp32, half types, int32 and int64.
bool can_skip(const kernels::ReduceArgs& args);
// Throws Error(kInvalid) naming `op` if not.
void check_can_skip(OpCode op, const kernels::ReduceArgs& args);

// What select_skip() chooses by, for tensors of this shape.
SkipConfig skip_config(
    const SkipState& state,
    int world_size,
    const OpDescriptor& d,
    const kernels::ReduceArgs& args);

// Bit b % 64 of bits[b / 64] for block b. Where a sample of many blocks holds
// no zeros, all count as present. With a threshold or a bitmap, blocks that are
// not present are zeros afterwards.
void find_blocks(
    const kernels::Table& kernels,
    Pool& pool,
    const Buffer& tensor,
    DType dtype,
    const SkipOptions& options,
    uint64_t* bits);

// Some blocks of this rank, as words that ranks compare, and what all ranks'
// words say: the share of blocks that any rank has.
std::vector<uint64_t> sample_blocks(
    const kernels::Table& kernels,
    Buffers tensors,
    DType dtype,
    size_t block);
double sampled_density(const std::vector<const uint64_t*>& samples);

// A source for ranks that do not have a block.
constexpr size_t kZeroBytes = size_t(16) << 10;
extern const char kZeros[kZeroBytes];

} // namespace fusedpg
