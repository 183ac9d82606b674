#pragma once

#include <cstdint>

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
constexpr int kOpCodes = 18;

// Where the data of an operation on GPUs go: through NCCL's collectives, its
// patched ring, or the arenas.
enum class GpuPath : uint8_t { kNone, kStock, kRing, kDirect };
const char* gpu_path_name(GpuPath path);

// torch.distributed's name: "all_reduce".
const char* op_name(OpCode op);

} // namespace fusedpg
