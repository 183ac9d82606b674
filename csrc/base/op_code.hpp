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
};
constexpr int kOpCodes = 17;

// torch.distributed's name: "all_reduce".
const char* op_name(OpCode op);

} // namespace fusedpg
