#include "collectives/perform.hpp"

#include <stdexcept>

#include "collectives/fused_program.hpp"
#include "collectives/fused_step.hpp"
#include "collectives/move.hpp"
#include "collectives/reduction.hpp"

namespace fusedpg {
namespace {

std::vector<Span> spans(Buffers buffers, DType dtype) {
  std::vector<Span> all;
  all.reserve(buffers.size());
  for (const Buffer& b : buffers) {
    all.push_back({b.data, b.count * dtype_size(dtype)});
  }
  return all;
}

// Which bytes go to which ranks, of an operation that does nothing else.
Move move_of(const Call& call, int rank, int size) {
  Move move;
  move.shared = call.op == OpCode::kAllGather || call.op == OpCode::kBroadcast;
  move.sends = spans(call.inputs, call.dtype);
  move.recvs = spans(call.outputs, call.dtype);
  switch (call.op) {
    case OpCode::kBroadcast:
      move.recvs.resize(size);
      // The root too, which then copies nothing.
      if (call.root >= 0 && call.root < size) {
        move.recvs[call.root] = move.sends[0];
      }
      if (rank != call.root) {
        move.sends[0] = {};
      }
      break;
    case OpCode::kGather:
      move.sends.resize(size);
      std::swap(move.sends[0], move.sends[call.root]);
      move.recvs.resize(size);
      break;
    case OpCode::kScatter:
      move.sends.resize(size);
      move.recvs.resize(size);
      std::swap(move.recvs[0], move.recvs[call.root]);
      break;
    default:
      break;
  }
  return move;
}

void move_data(Way& way, const Call& call) {
  OpDescriptor d = facts(call);
  if (call.op != OpCode::kBroadcast || way.rank() == call.root) {
    check_nan(way.op(), d, call.inputs);
  }
  way.move(move_of(call, way.rank(), way.size()), d);
}

void all_reduce_each(Way& way, const Call& call) {
  // Each tensor is an operation here, so ranks must know how many there are.
  const uint64_t first = way.op().list_index;
  const size_t num = call.inputs.size();
  const uint64_t length = std::max<uint64_t>(way.op().list_length, num);
  for (size_t i = 0; i < num; ++i) {
    Call one = call;
    one.inputs = call.inputs.subspan(i, 1);
    way.begin_item(first + i, length);
    all_reduce(way, one);
  }
}

} // namespace

bool perform(Way& way, const Call& call) {
  switch (call.op) {
    case OpCode::kAllReduce:
      if (call.inputs.size() > 1 && !way.joins_tensors()) {
        all_reduce_each(way, call);
      } else {
        all_reduce(way, call);
      }
      return true;
    case OpCode::kSparseAllReduce:
      sparse_all_reduce(way, call);
      return true;
    case OpCode::kReduce:
      reduce(way, call);
      return true;
    case OpCode::kReduceScatter:
      reduce_scatter(way, call);
      return true;
    case OpCode::kBarrier: {
      OpDescriptor d = facts(call);
      way.enter(nullptr, d, {});
      return true;
    }
    case OpCode::kReduceShards:
      reduce_shards(way, *std::get<const ShardsCall*>(call.fused));
      return true;
    case OpCode::kFusedProgram:
      return fused_program(way, *std::get<const ProgramCall*>(call.fused));
    default:
      if (step_formula(call.op)) {
        fused_step(way, *std::get<const StepCall*>(call.fused));
        return true;
      }
      if (!moves(call.op)) {
        throw std::logic_error(
            formatted("fused: perform() does not know {}", op_name(call.op)));
      }
      move_data(way, call);
      return true;
  }
}

} // namespace fusedpg
