#pragma once

#include <string>
#include <vector>

#include "base/calls.hpp"
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
  OpDescriptor facts; // what must be the same on all ranks
  const StepCall* step = nullptr; // null: reduce_shards

  Task(const StepCall& call, int world_size);
  Task(const ShardsCall& call, int world_size);
  // What messages say besides: ", lr 0.1, ..."
  std::string details() const;
};

} // namespace fusedpg::cuda
