#include "collective_cases.hpp"
#include "collectives/two_shot.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

// Sums whose chunks are so large that a staging buffer does not hold those of
// all owners.
void take_turns(Group& g, size_t granule, int receiver, bool in_arena) {
  // Pieces of odd lengths; each owner has its own number of chunks.
  const size_t count = 5 * granule * static_cast<size_t>(g.size) + 77;
  const size_t bytes = count * sizeof(double);
  PlacedMemory src(g.engine.domain(), bytes, in_arena);
  PlacedMemory dst(g.engine.domain(), bytes, in_arena);
  std::vector<double> want(count);
  for (size_t i = 0; i < count; ++i) {
    src.as<double>()[i] = double((i * 7 + 13 * g.rank) % 1001);
    for (int p = 0; p < g.size; ++p) {
      want[i] += double((i * 7 + 13 * p) % 1001);
    }
    dst.as<double>()[i] = -1;
  }
  Plan plan;
  plan.src_size = plan.dst_size = sizeof(double);
  plan.granule = granule;
  plan.receiver = receiver;
  plan.tensors = {{src.data(), dst.data()}};
  plan.lanes = Plan::shards({count}, g.size);
  const LanePiece own = plan.lanes[g.rank][0];
  std::vector<double> kept(own.count);
  g.run([&](Context& ctx) {
    plan.epilogue = [&](size_t,
                        size_t begin,
                        size_t n,
                        void* const* dsts,
                        size_t num_dsts,
                        const Sources& srcs,
                        bool) {
      CHECK_EQ((begin - own.begin) % granule, size_t{0});
      for (size_t i = 0; i < n; ++i) {
        double sum = 0;
        for (int p = 0; p < g.size; ++p) {
          sum += static_cast<const double*>(srcs.data[p])[i];
        }
        kept[begin - own.begin + i] = sum;
        for (size_t k = 0; k < num_dsts; ++k) {
          static_cast<double*>(dsts[k])[i] = sum;
        }
      }
    };
    OpDescriptor d;
    d.op = OpCode::kAllReduce;
    d.count = count;
    TwoShot(ctx, plan).begin(d);
    TwoShot(ctx, plan).run(d);
  });
  CHECK(std::equal(kept.begin(), kept.end(), want.begin() + own.begin));
  if (receiver == Plan::kAll) {
    CHECK(dst.holds(want.data()));
  }
}

// LAMB's granule is 2 KiB in fp64: 256 ranks fill a staging buffer.
TEST(two_shot_more_owners_than_a_stage_holds) {
  on_threads(5, [](int rank, Store& store) {
    Group g(rank, 5, store);
    for (const bool in_arena : {false, true}) {
      for (const int receiver : {Plan::kNobody, Plan::kAll}) {
        // All five fit, also where a rank has room for four others only; then
        // three of them, two, and one.
        const size_t stage = kStageBytes / sizeof(double);
        for (const size_t owners : {5, 4, 3, 2, 1}) {
          take_turns(g, stage / owners / 8 * 8, receiver, in_arena);
        }
      }
    }
  });
}

TEST(two_shot_piece_larger_than_a_stage) {
  on_threads(2, [](int rank, Store& store) {
    Group g(rank, 2, store);
    expect_error(ErrorKind::kSystem, {"staging buffer"}, [&] {
      take_turns(g, 2 * kStageBytes / sizeof(double), Plan::kNobody, false);
    });
  });
}

} // namespace
