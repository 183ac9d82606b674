#pragma once

#include <vector>

#include "base/options.hpp"
#include "collectives/collectives.hpp"
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

struct SkipOptions {
  size_t block = kBlockSize; // elements; larger for tensors of many millions
  // Blocks without an element of a larger magnitude are not sent but left in
  // `residual`, which is added to the tensor first: a tensor of its size and
  // type. 0: none. One tensor a call.
  double threshold = 0;
  void* residual = nullptr;
  // The caller's choice: a byte for each block of `bitmap_block` elements, 0 for
  // one that counts as zeros whatever it holds. nullptr: look at the elements.
  // One tensor a call, and no threshold.
  const uint8_t* bitmap = nullptr;
  size_t bitmap_block = 0; // `block` is a multiple of it
};

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
    const ReduceTensor& tensor,
    DType dtype,
    const SkipOptions& options,
    uint64_t* bits);

// Some blocks of this rank, as words that ranks compare, and what all ranks'
// words say: the share of blocks that any rank has.
std::vector<uint64_t> sample_blocks(
    const kernels::Table& kernels,
    const std::vector<ReduceTensor>& tensors,
    DType dtype,
    size_t block);
double sampled_density(const std::vector<const uint64_t*>& samples);

// A source for ranks that do not have a block.
constexpr size_t kZeroBytes = size_t(16) << 10;
extern const char kZeros[kZeroBytes];

} // namespace fusedpg
