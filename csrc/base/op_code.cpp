#include "base/op_code.hpp"

namespace fusedpg {

const char* op_name(OpCode op) {
  switch (op) {
    case OpCode::kNone:
      return "none";
    case OpCode::kAllReduce:
      return "all_reduce";
    case OpCode::kReduce:
      return "reduce";
    case OpCode::kReduceScatter:
      return "reduce_scatter";
    case OpCode::kAllGather:
      return "all_gather";
    case OpCode::kBroadcast:
      return "broadcast";
    case OpCode::kGather:
      return "gather";
    case OpCode::kScatter:
      return "scatter";
    case OpCode::kAllToAll:
      return "all_to_all";
    case OpCode::kBarrier:
      return "barrier";
    case OpCode::kFusedAdamW:
      return "fused_adamw_";
    case OpCode::kFusedSgd:
      return "fused_sgd_";
    case OpCode::kFusedAdam:
      return "fused_adam_";
    case OpCode::kFusedLamb:
      return "fused_lamb_";
    case OpCode::kShareMemory:
      return "share_memory";
    case OpCode::kSparseAllReduce:
      return "sparse_all_reduce";
    case OpCode::kReduceShards:
      return "reduce_shards";
    case OpCode::kFusedProgram:
      return "fused_program";
  }
  return "unknown";
}

const char* gpu_path_name(GpuPath path) {
  constexpr const char* kNames[] = {"none", "stock", "ring", "direct"};
  return kNames[static_cast<int>(path)];
}

} // namespace fusedpg
