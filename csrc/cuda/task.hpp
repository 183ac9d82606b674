#pragma once

#include <string>
#include <vector>

#include "base/step.hpp"
#include "cuda/launch.hpp"

namespace fusedpg::cuda {

// What both kinds of operation are, to the wire.
struct Task {
  OpCode op = OpCode::kNone;
  std::vector<TensorInfo> tensors;
  std::vector<size_t> counts;
  DType grad_type = DType::kFloat32;
  DType param_type = DType::kFloat32;
  GradReduction reduction;
  bool reduces = true; // gradients are still to be reduced
  bool updates = true;
  uint8_t* used = nullptr;
  float* found_inf = nullptr;
  uint64_t hash = 0; // of what must be the same on all ranks
  const StepCall* step = nullptr; // null: reduce_shards

  Task(const StepCall& call, int world_size);
  Task(const ShardsCall& call, int world_size);
  // For messages: "fused_adamw_ of 3 tensors, ..."
  std::string summary() const;
};

} // namespace fusedpg::cuda
