#include "base/op_code.hpp"

#include <cstddef>
#include <iterator>

namespace fusedpg {

namespace {

using kernels::Formula;

enum class OpKind { kOther, kMoves, kReduces };

struct Row {
  OpCode op;
  const char* name;
  OpKind kind = OpKind::kOther;
  std::optional<Formula> formula = std::nullopt;
};

constexpr Row step(OpCode op, const char* name, Formula formula) {
  return {op, name, OpKind::kOther, formula};
}

constexpr Row kRows[] = {
    {OpCode::kNone, "none"},
    {OpCode::kAllReduce, "all_reduce", OpKind::kReduces},
    {OpCode::kReduce, "reduce", OpKind::kReduces},
    {OpCode::kReduceScatter, "reduce_scatter", OpKind::kReduces},
    {OpCode::kAllGather, "all_gather", OpKind::kMoves},
    {OpCode::kBroadcast, "broadcast", OpKind::kMoves},
    {OpCode::kGather, "gather", OpKind::kMoves},
    {OpCode::kScatter, "scatter", OpKind::kMoves},
    {OpCode::kAllToAll, "all_to_all", OpKind::kMoves},
    {OpCode::kBarrier, "barrier"},
    step(OpCode::kFusedAdamW, "fused_adamw_", Formula::kAdam),
    step(OpCode::kFusedSgd, "fused_sgd_", Formula::kSgd),
    step(OpCode::kFusedAdam, "fused_adam_", Formula::kAdam),
    step(OpCode::kFusedLamb, "fused_lamb_", Formula::kLamb),
    {OpCode::kReduceShards, "reduce_shards"},
    {OpCode::kShareMemory, "share_memory"},
    {OpCode::kSparseAllReduce, "sparse_all_reduce", OpKind::kReduces},
    {OpCode::kFusedProgram, "fused_program", OpKind::kReduces},
};

constexpr bool each_in_its_row() {
  for (size_t i = 0; i < std::size(kRows); ++i) {
    if (static_cast<size_t>(kRows[i].op) != i) {
      return false;
    }
  }
  return std::size(kRows) == kOpCodes;
}
static_assert(each_in_its_row());

// Another rank may have sent a number that is no operation.
Row row(OpCode op) {
  const auto i = static_cast<size_t>(op);
  return i < std::size(kRows) ? kRows[i] : Row{op, "unknown"};
}

} // namespace

const char* op_name(OpCode op) {
  return row(op).name;
}

bool reduces(OpCode op) {
  return row(op).kind == OpKind::kReduces;
}

bool moves(OpCode op) {
  return row(op).kind == OpKind::kMoves;
}

std::optional<Formula> step_formula(OpCode op) {
  return row(op).formula;
}

const char* gpu_path_name(GpuPath path) {
  constexpr const char* kNames[] = {"none", "stock", "ring", "direct"};
  return kNames[static_cast<int>(path)];
}

} // namespace fusedpg
