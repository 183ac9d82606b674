// All-reduces that skip blocks of zeros.

#include <algorithm>
#include <cmath>
#include <limits>

#include "collective_cases.hpp"
#include "collectives/skip.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

enum class Overlap { kRandom, kFull, kNone };

// values(), zeroed in blocks that are not drawn; integers, so that every order
// of additions gives the same.
Bytes sparse_values(
    DType dtype,
    size_t count,
    size_t block,
    double density,
    Overlap overlap,
    int rank,
    int size,
    uint64_t seed) {
  Bytes out = values(dtype, count, seed + rank);
  const size_t bytes = block * dtype_size(dtype);
  const auto limit = static_cast<uint64_t>(density * 1000);
  for (size_t b = 0; b * bytes < out.size(); ++b) {
    const uint64_t drawn = mixed(
        seed * 77 + b + (overlap == Overlap::kRandom ? 1000003 * rank : 0));
    const bool mine = overlap != Overlap::kNone ||
        static_cast<int>(drawn / 1000 % size) == rank;
    if (drawn % 1000 >= limit || !mine) {
      const size_t end = std::min(out.size(), (b + 1) * bytes);
      std::fill(out.begin() + b * bytes, out.begin() + end, 0);
    }
  }
  return out;
}

struct SparseCase {
  ReduceArgs args;
  size_t count;
  size_t block;
  double density;
  Overlap overlap;
};

// Puts special values where blocks would otherwise be zero or ordinary.
void sprinkle(Bytes& bytes, DType dtype, int rank) {
  if (dtype != DType::kFloat32 || bytes.size() < 40000) {
    return;
  }
  auto* x = reinterpret_cast<float*>(bytes.data());
  x[100] = -0.0F; // on all ranks, in a block of its own for small blocks
  x[3000] = rank == 0 ? -0.0F : 0.0F; // alone
  x[5000 + rank] = std::numeric_limits<float>::infinity();
  x[7000] = rank == 1 ? std::numeric_limits<float>::quiet_NaN() : x[7000];
}

// Bits, all NaN alike.
bool same(DType dtype, const Bytes& a, const Bytes& b) {
  if (dtype != DType::kFloat32) {
    return a == b;
  }
  const auto* x = reinterpret_cast<const float*>(a.data());
  const auto* y = reinterpret_cast<const float*>(b.data());
  for (size_t i = 0; i < a.size() / 4; ++i) {
    if (std::memcmp(x + i, y + i, 4) != 0 &&
        !(std::isnan(x[i]) && std::isnan(y[i]))) {
      return false;
    }
  }
  return true;
}

void check_sparse(Group& g, Place place, const SparseCase& c) {
  const uint64_t seed = g.sequence * 1000 + 5;
  const DType dtype = c.args.dtype;
  const size_t bytes = c.count * dtype_size(dtype);
  Bytes mine = sparse_values(
      dtype, c.count, c.block, c.density, c.overlap, g.rank, g.size, seed);
  sprinkle(mine, dtype, g.rank);
  PlacedMemory dense = placed(g, place, bytes);
  PlacedMemory sparse = placed(g, place, bytes);
  dense.assign(mine.data());
  sparse.assign(mine.data());
  g.run([&](Context& ctx) {
    all_reduce(ctx, {{dense.data(), c.count}}, c.args);
  });
  g.run([&](Context& ctx) {
    sparse_all_reduce(ctx, {{sparse.data(), c.count}}, c.args, {c.block});
  });
  const Bytes got(sparse.data(), sparse.data() + bytes);
  std::memset(sparse.data(), 0xff, bytes); // others may be at it yet
  CHECK(same(dtype, got, Bytes(dense.data(), dense.data() + bytes)));
}

const double kDensities[] = {1, .8, .4, .2, .1, .08, .04, .02, .01, 0};

void acceptance(Group& g) {
  for (const double density : kDensities) {
    if (kOnlyThreads && density != .1 && density != .01) {
      continue;
    }
    for (const Overlap overlap :
         {Overlap::kRandom, Overlap::kFull, Overlap::kNone}) {
      for (const Place place : kPlaces) {
        for (const size_t count : {size_t{100003}, size_t{255}}) {
          check_sparse(g, place, {sum_of(), count, 256, density, overlap});
        }
        if (kSanitized) {
          break;
        }
      }
    }
  }
}

TEST(sparse_equals_dense) {
  for (const int size : kSanitized ? std::vector{3} : std::vector{1, 2, 3, 4}) {
    with_group(size, size == 2 ? 2 : 1, acceptance);
  }
}

TEST(sparse_types_and_blocks) {
  const auto body = [](Group& g) {
    for (const DType dtype :
         {DType::kFloat64,
          DType::kFloat32,
          DType::kFloat16,
          DType::kBFloat16,
          DType::kInt32,
          DType::kInt64}) {
      for (const RedOp op : {RedOp::kSum, RedOp::kAvg}) {
        ReduceArgs args = sum_of(dtype);
        args.op = op;
        args.divisor = op == RedOp::kAvg ? g.size : 1;
        for (const size_t block : {32, 100, 256, 4097, 65536}) {
          if (kOnlyThreads && (block != 100 || dtype != DType::kInt32)) {
            continue;
          }
          for (const Place place : {Place::kOrdinary, Place::kArena}) {
            check_sparse(
                g, place, {args, 70001 + block, block, .2, Overlap::kRandom});
          }
        }
      }
    }
  };
  for (const int size : kSanitized ? std::vector{2} : std::vector{2, 3}) {
    with_group(size, 1, body);
  }
}

TEST(sparse_lists_of_tensors) {
  with_group(3, 1, [](Group& g) {
    const size_t counts[] = {70000, 0, 5, 12345};
    for (const Place place : kPlaces) {
      const uint64_t seed = g.sequence * 100;
      std::vector<PlacedMemory> buffers;
      std::vector<Buffer> tensors;
      std::vector<Bytes> wanted;
      for (size_t t = 0; t < std::size(counts); ++t) {
        std::vector<Bytes> all;
        for (int p = 0; p < g.size; ++p) {
          all.push_back(sparse_values(
              DType::kFloat32,
              counts[t],
              64,
              .3,
              Overlap::kRandom,
              p,
              g.size,
              seed + 10 * t));
        }
        wanted.push_back(reference(sum_of(), pointers_to(all), counts[t]));
        buffers.push_back(placed(g, place, counts[t] * 4, static_cast<int>(t)));
        buffers[t].assign(all[static_cast<size_t>(g.rank)].data());
        tensors.push_back({buffers[t].data(), counts[t]});
      }
      g.run([&](Context& ctx) {
        sparse_all_reduce(ctx, tensors, sum_of(), {64});
      });
      for (size_t t = 0; t < wanted.size(); ++t) {
        CHECK(buffers[t].holds(wanted[t].data()));
      }
    }
  });
}

TEST(sparse_threshold_keeps_the_rest) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    with_group(2, 1, [dtype](Group& g) {
      constexpr size_t kCount = 20011;
      constexpr size_t kBlock = 64;
      const size_t element = dtype_size(dtype);
      const auto input = [&](int rank, int turn) {
        Bytes x = values(dtype, kCount, 900 + 10 * turn + rank);
        for (size_t b = 0; b * kBlock < kCount; ++b) {
          if (mixed(b * 3 + rank + turn) % 4 == 0) {
            continue; // up to 8; the others below 2^-7
          }
          for (size_t i = b * kBlock; i < std::min(kCount, (b + 1) * kBlock);
               ++i) {
            std::memset(&x[i * element], 0, element - 1);
            x[(i + 1) * element - 1] = 0x39; // about 2^-13
          }
        }
        return x;
      };
      PlacedMemory t(g.engine.domain(), kCount * element, true);
      std::vector<Bytes> residuals(g.size, Bytes(kCount * element));
      Bytes residual(kCount * element);
      for (int turn = 0; turn < 3; ++turn) {
        // What each rank has: input + residual; what it sends: its blocks
        // above.
        std::vector<Bytes> sent;
        for (int p = 0; p < g.size; ++p) {
          const Bytes x = input(p, turn);
          Bytes sum =
              reference(sum_of(dtype), {x.data(), residuals[p].data()}, kCount);
          std::vector<uint64_t> bits(kCount / kBlock / 64 + 2);
          kernels::table()->find_blocks_above(
              dtype, sum.data(), kCount, kBlock, .01, bits.data());
          residuals[p] = sum;
          for (size_t i = 0; i < kCount; ++i) {
            const size_t b = i / kBlock;
            Bytes& cleared =
                (bits[b / 64] >> (b % 64) & 1) != 0 ? residuals[p] : sum;
            std::memset(&cleared[i * element], 0, element);
          }
          sent.push_back(sum);
        }
        t.assign(input(g.rank, turn).data());
        g.run([&](Context& ctx) {
          SkipOptions options{kBlock, .01, residual.data()};
          sparse_all_reduce(ctx, {{t.data(), kCount}}, sum_of(dtype), options);
        });
        const Bytes wanted =
            reference(sum_of(dtype), pointers_to(sent), kCount);
        CHECK(t.holds(wanted.data()));
        CHECK(residual == residuals[static_cast<size_t>(g.rank)]);
      }
    });
  }
}

// What is moved is what the formula says.
TEST(sparse_bytes) {
  with_group(4, 1, [](Group& g) {
    constexpr size_t kBlock = 256;
    constexpr size_t kCount = 4 * 320 * kBlock; // shards are whole blocks
    for (const double density : {.01, .1, .4, 1.}) {
      if (kOnlyThreads && density != .1) {
        continue;
      }
      const uint64_t seed = g.sequence * 31;
      PlacedMemory b(g.engine.domain(), kCount * 4, false);
      const auto blocks_of = [&](int p) {
        const Bytes x = sparse_values(
            DType::kFloat32,
            kCount,
            kBlock,
            density,
            Overlap::kRandom,
            p,
            g.size,
            seed);
        if (p == g.rank) {
          b.assign(x.data());
        }
        std::vector<bool> present(kCount / kBlock);
        for (size_t i = 0; i < x.size(); ++i) {
          present[i / 4 / kBlock] = present[i / 4 / kBlock] || x[i] != 0;
        }
        return present;
      };
      std::vector<bool> any(kCount / kBlock);
      std::vector<std::vector<bool>> all;
      for (int p = 0; p < g.size; ++p) {
        all.push_back(blocks_of(p));
        for (size_t i = 0; i < any.size(); ++i) {
          any[i] = any[i] || all.back()[i];
        }
      }
      const OpStats before = g.stats.of(OpCode::kSparseAllReduce);
      g.run([&](Context& ctx) {
        sparse_all_reduce(ctx, {{b.data(), kCount}}, sum_of(), {kBlock});
      });
      const OpStats after = g.stats.of(OpCode::kSparseAllReduce);
      const auto& mine = all[static_cast<size_t>(g.rank)];
      const size_t shard = any.size() / 4;
      size_t sent = 0; // blocks
      size_t unions = 0;
      for (size_t b = 0; b < any.size(); ++b) {
        const bool own = b / shard == static_cast<size_t>(g.rank);
        sent += own ? (any[b] ? 3 : 0) : (mine[b] ? 1 : 0);
        unions += any[b];
      }
      CHECK_EQ(
          after.bytes_sent - before.bytes_sent,
          sent * kBlock * 4 + 3 * any.size() / 8);
      CHECK_EQ(after.blocks - before.blocks, any.size());
      CHECK_EQ(after.blocks_union - before.blocks_union, unions);
      CHECK_EQ(
          after.calls[size_t(DataPath::kSkipping)] -
              before.calls[size_t(DataPath::kSkipping)],
          uint64_t{1});
    }
  });
}

// Plain all_reduce by the group's option.
TEST(sparse_by_option) {
  const auto with_mode = [](BlockSkip mode, const GroupBody& body) {
    on_threads(2, [&](int rank, Store& store) {
      Settings settings = test_settings(1);
      settings.block_skip = mode;
      settings.block_size = 128;
      Group g(rank, 2, store, settings);
      body(g);
      g.run([](Context& ctx) { barrier(ctx); });
    });
  };
  const auto run = [](Group& g, size_t count, double density) {
    const uint64_t seed = g.sequence;
    std::vector<Bytes> all;
    for (int p = 0; p < g.size; ++p) {
      all.push_back(sparse_values(
          DType::kFloat32, count, 128, density, Overlap::kRandom, p, 2, seed));
    }
    PlacedMemory b(g.engine.domain(), count * 4, true);
    b.assign(all[static_cast<size_t>(g.rank)].data());
    g.run(
        [&](Context& ctx) { all_reduce(ctx, {{b.data(), count}}, sum_of()); });
    CHECK(b.holds(reference(sum_of(), pointers_to(all), count).data()));
  };
  const auto skipped = [](Group& g) {
    return g.stats.of(OpCode::kAllReduce).calls[size_t(DataPath::kSkipping)];
  };
  with_mode(BlockSkip::kOff, [&](Group& g) {
    run(g, 100000, .01);
    CHECK_EQ(skipped(g), uint64_t{0});
  });
  with_mode(BlockSkip::kOn, [&](Group& g) {
    run(g, 100000, .01);
    run(g, 1000, .01); // too small
    run(g, 100000, 1); // looked, and all were there
    CHECK_EQ(skipped(g), uint64_t{2});
    CHECK(g.stats.of(OpCode::kAllReduce).blocks > 0);
  });
  with_mode(BlockSkip::kAuto, [&](Group& g) {
    for (int i = 0; i < 5; ++i) {
      run(g, 30000, .01);
      run(g, 20000, 1);
    }
    CHECK_EQ(skipped(g), uint64_t{4}); // the first is a look
    for (int i = 0; i < 8; ++i) {
      run(g, 30000, 1);
    }
    CHECK_EQ(skipped(g), uint64_t{4});
    for (int i = 0; i < 20; ++i) {
      run(g, 20000, .01);
    }
    // The 17th dense call of this shape is the next look.
    CHECK_EQ(skipped(g), uint64_t{4 + 20 - 12});
  });
}

// A dense tensor is not searched. The bits behind its last block stay zero all
// the same: two tensors' bits may share what is counted and sent.
TEST(sparse_dense_tensor_has_no_bits_behind_its_end) {
  Pool pool(1);
  for (const size_t blocks : {size_t{16384}, size_t{16385}, size_t{16447}}) {
    const size_t count = blocks * 16 - 3;
    const std::vector<float> ones(count, 1.0F);
    std::vector<uint64_t> bits(BlockMap::words_of(count, 16), 7);
    find_blocks(
        *kernels::table(),
        pool,
        {const_cast<float*>(ones.data()), count},
        DType::kFloat32,
        {16},
        bits.data());
    size_t set = 0;
    for (const uint64_t word : bits) {
      set += static_cast<size_t>(__builtin_popcountll(word));
    }
    CHECK_EQ(set, blocks);
    const size_t last = blocks % 64;
    CHECK(last == 0 || bits.back() >> last == 0);
  }
}

// all_reduce may go back to all elements; sparse_all_reduce does not.
TEST(sparse_and_all_reduce_do_not_mix) {
  on_threads(2, [](int rank, Store& store) {
    Settings settings = test_settings(1);
    settings.block_skip = BlockSkip::kAuto;
    settings.block_size = 128;
    Group g(rank, 2, store, settings);
    constexpr size_t kCount = 16384;
    PlacedMemory b(g.engine.domain(), kCount * 4, false);
    const auto fill = [&](double density) {
      b.assign(
          sparse_values(
              DType::kFloat32, kCount, 128, density, Overlap::kFull, rank, 2, 5)
              .data());
    };
    const auto dense = [&](Context& ctx) {
      all_reduce(ctx, {{b.data(), kCount}}, sum_of());
    };
    fill(0); // so that the next ones skip
    g.run(dense);
    g.run(dense);
    fill(.4);
    const auto mixed = [&](Context& ctx) {
      if (rank == 0) {
        dense(ctx);
      } else {
        sparse_all_reduce(ctx, {{b.data(), kCount}}, sum_of(), {128});
      }
    };
    CHECK_THROWS(g.run(mixed), Error, "dense where few blocks are zero");
    check_usable(g);
  });
}

TEST(sparse_disagreements) {
  with_group(2, 1, [](Group& g) {
    PlacedMemory b(g.engine.domain(), 400000, true);
    const auto raises = [&](const Group::Operation& op, const char* what) {
      CHECK_THROWS(g.run(op), Error, what);
      check_usable(g);
    };
    std::memset(b.data(), 0, b.bytes());
    raises(
        [&](Context& ctx) {
          sparse_all_reduce(
              ctx, {{b.data(), 100000}}, sum_of(), {g.rank == 0 ? 64u : 128u});
        },
        "size of blocks");
    raises(
        [&](Context& ctx) {
          if (g.rank == 0) {
            sparse_all_reduce(ctx, {{b.data(), 100000}}, sum_of(), {64});
          } else {
            all_reduce(ctx, {{b.data(), 100000}}, sum_of());
          }
        },
        "sparse_all_reduce");
    raises(
        [&](Context& ctx) {
          ReduceArgs args = sum_of();
          args.op = RedOp::kMax;
          sparse_all_reduce(ctx, {{b.data(), 100000}}, args, {64});
        },
        "SUM and AVG");
  });
}

} // namespace
