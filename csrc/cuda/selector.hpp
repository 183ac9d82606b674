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
  int world_size = 1;
  bool wide_half_sums = true; // Settings::wide_half_sums
};
GpuPath select_step_path(const StepConfig& config);

// Whether owners get all ranks' gradients and add them, where NCCL's
// reduce-scatter would round each sum to a half type: as many bytes, no rounding
// before the update and no overflow, and the CPU's bits.
bool select_folds(const StepConfig& config, GpuPath path);

// Whether headers lie behind the gradients of the first chunk, so that they cost
// no collective; else ranks gather them first.
bool select_rides(const StepConfig& config, GpuPath path, bool weighted);

// Elements from which a tensor is a chunk of its own, and not packed. `packs`:
// none can be.
size_t select_whole(const StepConfig& config, GpuPath path, bool packs);

// Bytes that one NCCL call of an operation moves, where the settings do not say.
struct ChunkConfig {
  size_t bytes = 0; // of the operation's tensors, in the wider type
  int world_size = 1;
  bool spans_hosts = false;
};
size_t select_chunk_bytes(const ChunkConfig& config);

} // namespace fusedpg::cuda
