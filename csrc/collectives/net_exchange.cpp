#include "collectives/net_exchange.hpp"

#include <algorithm>
#include <deque>

namespace fusedpg {
namespace {

constexpr size_t kSegmentBytes = size_t(1) << 20;
constexpr size_t kWindow = 4; // segments

NetBuffer segment(const NetBuffer& whole, size_t s) {
  const size_t begin = std::min(s * kSegmentBytes, whole.bytes());
  return whole.part(begin, std::min(kSegmentBytes, whole.bytes() - begin));
}

} // namespace

void net_exchange(
    NetContext& ctx,
    const std::vector<NetBuffer>& outs,
    const std::vector<NetBuffer>& ins) {
  const int rank = ctx.transport.rank();
  const int size = ctx.transport.size();
  const uint32_t tag = tag_of(ctx, NetKind::kBlock);
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
  for (size_t s = 0; s * kSegmentBytes < most; ++s) {
    finish(kWindow - 1);
    std::vector<NetPending> both;
    for (int k = 1; k < size; ++k) {
      // Everybody begins with another peer.
      const int to = (rank + k) % size;
      const int from = (rank + size - k) % size;
      const NetBuffer in = segment(ins[from], s);
      if (in.bytes() != 0) {
        both.push_back({ctx.transport.receive(from, tag, in), in});
      }
      const NetBuffer out = segment(outs[to], s);
      if (out.bytes() != 0) {
        both.push_back({ctx.transport.send(to, tag, out), out});
      }
    }
    under_way.push_back(std::move(both));
  }
  finish(0);
}

} // namespace fusedpg
