// The all-reduce between machines that skips blocks of zeros, over a transport
// that is a table in memory.

#include "net_wire.hpp"

#include "base/ownership.hpp"
#include "collectives/hosts_way.hpp"
#include "collectives/reduction.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

struct NetCase {
  DType dtype = DType::kFloat32;
  size_t count = 0;
  size_t block = 256;
  size_t percent = 10; // of blocks
  uint64_t seed = 1;
};

Bytes contribution(const NetCase& c, int rank) {
  return values_in_blocks(c.dtype, c.count, c.seed + rank, c.block, c.percent);
}

// By which groups remember how dense sums were.
uint64_t shape_of(Buffers tensors) {
  return facts(sum_call(OpCode::kAllReduce, sum_of(), tensors)).shape_hash;
}

// Of all ranks, and their sum.
struct Contributions {
  Contributions(int size, const NetCase& c) {
    for (int p = 0; p < size; ++p) {
      all.push_back(contribution(c, p));
    }
    sum = reference(sum_of(c.dtype), pointers_to(all), c.count);
  }
  std::vector<Bytes> all;
  Bytes sum;
};

void check_net(int size, const NetCase& c) {
  const Contributions given(size, c);
  const size_t blocks = (c.count + c.block - 1) / c.block;
  const auto present = [&](const Bytes& x) {
    std::vector<uint64_t> bits(blocks / 64 + 1);
    kernels::table()->find_blocks(
        x.data(), x.size(), c.block * dtype_size(c.dtype), bits.data());
    return bits;
  };
  std::vector<OpStats> stats(static_cast<size_t>(size));
  on_wire(size, [&](int rank, NetContext& ctx) {
    Bytes mine = given.all[static_cast<size_t>(rank)];
    HostsWay way(ctx);
    sparse_all_reduce(
        way, {{mine.data(), c.count}}, sum_of(c.dtype), {c.block});
    stats[static_cast<size_t>(rank)] = ctx.moved;
    CHECK(mine == given.sum);
  });
  // All that is sent is received.
  uint64_t sent = 0, received = 0, here = 0;
  for (int p = 0; p < size; ++p) {
    const OpStats& s = stats[static_cast<size_t>(p)];
    sent += s.bytes_sent;
    received += s.bytes_received;
    uint64_t ones = 0;
    for (const uint64_t word : present(given.all[static_cast<size_t>(p)])) {
      ones += static_cast<uint64_t>(__builtin_popcountll(word));
    }
    CHECK_EQ(s.blocks_present, ones);
    CHECK_EQ(s.blocks, blocks);
    CHECK_EQ(s.blocks_union, stats[0].blocks_union);
    here += ones;
  }
  CHECK_EQ(sent, received);
  // Every block travels once to its owner and from there to all others; blocks
  // at the ends of lanes have two owners, and heads a word for that.
  const double share = double(size - 1) / size;
  const double block_bytes = double(c.block * dtype_size(c.dtype));
  const double data =
      (double(here) + double(size) * double(stats[0].blocks_union)) * share *
      block_bytes;
  const double heads = double(size) * (size - 1) *
      (double(blocks) / size / 4 + sizeof(OpDescriptor) + 32);
  CHECK(double(sent) <= data * 1.6 + heads + 4 * size * block_bytes);
}

TEST(net_skip_equals_dense) {
  uint64_t seed = 1;
  for (const int size : {1, 2, 3, 5}) {
    for (const DType dtype :
         {DType::kFloat32, DType::kBFloat16, DType::kInt64}) {
      if (kOnlyThreads && (size == 2 || dtype != DType::kInt64)) {
        continue;
      }
      // Elsewhere every type with every size; here each of both.
      if (kSanitized && size != 3 && dtype != DType::kInt64) {
        continue;
      }
      for (const size_t count : {0, 1, 31, 5000, 70001, 1300007}) {
        for (const size_t percent : {0, 1, 30, 100}) {
          // Many segments in one case only.
          const bool many = count > 100000;
          if (many &&
              (dtype != DType::kInt64 || percent != 30 ||
               (kSanitized && size != 3))) {
            continue;
          }
          for (const size_t block : {32, 100, 65536}) {
            if (!kSanitized || !many || block == 100) {
              check_net(size, {dtype, count, block, percent, ++seed});
            }
          }
        }
      }
    }
  }
}

// Zeros that stay at home still turn another host's -0 into 0.
TEST(net_skip_signed_zeros) {
  constexpr size_t kBlock = 64, kBlocks = 7;
  constexpr size_t kCount = kBlock * kBlocks;
  for (const Layout& layout : layouts()) {
    const int size = size_of(layout);
    for (const DType type : {DType::kFloat32, DType::kFloat16}) {
      const size_t element = dtype_size(type);
      // Block b is rank b's alone: a number, and -0 after it.
      std::vector<Bytes> all;
      for (int p = 0; p < size; ++p) {
        all.emplace_back(kCount * element);
        uint8_t* block = all.back().data() + p * kBlock * element;
        block[element - 1] = 0x40;
        for (size_t i = 1; i < kBlock; ++i) {
          block[(i + 1) * element - 1] = 0x80;
        }
      }
      const ReduceArgs args = sum_of(type);
      const Bytes wanted =
          hosts_reference(args, layout, pointers_to(all), kCount);
      CHECK_EQ(wanted[2 * element - 1], 0); // 0 + -0
      on_hosts(layout, [&](int rank, NetContext& ctx) {
        Bytes mine = all[rank];
        HostsWay way(ctx);
        sparse_all_reduce(way, {{mine.data(), kCount}}, args, {kBlock});
        CHECK(mine == wanted);
        CHECK_EQ(ctx.moved.blocks_present, size_t{1});
      });
    }
  }
}

// Owners get their shards' sums; other shards stay as they are.
TEST(net_skip_reduce_scatter) {
  for (const int size : {1, 2, 3, 5}) {
    for (const size_t count : {0, 31, 70001}) {
      for (const size_t percent : {0, 1, 30, 100}) {
        const NetCase c{DType::kFloat32, count, 100, percent, 7 + count};
        const Contributions given(size, c);
        std::vector<OpStats> whole(size), half(size);
        on_wire(size, [&](int rank, NetContext& ctx) {
          Bytes mine = given.all[rank];
          for (const bool gives : {true, false}) {
            mine = given.all[rank];
            Plan plan = in_place(
                ctx.kernels,
                size,
                single({mine.data(), count}),
                sum_of(c.dtype));
            plan.skip = {c.block};
            plan.zeros_stay = true;
            plan.receiver = gives ? Plan::kAll : Plan::kOwner;
            HostsWay way(ctx);
            OpDescriptor d;
            way.enter(&plan, d, {});
            way.run(plan, d);
            (gives ? whole : half)[rank] = std::exchange(ctx.moved, {});
          }
          Bytes wanted = given.all[rank];
          const ShardRange own =
              shard_range(static_cast<int64_t>(count), size, rank);
          std::copy_n(
              given.sum.begin() + own.offset * 4,
              own.length * 4,
              wanted.begin() + own.offset * 4);
          CHECK(mine == wanted);
        });
        uint64_t sent = 0, received = 0, results = 0;
        for (int p = 0; p < size; ++p) {
          sent += half[p].bytes_sent;
          received += half[p].bytes_received;
          results += whole[p].bytes_sent - half[p].bytes_sent;
          CHECK_EQ(half[p].blocks_union, whole[p].blocks_union);
          CHECK_EQ(half[p].blocks_present, whole[p].blocks_present);
        }
        CHECK_EQ(sent, received);
        // What is not sent is the union's way to all others.
        const size_t block = c.block * 4;
        const uint64_t back = half[0].blocks_union * block * (size - 1);
        CHECK(results <= back && results + block * (size - 1) >= back);
      }
    }
  }
}

// What ranks see of it when they have no better one.
TEST(net_skip_probes) {
  for (const size_t percent : {0, 10, 100}) {
    const NetCase c{DType::kFloat32, 1000000, 100, percent};
    const Contributions given(3, c);
    on_wire(3, [&](int rank, NetContext& ctx) {
      ctx.skip.mode = BlockSkip::kAuto;
      ctx.skip.block = c.block;
      Bytes mine = given.all[rank];
      HostsWay way(ctx);
      all_reduce(way, {{mine.data(), c.count}}, sum_of(c.dtype));
      CHECK(mine == given.sum);
      const auto next = ctx.skip.estimates.choose(
          shape_of(single({mine.data(), c.count})), c.dtype);
      CHECK((next == DensityEstimates::Choice::kSkip) == (percent != 100));
    });
  }
}

// "on" skips whatever it finds, and ranks hear the share for the next time.
TEST(net_skip_as_the_group_says) {
  const NetCase c{DType::kFloat32, 100000, 100, 100};
  const Contributions given(2, c);
  for (const BlockSkip mode : {BlockSkip::kOn, BlockSkip::kAuto}) {
    on_wire(2, [&](int rank, NetContext& ctx) {
      ctx.skip.mode = mode;
      ctx.skip.block = c.block;
      Bytes mine = given.all[rank];
      const std::vector<Buffer> tensors{{mine.data(), c.count}};
      // As if earlier ones had been sparse.
      ctx.skip.estimates.observe(shape_of(tensors), c.dtype, 0, 1);
      HostsWay way(ctx);
      all_reduce(way, tensors, sum_of(c.dtype));
      CHECK(mine == given.sum);
      const OpStats stats = ctx.stats.of(OpCode::kAllReduce);
      CHECK_EQ(stats.calls[size_t(DataPath::kSkipping)], 1u);
      CHECK_EQ(stats.blocks_union, c.count / c.block);
    });
  }
}

TEST(net_skip_disagreements) {
  const auto says = [](const char* text, auto call) {
    on_wire(
        2,
        [&](int rank, NetContext& ctx) {
          Bytes mine(8 * 10000);
          HostsWay way(ctx);
          CHECK_THROWS(call(rank == 1, way, mine.data()), Error, text);
        },
        milliseconds(20000));
  };
  says("size of blocks", [](bool odd, Way& way, void* data) {
    sparse_all_reduce(way, {{data, 10000}}, sum_of(), {odd ? 64u : 128u});
  });
  says("number of elements", [](bool odd, Way& way, void* data) {
    sparse_all_reduce(way, {{data, odd ? 10000u : 9999u}}, sum_of(), {64});
  });
  says("dtype", [](bool odd, Way& way, void* data) {
    const DType dtype = odd ? DType::kInt32 : DType::kFloat32;
    sparse_all_reduce(way, {{data, 10000}}, sum_of(dtype), {64});
  });
}

TEST(net_skip_absent_rank) {
  on_wire(
      3,
      [](int rank, NetContext& ctx) {
        Bytes mine(4 * 10000, 1);
        if (rank != 2) {
          HostsWay way(ctx);
          CHECK_THROWS(
              sparse_all_reduce(way, {{mine.data(), 10000}}, sum_of(), {64}),
              Error,
              "no message from rank 2");
        }
      },
      milliseconds(300));
}

} // namespace
