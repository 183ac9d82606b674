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

TEST(net_gather_gives_everybody_every_block) {
  for (const bool shared : {false, true}) {
    for (const int size : {1, 2, 3, 5}) {
      on_wire(size, [&](int rank, NetContext& ctx) {
        ctx.ranks_share_hosts = shared;
        std::vector<NetBuffer> ins;
        for (int p = 0; p < size; ++p) {
          ins.emplace_back(bytes_of(p));
        }
        net_gather(ctx, block(bytes_of(rank), 7 + rank), ins);
        for (int p = 0; p < size; ++p) {
          CHECK(p == rank || same(ins[p], block(bytes_of(p), 7 + p)));
        }
      });
    }
  }
}

// Bit by bit, which tells the order of additions.
TEST(net_fold_is_a_left_fold) {
  for (const DType type : {DType::kFloat32, DType::kFloat64}) {
    for (const int size : {1, 2, 3, 5}) {
      const auto contribution = [&](int rank, int owner) {
        return values(
            type, bytes_of(owner) / dtype_size(type), 1 + 10 * rank + owner);
      };
      on_wire(size, [&](int rank, NetContext& ctx) {
        std::vector<NetBuffer> blocks;
        for (int owner = 0; owner < size; ++owner) {
          const Bytes from = contribution(rank, owner);
          blocks.emplace_back(from.size());
          std::copy(from.begin(), from.end(), blocks[owner].data());
        }
        const NetBuffer sum = net_fold(ctx, blocks, type);
        std::vector<Bytes> all;
        std::vector<const void*> srcs;
        for (int p = 0; p < size; ++p) {
          all.push_back(contribution(p, rank));
          srcs.push_back(all.back().data());
        }
        const Bytes wanted =
            reference(sum_of(type), srcs, bytes_of(rank) / dtype_size(type));
        if (CHECK_EQ(sum.bytes(), wanted.size())) {
          CHECK(
              sum.bytes() == 0 ||
              std::memcmp(sum.data(), wanted.data(), sum.bytes()) == 0);
        }
      });
    }
  }
}

TEST(net_exchange_absent_rank) {
  for (const bool shared : {false, true}) {
    on_wire(
        3,
        [&](int rank, NetContext& ctx) {
          ctx.ranks_share_hosts = shared;
          if (rank == 2) {
            return;
          }
          const auto blocks = [] {
            return std::vector<NetBuffer>{
                NetBuffer(64), NetBuffer(64), NetBuffer(64)};
          };
          CHECK_THROWS(
              net_gather(ctx, NetBuffer(64), blocks()),
              Error,
              "no message from rank");
          CHECK_THROWS(
              net_fold(ctx, blocks(), DType::kFloat32),
              Error,
              "no message from rank");
        },
        milliseconds(300));
  }
}

} // namespace
