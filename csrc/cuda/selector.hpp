#pragma once

#include <cstddef>

#include "base/dtype.hpp"
#include "base/op_code.hpp"
#include "base/options.hpp"

// The one place that chooses how operations on GPUs are done. What goes in is
// the same on all ranks where they call the same; where it is not, the choice
// is part of what they compare.
namespace fusedpg::cuda {

// Whether steps take the ring of a patched NCCL where they can.
struct RingConfig {
  int world_size = 1;
  bool has_ring = false;
  NcclChoice choice = NcclChoice::kAuto;
  bool spans_hosts = false;
};
bool select_ring(const RingConfig& config);

// The path of a step, or of reduce_shards.
struct StepConfig {
  bool reduces = true; // gradients
  bool updates = true; // parameters
  bool lamb = false;
  DType grad_type = DType::kFloat32;
  DType param_type = DType::kFloat32;
  bool in_arena = false; // whole gradients and parameters
  bool has_direct = false; // the engine has the direct path
  bool has_ring = false; // and takes the ring
  bool generated = false; // the update is a program's
};
GpuPath select_step_path(const StepConfig& config);

// Whether a direct step looks for tiles of zeros.
bool select_step_skip(size_t block, size_t tiles, int world_size);

// Elements from which a tensor is a chunk of its own, and not packed.
size_t select_whole(const StepConfig& config, GpuPath path, bool weighted);

// Bytes that one NCCL call of an operation moves, where the settings do not say.
struct ChunkConfig {
  size_t bytes = 0; // of the operation's tensors, in the wider type
  int world_size = 1;
  bool spans_hosts = false;
};
size_t select_chunk_bytes(const ChunkConfig& config);

// The path of a sum that skips blocks of zeros.
struct SumConfig {
  size_t elements = 0;
  size_t blocks = 0;
  bool in_arena = false;
  bool has_direct = false;
};
GpuPath select_sum_path(const SumConfig& config);

// Whether the blocks that any rank has travel alone; else everything does.
// `limit`: the share of all blocks from which that is so.
bool select_sum_skip(size_t blocks_union, size_t blocks, double limit);
// Not measured: NCCL moves the union as it would move all.
constexpr double kSkipLimit = 0.8;
constexpr double kNoSkipLimit = 2; // more than the share of all

} // namespace fusedpg::cuda
