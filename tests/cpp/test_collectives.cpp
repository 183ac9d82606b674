#include <algorithm>
#include <string>

#include "collective_cases.hpp"
#include "collectives/selector.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

constexpr DType kF32 = DType::kFloat32;

// Elements of fp32 around the limits at which algorithms change.
std::vector<size_t> sizes(int ranks) {
  const size_t one_shot = kOneShotBytes / sizeof(float);
  std::vector<size_t> all{
      0, 1, 33, 1000, one_shot - 1, one_shot, one_shot + 1, 70001};
  if (!kOnlyThreads) {
    all.push_back(300007);
  }
  if (ranks == 2 && !kSanitized) {
    all.push_back(1200011); // large enough to be streamed
  }
  return all;
}

// --- reductions --------------------------------------------------------------

bool check_all_reduce(
    Group& g,
    Place place,
    const ReduceArgs& args,
    const std::vector<size_t>& counts) {
  const uint64_t seed = g.sequence * 1000;
  std::vector<PlacedMemory> buffers;
  std::vector<Buffer> tensors;
  std::vector<Bytes> got;
  for (size_t t = 0; t < counts.size(); ++t) {
    const size_t bytes = counts[t] * dtype_size(args.dtype);
    buffers.push_back(placed(g, place, bytes, static_cast<int>(t)));
    buffers[t].assign(
        values(args.dtype, counts[t], seed + 50 * t + g.rank).data());
    tensors.push_back({buffers[t].data(), counts[t]});
  }
  g.run([&](Context& ctx) { all_reduce(ctx, tensors, args); });
  // At once, while others may be at it yet.
  for (PlacedMemory& b : buffers) {
    got.emplace_back(b.data(), b.data() + b.bytes());
    std::memset(b.data(), 0xff, b.bytes());
  }
  bool good = true;
  for (size_t t = 0; t < counts.size(); ++t) {
    good = good &&
        CHECK(got[t] == reduced(args, counts[t], seed + 50 * t, g.size));
  }
  return good;
}

void all_reduce_sizes(Group& g) {
  for (Place place : kPlaces) {
    for (size_t count : sizes(g.size)) {
      if (!check_all_reduce(g, place, sum_of(), {count})) {
        return;
      }
    }
  }
}

void all_reduce_types(Group& g) {
  const std::pair<DType, RedOp> all[] = {
      {DType::kFloat32, RedOp::kAvg},
      {DType::kFloat32, RedOp::kMax},
      {DType::kFloat32, RedOp::kPremulSum},
      {DType::kFloat16, RedOp::kSum},
      {DType::kBFloat16, RedOp::kAvg},
      {DType::kFloat64, RedOp::kProduct},
      {DType::kInt64, RedOp::kMin},
      {DType::kUInt8, RedOp::kBxor},
      {DType::kBool, RedOp::kSum},
      {DType::kComplex64, RedOp::kSum}};
  int turn = 0;
  for (const auto& [dtype, op] : all) {
    ReduceArgs args;
    args.dtype = dtype;
    args.op = op;
    args.divisor = g.size;
    args.factor = 0.37;
    for (size_t bytes : {size_t{1000}, size_t{90000}}) {
      const Place place = kPlaces[turn++ % 3];
      if (!check_all_reduce(g, place, args, {bytes / dtype_size(dtype) + 1})) {
        return;
      }
    }
  }
}

void all_reduce_lists(Group& g) {
  for (Place place : kPlaces) {
    check_all_reduce(g, place, sum_of(), {3, 5, 1});
    check_all_reduce(g, place, sum_of(), {0, 20000, 1, 33, 150001, 0});
    check_all_reduce(g, place, sum_of(DType::kUInt8), {1, 63, 64, 65, 300001});
    check_all_reduce(g, place, sum_of(), {0, 0});
  }
  check_all_reduce(g, Place::kMixed, sum_of(), std::vector<size_t>(500, 70));
}

void reduce_cases(Group& g) {
  for (Place place : kPlaces) {
    for (size_t count :
         {size_t{0}, size_t{100}, size_t{16385}, size_t{200003}}) {
      for (int root : {0, g.size - 1}) {
        const uint64_t seed = g.sequence * 1000;
        const Bytes mine = values(kF32, count, seed + g.rank);
        PlacedMemory b = placed(g, place, count * 4);
        b.assign(mine.data());
        g.run([&](Context& ctx) {
          reduce(ctx, b.data(), count, sum_of(), root);
        });
        CHECK(b.holds(
            g.rank == root ? reduced(sum_of(), count, seed, g.size).data()
                           : mine.data()));
        std::memset(b.data(), 0xff, b.bytes());
      }
    }
  }
}

// counts[p] elements for rank p.
void check_reduce_scatter(
    Group& g,
    Place place,
    const std::vector<size_t>& counts,
    bool adjacent,
    bool in_place) {
  const uint64_t seed = g.sequence * 1000;
  const auto input = [&](int from, int to) {
    return values(kF32, counts[to], seed + 50 * to + from);
  };
  std::vector<PlacedMemory> rooms;
  std::vector<Buffer> inputs;
  size_t total = 0;
  for (size_t count : counts) {
    total += count;
  }
  if (adjacent) {
    rooms.push_back(placed(g, place, total * 4));
  }
  size_t offset = 0;
  for (int p = 0; p < g.size; ++p) {
    if (!adjacent) {
      rooms.push_back(placed(g, place, counts[p] * 4, p));
    }
    char* at = adjacent ? rooms[0].data() + offset * 4 : rooms[p].data();
    offset += counts[p];
    const Bytes data = input(g.rank, p);
    std::copy(data.begin(), data.end(), at);
    inputs.push_back({at, counts[p]});
  }
  PlacedMemory output = placed(g, place, counts[g.rank] * 4, 1);
  char* to = in_place ? static_cast<char*>(inputs[g.rank].data) : output.data();
  g.run([&](Context& ctx) {
    reduce_scatter(ctx, {to, counts[g.rank]}, inputs, sum_of());
  });
  for (int p = 0; p < g.size; ++p) {
    if (p != g.rank || !in_place) {
      const Bytes data = input(g.rank, p);
      CHECK(
          std::equal(
              data.begin(), data.end(), static_cast<uint8_t*>(inputs[p].data)));
      std::memset(inputs[p].data, 0xff, counts[p] * 4);
    }
  }
  const Bytes expected =
      reduced(sum_of(), counts[g.rank], seed + 50 * g.rank, g.size);
  CHECK(
      std::equal(
          expected.begin(), expected.end(), reinterpret_cast<uint8_t*>(to)));
}

void reduce_scatter_cases(Group& g) {
  for (Place place : kPlaces) {
    for (size_t each : {size_t{0}, size_t{50}, size_t{9000}, size_t{60001}}) {
      for (bool adjacent : {false, true}) {
        std::vector<size_t> counts(g.size, each);
        check_reduce_scatter(g, place, counts, adjacent, false);
        check_reduce_scatter(g, place, counts, adjacent, true);
        for (int p = 0; p < g.size; ++p) {
          counts[p] = p % 3 == 1 ? 0 : each * (p + 1) / 2;
        }
        check_reduce_scatter(g, place, counts, adjacent, false);
      }
    }
  }
}

// --- moves -------------------------------------------------------------------

// What `from` has for `to` in a move of one kind.
Bytes cargo(uint64_t seed, int from, int to, size_t bytes) {
  return values(DType::kUInt8, bytes, seed + 50 * from + to);
}

Span span(const PlacedMemory& b) {
  return {b.data(), b.bytes()};
}

constexpr size_t kMoves[] = {0, 4, 1000, 65536, 65540, 300000, 1400004};

void all_gather_cases(Group& g) {
  for (Place place : kPlaces) {
    for (size_t bytes : kMoves) {
      for (bool even : {true, false}) {
        const uint64_t seed = g.sequence * 5000;
        const auto size = [&](int p) {
          return even ? bytes : bytes / 4 * p / 2 * 4;
        };
        std::vector<PlacedMemory> rooms;
        std::vector<Span> outputs;
        for (int p = 0; p < g.size; ++p) {
          rooms.push_back(placed(g, place, size(p), p));
          outputs.push_back(span(rooms[p]));
        }
        PlacedMemory input = placed(g, place, size(g.rank), 1);
        const bool in_place = g.sequence % 2 == 0;
        const Span in = in_place ? outputs[g.rank] : span(input);
        const Bytes mine = cargo(seed, g.rank, 0, in.bytes);
        std::copy(mine.begin(), mine.end(), static_cast<uint8_t*>(in.data));
        g.run([&](Context& ctx) { all_gather(ctx, outputs, in, kF32); });
        std::memset(input.data(), 0xff, input.bytes());
        for (int p = 0; p < g.size; ++p) {
          CHECK(rooms[p].holds(cargo(seed, p, 0, size(p)).data()));
          std::memset(rooms[p].data(), 0xff, rooms[p].bytes());
        }
      }
    }
  }
}

void broadcast_cases(Group& g) {
  for (Place place : kPlaces) {
    for (size_t bytes : kMoves) {
      for (int root : {0, g.size - 1}) {
        const uint64_t seed = g.sequence * 5000;
        const Bytes expected = cargo(seed, root, 0, bytes);
        PlacedMemory b = placed(g, place, bytes);
        if (g.rank == root) {
          b.assign(expected.data());
        }
        g.run([&](Context& ctx) { broadcast(ctx, span(b), kF32, root); });
        CHECK(b.holds(expected.data()));
        std::memset(b.data(), 0xff, b.bytes());
      }
    }
  }
}

void gather_scatter_cases(Group& g) {
  for (Place place : kPlaces) {
    for (size_t bytes : kMoves) {
      const int root = static_cast<int>(g.sequence) % g.size;
      const uint64_t seed = g.sequence * 5000;
      std::vector<PlacedMemory> rooms;
      std::vector<Span> spans;
      for (int p = 0; p < g.size && g.rank == root; ++p) {
        rooms.push_back(placed(g, place, bytes, p));
        spans.push_back(span(rooms[p]));
      }
      PlacedMemory mine = placed(g, place, bytes);
      mine.assign(cargo(seed, g.rank, 0, bytes).data());
      g.run([&](Context& ctx) { gather(ctx, spans, span(mine), kF32, root); });
      std::memset(mine.data(), 0xff, bytes);
      for (size_t p = 0; p < rooms.size(); ++p) {
        const auto from = static_cast<int>(p);
        CHECK(rooms[p].holds(cargo(seed, from, 0, bytes).data()));
        rooms[p].assign(cargo(seed, root, from, bytes).data());
      }
      g.run([&](Context& ctx) { scatter(ctx, span(mine), spans, kF32, root); });
      for (const PlacedMemory& room : rooms) {
        std::memset(room.data(), 0xff, bytes);
      }
      CHECK(mine.holds(cargo(seed, root, g.rank, bytes).data()));
    }
  }
}

void all_to_all_cases(Group& g) {
  for (Place place : kPlaces) {
    for (size_t limit :
         {size_t{1}, size_t{300}, size_t{40000}, size_t{90000}}) {
      const uint64_t seed = g.sequence * 5000;
      const auto size = [&](int from, int to) {
        const uint64_t r = mixed(seed + 9 * from + to);
        return r % 4 == 0 ? 0 : (r >> 8) % limit * 4;
      };
      std::vector<PlacedMemory> in, out;
      std::vector<Span> inputs, outputs;
      for (int p = 0; p < g.size; ++p) {
        in.push_back(placed(g, place, size(g.rank, p), p));
        in[p].assign(cargo(seed, g.rank, p, in[p].bytes()).data());
        inputs.push_back(span(in[p]));
        out.push_back(placed(g, place, size(p, g.rank), p + 1));
        outputs.push_back(span(out[p]));
      }
      g.run([&](Context& ctx) { all_to_all(ctx, outputs, inputs, kF32); });
      for (const PlacedMemory& b : in) {
        std::memset(b.data(), 0xff, b.bytes());
      }
      for (int p = 0; p < g.size; ++p) {
        CHECK(out[p].holds(cargo(seed, p, g.rank, out[p].bytes()).data()));
      }
    }
  }
}

} // namespace

TEST(collectives_all_reduce) {
  with_groups(all_reduce_sizes);
}

TEST(collectives_all_reduce_types) {
  with_groups(all_reduce_types);
}

TEST(collectives_all_reduce_lists) {
  with_groups(all_reduce_lists);
}

TEST(collectives_reduce) {
  with_groups(reduce_cases);
}

TEST(collectives_reduce_scatter) {
  with_groups(reduce_scatter_cases);
}

TEST(collectives_all_gather) {
  with_groups(all_gather_cases);
}

TEST(collectives_broadcast) {
  with_groups(broadcast_cases);
}

TEST(collectives_gather_scatter) {
  with_groups(gather_scatter_cases);
}

TEST(collectives_all_to_all) {
  with_groups(all_to_all_cases);
}

// No rank leaves before the last has come.
TEST(collectives_barrier_waits) {
  for (int size : {2, 4}) {
    std::atomic<int> here{0};
    with_group(size, 1, [&](Group& g) {
      for (int i = 1; i <= 20; ++i) {
        if ((i + g.rank) % 5 == 0) {
          std::this_thread::sleep_for(milliseconds(2));
        }
        ++here;
        g.run([](Context& ctx) { barrier(ctx); });
        CHECK(here >= i * size);
      }
    });
  }
}

TEST(selector_chunks_fit_the_stage) {
  for (int ranks : {1, 2, 3, 7, 64, 1000}) {
    for (size_t bytes : {size_t{0}, size_t{70000}, size_t{5} << 20}) {
      const size_t chunk =
          select_chunk(bytes, ranks, /*rewrites_slowly=*/false);
      CHECK(chunk * ranks <= kStageBytes);
      const size_t large = select_chunk(bytes, ranks, /*rewrites_slowly=*/true);
      CHECK(large * std::max(ranks - 1, 1) <= kStageBytes);
      for (const size_t bytes_of_lane : {chunk, large}) {
        CHECK(bytes_of_lane >= 64);
        CHECK_EQ(bytes_of_lane % 64, size_t{0});
      }
    }
  }
}
