#include "collectives/net_exchange.hpp"

#include <algorithm>
#include <cstring>
#include <deque>

#include "collectives/selector.hpp"

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

void net_gather(
    NetContext& ctx,
    const NetBuffer& mine,
    const std::vector<NetBuffer>& ins) {
  const int rank = ctx.transport.rank();
  const int size = ctx.transport.size();
  if (select_net_path(ctx.ranks_share_hosts) == NetPath::kDirect) {
    net_exchange(ctx, std::vector<NetBuffer>(size, mine), ins);
    return;
  }
  std::vector<NetBuffer> blocks = ins;
  blocks[rank] = mine;
  for (int k = 0; k + 1 < size; ++k) {
    std::vector<NetBuffer> out(size), in(size);
    out[(rank + 1) % size] = blocks[(rank + size - k) % size];
    in[(rank + size - 1) % size] = blocks[(rank + 2 * size - k - 1) % size];
    net_exchange(ctx, out, in);
  }
}

NetBuffer net_fold(
    NetContext& ctx,
    const std::vector<NetBuffer>& blocks,
    DType type) {
  const int rank = ctx.transport.rank();
  const int last = ctx.transport.size() - 1;
  const size_t element = dtype_size(type);
  kernels::ReduceArgs args;
  args.dtype = type;

  struct Segment {
    int owner;
    NetBuffer mine;
  };
  std::vector<Segment> segments;
  for (int owner = 0; owner <= last; ++owner) {
    for (size_t s = 0; s * kNetSegment < blocks[owner].bytes(); ++s) {
      segments.push_back({owner, segment(blocks[owner], s)});
    }
  }
  NetBuffer result = blocks[rank];
  std::vector<NetPending> results;
  if (rank != last) {
    result = NetBuffer(blocks[rank].bytes());
    for (size_t s = 0; s * kNetSegment < result.bytes(); ++s) {
      const NetBuffer part = segment(result, s);
      results.push_back(net_receive(ctx, last, NetKind::kResult, part));
    }
  }
  std::deque<NetPending> sums; // of the ranks before, one a segment
  std::deque<NetPending> sends;
  size_t posted = 0;
  for (size_t s = 0; s < segments.size(); ++s) {
    const Segment& one = segments[s];
    for (; rank != 0 && posted < std::min(s + kNetWindow, segments.size());
         ++posted) {
      const NetBuffer sum(segments[posted].mine.bytes());
      sums.push_back(net_receive(ctx, rank - 1, NetKind::kPartialSum, sum));
    }
    if (rank != 0) {
      sums.front().request->wait(ctx.deadline);
      const void* srcs[] = {sums.front().buffer.data(), one.mine.data()};
      void* dst = one.mine.data();
      ctx.kernels.reduce(
          args, &dst, 1, srcs, 2, one.mine.bytes() / element, false);
      sums.pop_front();
    }
    if (rank != last) {
      sends.push_back(net_send(ctx, rank + 1, NetKind::kPartialSum, one.mine));
    } else if (one.owner != last) {
      sends.push_back(net_send(ctx, one.owner, NetKind::kResult, one.mine));
    }
    while (sends.size() > kNetWindow) {
      sends.front().request->wait(ctx.deadline);
      sends.pop_front();
    }
  }
  for (NetPending& one : sends) {
    one.request->wait(ctx.deadline);
  }
  for (NetPending& one : results) {
    one.request->wait(ctx.deadline);
  }
  return result;
}

} // namespace fusedpg
