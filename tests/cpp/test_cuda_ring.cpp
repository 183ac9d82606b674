// The CUDA engine on a fake of a patched NCCL.

#include "cuda_steps.hpp"

namespace fusedpg::test {

using namespace cuda; // NOLINT: all of this is about it

// The ring of a patched NCCL: the numbers of the stock path.
TEST(cuda_engine_patched_ring) {
  const Clean clean("FUSEDPG_FAKE_PATCHED", "1");
  EngineWith with;
  with.settings.nccl = NcclChoice::kPatched;
  for (int size = 2; size <= (kSanitized ? 2 : 4); ++size) {
    with_gpus(
        size,
        [](GpuRank& r) {
          train(r);
          const auto path = [&](const Recipe& recipe, const StepTypes& types) {
            GpuTraining training(r, recipe, types, {9001, 31});
            training.load();
            training.step();
            training.check();
            return std::string(r.engine.path_of_last_step());
          };
          const StepTypes doubles{kDouble, kDouble, kDouble, false};
          const StepTypes mixed{kSingle, DType::kBFloat16, kSingle, false};
          const StepTypes masters{
              DType::kBFloat16, DType::kBFloat16, kSingle, true};
          CHECK_EQ(path(adam(), kSingles), "ring");
          CHECK_EQ(path(adam(), masters), "ring");
          CHECK_EQ(path(adam(), mixed), "stock");
          CHECK_EQ(path(adam(), doubles), "stock");
          CHECK_EQ(path(recipe(OpCode::kFusedLamb), kSingles), "ring");
          CHECK_EQ(path(recipe(OpCode::kFusedLamb), mixed), "stock");
        },
        with);
  }
  CHECK_EQ(hooks().now().mismatches, 0u);
  CHECK_EQ(hooks().now().bad_handles, 0u);
  CHECK_EQ(hooks().now().freed_written, 0u);
}

TEST(cuda_engine_chooses_a_ring) {
  const auto path = [](NcclChoice choice, bool spans_hosts) {
    EngineWith with;
    with.settings.nccl = choice;
    with.spans_hosts = spans_hosts;
    std::string found[2];
    with_gpus(
        2,
        [&](GpuRank& r) {
          GpuTraining training(r, adam(), kSingles, {3000});
          training.load();
          training.step();
          training.check();
          found[r.rank] = r.engine.path_of_last_step();
        },
        with);
    CHECK_EQ(found[0], found[1]);
    return found[0];
  };
  {
    const Clean clean("FUSEDPG_FAKE_PATCHED", "1");
    CHECK_EQ(path(NcclChoice::kAuto, false), "stock");
    CHECK_EQ(path(NcclChoice::kAuto, true), "ring");
    CHECK_EQ(path(NcclChoice::kPatched, false), "ring");
    CHECK_EQ(path(NcclChoice::kStock, true), "stock");
  }
  const Clean clean;
  CHECK_EQ(path(NcclChoice::kAuto, true), "stock");
  EngineWith with;
  with.settings.nccl = NcclChoice::kPatched;
  const auto make = [&](const NcclApi& nccl) {
    // Before it meets anybody.
    CudaEngine(
        gpu(),
        nccl,
        0,
        2,
        0,
        with.settings,
        true,
        nullptr,
        nullptr,
        Deadline(kLong));
  };
  CHECK_THROWS(make(*with.nccl), Error, "patched by another version");
  NcclApi bare = *with.nccl;
  bare.ring_abi = nullptr;
  CHECK_THROWS(make(bare), Error, "is not patched");
}

// A partial build, whose ring is kernels that do nothing.
TEST(cuda_engine_refuses_an_empty_ring) {
  const Clean clean("FUSEDPG_FAKE_PATCHED", "2");
  EngineWith with;
  with.settings.nccl = NcclChoice::kPatched;
  on_threads(2, [&](int rank, Store& store) {
    expect_error(
        ErrorKind::kSystem,
        {"wrong results for float16", "patches/nccl/README.md"},
        [&] { GpuRank r(rank, 2, store, with); });
  });
}

} // namespace fusedpg::test
