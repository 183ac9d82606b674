#pragma once

#include <vector>

#include "base/host_map.hpp"
#include "collectives/context.hpp"
#include "net/transport.hpp"

// What operations between machines work with.
namespace fusedpg {

namespace aggregate {
class Client;
}
struct AggregateState;

struct NetContext : OpContext {
  Transport& transport;
  // In which sums are taken; a rank may be said to be a host of its own.
  const HostMap* hosts;
  Domain* domain = nullptr; // of this host's ranks, if it has several
  OpStats moved{}; // what this rank has sent and received so far
  NetBuffers* buffers = nullptr; // of the operations of a group
  aggregate::Client* aggregators = nullptr; // if the group has some
  bool aggregated = false; // this operation
  AggregateState* aggregate = nullptr; // null: aggregators are always used
};

// Kinds of messages; each is a stream of its own between two ranks.
enum class NetKind : uint32_t {
  kBitmap,
  kContribution,
  kUnion,
  kResult,
  kBlock,
  kTable,
  kMove,
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

// Counted in ctx.moved.
NetPending net_send(
    NetContext& ctx,
    int to,
    NetKind kind,
    const NetBuffer& message);
NetPending net_receive(
    NetContext& ctx,
    int from,
    NetKind kind,
    const NetBuffer& into);

// What a message says of a lane between two ranks: enough to keep a link busy,
// little enough that links work at the same time as the reduction.
constexpr size_t kNetSegment = size_t(1) << 20; // bytes
// Segments that may be under way.
constexpr size_t kNetWindow = 4;

// Sends outs[p] to every other rank p and fills ins[p] with what it sends here,
// which is as long as it expects. Buffers may be one and the same. In messages
// of a limited size, some under way at a time: with one large message each way
// a link often works in one direction after the other.
void net_exchange(
    NetContext& ctx,
    const std::vector<NetBuffer>& outs,
    const std::vector<NetBuffer>& ins);

// What all ranks have of this, by rank.
std::vector<NetBuffer> net_gather_rows(
    NetContext& ctx,
    const void* mine,
    size_t bytes);

} // namespace fusedpg
