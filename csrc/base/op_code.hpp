#pragma once

#include <cstdint>
#include <optional>

#include "kernels/formulas/hyper.hpp"

namespace fusedpg {

// Operations as ranks name them to each other. Append, never reorder.
enum class OpCode : uint8_t {
  kNone = 0,
  kAllReduce,
  kReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kGather,
  kScatter,
  kAllToAll,
  kBarrier,
  kFusedAdamW,
  kFusedSgd,
  kFusedAdam,
  kFusedLamb,
  kReduceShards,
  kShareMemory,
  kSparseAllReduce,
  kFusedProgram,
};
constexpr int kOpCodes = static_cast<int>(OpCode::kFusedProgram) + 1;

// The way of the data of an operation on GPUs: through NCCL's collectives, its
// patched ring, or the arenas.
enum class GpuPath : uint8_t { kNone, kStock, kRing, kDirect };
const char* gpu_path_name(GpuPath path);

// torch.distributed's name: "all_reduce".
const char* op_name(OpCode op);
// True if it combines contributions: ranks must then choose the same reduction.
bool reduces(OpCode op);
// True if it only moves data.
bool moves(OpCode op);
// The formula of an optimizer step; nullopt for other operations.
std::optional<kernels::Formula> step_formula(OpCode op);

} // namespace fusedpg
