// What operations between machines are made of.

#include "net_wire.hpp"

#include "collectives/net_exchange.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

// Of several segments, of one, and none.
constexpr size_t kBytes[] = {(size_t(5) << 20) + 24, 8, 0, 4096};

NetBuffer block(size_t bytes, uint64_t seed) {
  NetBuffer b(bytes);
  const Bytes from = values(DType::kFloat32, bytes / 4, seed);
  std::copy(from.begin(), from.end(), b.data());
  return b;
}

bool same(const NetBuffer& a, const NetBuffer& b) {
  return a.bytes() == b.bytes() &&
      (a.bytes() == 0 || std::memcmp(a.data(), b.data(), a.bytes()) == 0);
}

size_t bytes_of(int owner) {
  return kBytes[owner % 4];
}

TEST(net_exchange_every_block_arrives) {
  for (const int size : {1, 2, 3, 5}) {
    if (kOnlyThreads && size == 5) {
      continue; // too slow with that sanitizer
    }
    on_wire(size, [&](int rank, NetContext& ctx) {
      for (int turn = 0; turn < 2; ++turn) { // one operation may do several
        std::vector<NetBuffer> outs, ins;
        for (int p = 0; p < size; ++p) {
          outs.push_back(block(bytes_of(p), 100 * turn + 10 * rank + p));
          ins.emplace_back(bytes_of(rank));
        }
        net_exchange(ctx, outs, ins);
        for (int p = 0; p < size; ++p) {
          CHECK(
              p == rank ||
              same(ins[p], block(bytes_of(rank), 100 * turn + 10 * p + rank)));
        }
      }
    });
  }
}

TEST(net_exchange_absent_rank) {
  on_wire(
      3,
      [](int rank, NetContext& ctx) {
        if (rank == 2) {
          return;
        }
        const std::vector<NetBuffer> blocks{
            NetBuffer(64), NetBuffer(64), NetBuffer(64)};
        CHECK_THROWS(
            net_exchange(ctx, blocks, blocks), Error, "no message from rank");
      },
      milliseconds(300));
}

} // namespace
