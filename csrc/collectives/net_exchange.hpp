#pragma once

#include <vector>

#include "base/op_code.hpp"
#include "host/pool.hpp"
#include "kernels/kernels.hpp"
#include "net/transport.hpp"

// What operations between machines work with.
namespace fusedpg {

struct NetContext {
  Transport& transport;
  const kernels::Table& kernels;
  Pool& pool;
  Deadline deadline;
  uint64_t sequence;
  OpCode op = OpCode::kSparseAllReduce; // for messages
};

// Kinds of messages; each is a stream of its own between two ranks.
enum class NetKind : uint32_t {
  kHead,
  kBitmap,
  kContribution,
  kUnion,
  kResult,
  kSample,
  kBlock,
  kKinds
};

// Nothing of an operation that failed half-way meets the next one.
inline uint32_t tag_of(const NetContext& ctx, NetKind kind) {
  return static_cast<uint32_t>(ctx.sequence % (1u << 24)) *
      static_cast<uint32_t>(NetKind::kKinds) +
      static_cast<uint32_t>(kind);
}

struct NetPending {
  Transport::RequestPtr request; // null: nothing is under way
  NetBuffer buffer;
};

// Sends outs[p] to every other rank p and fills ins[p] with what it sends here,
// which is as long as it expects. Buffers may be one and the same. In messages
// of a limited size, some under way at a time: with one large message each way
// a link often works in one direction after the other.
void net_exchange(
    NetContext& ctx,
    const std::vector<NetBuffer>& outs,
    const std::vector<NetBuffer>& ins);

} // namespace fusedpg
