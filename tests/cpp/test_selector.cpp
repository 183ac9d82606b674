// What the selectors choose: rows of a configuration and a choice, borders
// among them.

#include "base/error.hpp"
#include "check.hpp"
#include "collectives/selector.hpp"
#include "cuda/launch.hpp"
#include "cuda/layout.hpp"
#include "cuda/selector.hpp"

namespace {

using namespace fusedpg;
using Choice = DensityEstimates::Choice;

constexpr size_t kKiB = 1024;
constexpr size_t kMiB = 1024 * kKiB;

// Calls choose(row.config) for each; says the number of those that err.
template <typename Row, size_t N, typename Choose>
void check_rows(const Row (&rows)[N], const Choose& choose) {
  for (size_t i = 0; i < N; ++i) {
    if (!(choose(rows[i].config) == rows[i].wanted)) {
      fusedpg::test::report_failure(__FILE__, __LINE__, formatted("row {}", i));
    }
  }
}

TEST(selector_one_shot) {
  struct Row {
    struct {
      size_t bytes;
      bool in_arena;
    } config;
    bool wanted;
  };
  const Row rows[] = {
      {{0, false}, true},
      {{32 * kKiB, false}, true},
      {{32 * kKiB + 1, false}, false},
      {{8 * kKiB, true}, true},
      {{8 * kKiB + 1, true}, false}};
  check_rows(
      rows, [](const auto& c) { return select_one_shot(c.bytes, c.in_arena); });
}

TEST(selector_chunk_and_stream) {
  struct Row {
    struct {
      size_t bytes;
      int ranks;
      bool slow;
    } config;
    size_t wanted; // of one lane
  };
  const Row rows[] = {
      {{1, 2, false}, 32 * kKiB},
      {{128 * kKiB, 2, false}, 32 * kKiB},
      {{256 * kKiB, 2, false}, 64 * kKiB},
      {{kMiB, 4, false}, 64 * kKiB},
      {{100 * kMiB, 4, false}, 64 * kKiB},
      {{kMiB, 3, false}, 256 * kKiB / 3 / 64 * 64},
      {{0, 8192, false}, 64},
      // Only large operations get larger chunks where lines are slow to rewrite.
      {{1, 2, true}, 32 * kKiB},
      {{512 * kKiB, 2, true}, 128 * kKiB},
      {{kMiB, 2, true}, 256 * kKiB},
      {{100 * kMiB, 1, true}, 512 * kKiB},
      {{100 * kMiB, 2, true}, 512 * kKiB},
      {{100 * kMiB, 4, true}, 512 * kKiB / 3 / 64 * 64},
      {{0, 8192, true}, 64}};
  check_rows(rows, [](const auto& c) {
    return select_chunk(c.bytes, c.ranks, c.slow);
  });
  CHECK(!select_stream(4 * kMiB - 1) && select_stream(4 * kMiB));
}

TEST(selector_skip) {
  struct Row {
    SkipConfig config;
    Choice wanted;
    bool estimates;
  };
  const size_t large = kOneShotBytes + 1;
  const Row rows[] = {
      {{BlockSkip::kOff, 2, large, true, Choice::kSkip}, Choice::kDense, false},
      {{BlockSkip::kOn, 2, large, true, Choice::kDense}, Choice::kSkip, false},
      {{BlockSkip::kOn, 1, large, true}, Choice::kDense, false},
      {{BlockSkip::kOn, 2, large - 1, true}, Choice::kDense, false},
      {{BlockSkip::kOn, 2, large, false}, Choice::kDense, false},
      {{BlockSkip::kAuto, 2, large, true}, Choice::kProbe, true},
      {{BlockSkip::kAuto, 2, large, true, Choice::kSkip}, Choice::kSkip, true},
      {{BlockSkip::kAuto, 2, large, true, Choice::kDense},
       Choice::kDense,
       true},
      {{BlockSkip::kAuto, 2, large - 1, true}, Choice::kDense, false},
      {{BlockSkip::kAuto, 1, large, true}, Choice::kDense, false},
      {{BlockSkip::kAuto, 2, large, false}, Choice::kDense, false}};
  check_rows(rows, select_skip);
  for (const Row& row : rows) {
    CHECK_EQ(select_estimate(row.config), row.estimates);
  }
}

TEST(selector_plan_skip) {
  struct Row {
    PlanSkipConfig config;
    bool wanted;
  };
  const Row rows[] = {
      {{2, false, false}, true},
      {{2, true, false}, false},
      {{1, false, false}, false},
      {{1, false, true}, true},
      {{2, true, true}, true}};
  check_rows(rows, select_plan_skip);
  // A path that moves less by itself gains less by skipping.
  CHECK(
      select_skip_limit({true, true}) < select_skip_limit({true, false}) &&
      select_skip_limit({true, false}) == select_skip_limit({false, false}));
}

TEST(selector_hosts) {
  CHECK_EQ(select_net_segment(1000, false), 252 * kKiB);
  CHECK_EQ(select_net_segment(16, true), 252 * kKiB);
  CHECK_EQ(select_net_segment(32, true), 128 * kKiB);
  CHECK_EQ(select_net_segment(1000, true), 64 * kKiB);
  CHECK(
      select_net_one_shot(64 * kKiB, 3) && !select_net_one_shot(64 * kKiB, 4));
  CHECK(!select_net_skip(256 * kKiB - 1) && select_net_skip(256 * kKiB));
}

// --- GPUs --------------------------------------------------------------------

TEST(selector_cuda_ring) {
  struct Row {
    cuda::RingConfig config;
    bool wanted;
  };
  const Row rows[] = {
      {{2, true, NcclChoice::kAuto, true}, true},
      {{2, true, NcclChoice::kAuto, false}, false},
      {{2, true, NcclChoice::kPatched, false}, true},
      {{2, true, NcclChoice::kStock, true}, false},
      {{2, false, NcclChoice::kAuto, true}, false},
      {{1, true, NcclChoice::kPatched, true}, false}};
  check_rows(rows, cuda::select_ring);
}

TEST(selector_cuda_step) {
  struct Row {
    cuda::StepConfig config;
    GpuPath wanted;
  };
  constexpr DType kSingle = DType::kFloat32;
  constexpr DType kHalf = DType::kBFloat16;
  constexpr DType kDouble = DType::kFloat64;
  const Row rows[] = {
      {{true, true, false, kSingle, kSingle}, GpuPath::kStock},
      {{true, true, false, kSingle, kSingle, true, true, true},
       GpuPath::kDirect},
      {{true, true, false, kHalf, kSingle, true, true, false},
       GpuPath::kDirect},
      {{true, true, false, kSingle, kSingle, false, true, false},
       GpuPath::kStock},
      {{true, true, false, kSingle, kSingle, true, false, false},
       GpuPath::kStock},
      {{true, true, true, kSingle, kSingle, true, true, false},
       GpuPath::kStock},
      {{true, true, true, kSingle, kSingle, true, true, true}, GpuPath::kRing},
      {{false, true, false, kSingle, kSingle, true, true, true},
       GpuPath::kStock},
      {{true, false, false, kSingle, kSingle, true, true, true},
       GpuPath::kStock},
      {{true, true, false, kSingle, kSingle, false, false, true},
       GpuPath::kRing},
      {{true, true, false, kHalf, kSingle, false, false, true},
       GpuPath::kStock},
      {{true, true, false, kDouble, kDouble, false, false, true},
       GpuPath::kStock},
      // Generated programs, whose kernels neither of the others knows.
      {{true, true, false, kSingle, kSingle, true, true, false, true},
       GpuPath::kStock},
      {{true, true, false, kSingle, kSingle, false, false, true, true},
       GpuPath::kStock},
      {{true, true, false, kSingle, kSingle, true, true, true, true},
       GpuPath::kStock},
      {{true, true, false, kHalf, kHalf, true, true, true, true},
       GpuPath::kStock}};
  check_rows(rows, cuda::select_step_path);
}

TEST(selector_cuda_chunks) {
  const auto whole = [](bool updates, bool weighted, GpuPath path, DType grad) {
    cuda::StepConfig c;
    c.updates = updates;
    c.grad_type = grad;
    c.param_type = DType::kBFloat16;
    return cuda::select_whole(c, path, weighted);
  };
  const size_t never = ~size_t(0);
  CHECK_EQ(whole(true, false, GpuPath::kStock, DType::kBFloat16), kMiB / 2);
  CHECK_EQ(whole(true, false, GpuPath::kStock, DType::kFloat32), kMiB / 4);
  CHECK_EQ(whole(false, false, GpuPath::kStock, DType::kBFloat16), never);
  CHECK_EQ(whole(true, true, GpuPath::kStock, DType::kBFloat16), never);
  CHECK_EQ(whole(true, false, GpuPath::kRing, DType::kBFloat16), never);
}

TEST(selector_cuda_rides) {
  const auto rides = [](int size,
                        bool weighted,
                        DType type = DType::kFloat32,
                        GpuPath path = GpuPath::kStock,
                        bool reduces = true) {
    cuda::StepConfig c;
    c.world_size = size;
    c.grad_type = type;
    c.reduces = reduces;
    return cuda::select_rides(c, path, weighted);
  };
  CHECK(rides(2, false));
  CHECK(rides(2, true));
  CHECK(!rides(1, false));
  CHECK(!rides(2, false, DType::kFloat32, GpuPath::kStock, false));
  CHECK(!rides(2, false, DType::kFloat32, GpuPath::kRing));
  CHECK(!rides(2, false, DType::kFloat32, GpuPath::kDirect));
  CHECK(rides(1000, false));
  CHECK(rides(64, true));
  CHECK(!rides(65, true));
  CHECK(rides(65, true, DType::kBFloat16)); // by bytes, in an all-to-all
}

TEST(selector_cuda_folds) {
  cuda::StepConfig c;
  c.world_size = 2;
  const auto folds = [&](DType type, GpuPath path = GpuPath::kStock) {
    c.grad_type = type;
    return cuda::select_folds(c, path);
  };
  CHECK(folds(DType::kBFloat16));
  CHECK(folds(DType::kFloat16));
  CHECK(!folds(DType::kFloat32));
  CHECK(!folds(DType::kFloat64));
  CHECK(!folds(DType::kBFloat16, GpuPath::kRing));
  CHECK(!folds(DType::kBFloat16, GpuPath::kDirect));
  const auto but = [&](bool cuda::StepConfig::* field, bool value) {
    cuda::StepConfig other = c;
    other.grad_type = DType::kBFloat16;
    other.*field = value;
    return cuda::select_folds(other, GpuPath::kStock);
  };
  CHECK(!but(&cuda::StepConfig::wide_half_sums, false));
  CHECK(!but(&cuda::StepConfig::reduces, false));
  CHECK(!but(&cuda::StepConfig::generated, true));
  CHECK(but(&cuda::StepConfig::updates, false));
  c.world_size = 1;
  CHECK(!folds(DType::kBFloat16));
  // The ring would round the sums.
  c = {};
  c.has_ring = true;
  c.grad_type = c.param_type = DType::kBFloat16;
  CHECK(cuda::select_step_path(c) == GpuPath::kStock);
  c.wide_half_sums = false;
  CHECK(cuda::select_step_path(c) == GpuPath::kRing);
}

TEST(selector_cuda_chunk_bytes) {
  struct Row {
    cuda::ChunkConfig config;
    size_t wanted;
  };
  const Row rows[] = {
      {{0, 2, false}, kMiB},
      {{1 << 10, 8, false}, kMiB},
      {{1 << 20, 8, false}, 4 * kMiB}, // one chunk
      {{25 << 20, 8, false}, 16 * kMiB}, // a bucket of DDP
      {{25 << 20, 16, true}, 64 * kMiB},
      {{size_t(250) << 20, 8, false}, 64 * kMiB},
      {{size_t(2) << 30, 2, false}, 128 * kMiB},
      {{size_t(2) << 30, 8, false}, 128 * kMiB},
      {{size_t(2) << 30, 16, true}, 128 * kMiB},
      {{size_t(1) << 40, 16, true}, 128 * kMiB}};
  check_rows(rows, cuda::select_chunk_bytes);
  // A step of 2 GiB is some 30 calls of NCCL. In chunks of 32 MiB it was 129.
  const std::vector<size_t> counts(64, (size_t(1) << 24) + 8);
  const size_t block = cuda::select_chunk_bytes(rows[7].config) / 2 / 8;
  const auto layout = cuda::make_layout(counts, 8, block, ~size_t(0));
  CHECK_EQ(2 * layout.chunks.size(), 34u);
}

TEST(selector_moves_between_hosts) {
  constexpr size_t kKiB = 1024;
  CHECK(select_net_inline(0, 0));
  CHECK(select_net_inline(128 * kKiB, 32 * kKiB));
  CHECK(!select_net_inline(128 * kKiB + 1, 32 * kKiB));
  CHECK(!select_net_inline(40 * kKiB, 32 * kKiB + 1));
  const struct {
    size_t bytes;
    int hosts;
    NetSpread wanted;
  } rows[] = {
      {1024 * kKiB, 2, NetSpread::kDirect},
      {1024 * kKiB, 3, NetSpread::kChain},
      {1023 * kKiB, 3, NetSpread::kDirect},
      {512 * kKiB, 4, NetSpread::kChain}};
  for (const auto& row : rows) {
    CHECK(select_net_spread(row.bytes, row.hosts) == row.wanted);
  }
  for (const int size : {2, 3, 7, 8, 9, 100}) {
    const size_t most = net_stage_bytes(size) / static_cast<size_t>(size);
    CHECK(most >= 64 * kKiB && most <= 512 * kKiB);
    for (const auto spread : {NetSpread::kDirect, NetSpread::kChain}) {
      for (const size_t bytes : {size_t{1}, 900 * kKiB, size_t{1} << 30}) {
        const size_t one = select_move_segment(bytes, size, 3, spread);
        CHECK(one >= 64 * kKiB && one <= most && one % 64 == 0);
      }
    }
  }
}

} // namespace
