#pragma once

#include <string>
#include <vector>

#include "base/call.hpp"
#include "base/program_call.hpp"
#include "cuda/launch.hpp"

namespace fusedpg::cuda {

class LoadedProgram;

// What all kinds of operation are, to the wire.
struct Task {
  OpCode op = OpCode::kNone;
  // Of a program: one for each result that is gathered, or one; the
  // contribution is the first one's gradient.
  std::vector<TensorInfo> tensors;
  std::vector<size_t> counts;
  DType grad_type = DType::kFloat32; // on the wire
  bool widens = false; // to that, from a half type
  RedOp red_op = RedOp::kSum;
  DType param_type = DType::kFloat32;
  // What is gathered of each element of a chunk.
  std::vector<DType> results;
  GradReduction reduction;
  bool reduces = true; // gradients are still to be reduced
  bool updates = true;
  uint8_t* used = nullptr;
  float* found_inf = nullptr;
  OpDescriptor facts; // what must be the same on all ranks
  const StepCall* step = nullptr; // null: another operation
  const ProgramCall* program = nullptr; // likewise
  const LoadedProgram* kernel = nullptr; // of it; null: this rank has none

  Task(const StepCall& call, int world_size);
  Task(const ShardsCall& call, int world_size);
  Task(const ProgramCall& call, int world_size);
  // What messages say besides: ", lr 0.1, ..."
  std::string details() const;
};

} // namespace fusedpg::cuda
