#include "collectives/net_exchange.hpp"

#include <algorithm>
#include <cstring>
#include <deque>

namespace fusedpg {
namespace {

NetBuffer segment(const NetBuffer& whole, size_t s) {
  const size_t begin = std::min(s * kNetSegment, whole.bytes());
  return whole.part(begin, std::min(kNetSegment, whole.bytes() - begin));
}

} // namespace

NetPending net_send(
    NetContext& ctx,
    int to,
    NetKind kind,
    const NetBuffer& message) {
  ctx.moved.bytes_sent += message.bytes();
  ++ctx.moved.messages_sent;
  ctx.entered = true;
  return {ctx.transport.send(to, tag_of(ctx, kind), message), message};
}

NetPending net_receive(
    NetContext& ctx,
    int from,
    NetKind kind,
    const NetBuffer& into) {
  ctx.moved.bytes_received += into.bytes();
  return {ctx.transport.receive(from, tag_of(ctx, kind), into), into};
}

void net_exchange(
    NetContext& ctx,
    const std::vector<NetBuffer>& outs,
    const std::vector<NetBuffer>& ins) {
  const int rank = ctx.transport.rank();
  const int size = ctx.transport.size();
  size_t most = 0;
  for (int p = 0; p < size; ++p) {
    if (p != rank) {
      most = std::max({most, outs[p].bytes(), ins[p].bytes()});
    }
  }
  std::deque<std::vector<NetPending>> under_way; // by segment
  const auto finish = [&](size_t left) {
    while (under_way.size() > left) {
      for (NetPending& one : under_way.front()) {
        one.request->wait(ctx.deadline);
      }
      under_way.pop_front();
    }
  };
  for (size_t s = 0; s * kNetSegment < most; ++s) {
    finish(kNetWindow - 1);
    std::vector<NetPending> both;
    for (int k = 1; k < size; ++k) {
      // Everybody begins with another peer.
      const int to = (rank + k) % size;
      const int from = (rank + size - k) % size;
      const NetBuffer in = segment(ins[from], s);
      if (in.bytes() != 0) {
        both.push_back(net_receive(ctx, from, NetKind::kBlock, in));
      }
      const NetBuffer out = segment(outs[to], s);
      if (out.bytes() != 0) {
        both.push_back(net_send(ctx, to, NetKind::kBlock, out));
      }
    }
    under_way.push_back(std::move(both));
  }
  finish(0);
}

std::vector<NetBuffer> net_gather_rows(
    NetContext& ctx,
    const void* mine,
    size_t bytes) {
  const auto size = static_cast<size_t>(ctx.transport.size());
  std::vector<NetBuffer> rows;
  for (size_t p = 0; p < size; ++p) {
    rows.emplace_back(bytes);
  }
  const NetBuffer& own = rows[ctx.transport.rank()];
  std::memcpy(own.data(), mine, bytes);
  net_exchange(ctx, std::vector<NetBuffer>(size, own), rows);
  return rows;
}

} // namespace fusedpg
