// The CUDA engine on a fake of a patched NCCL.

#include "cuda_steps.hpp"

namespace fusedpg::test {

using namespace cuda; // NOLINT: all of this is about it

// The ring of a patched NCCL: the numbers of the stock path.
TEST(cuda_engine_patched_ring) {
  const Clean clean("FUSEDPG_FAKE_PATCHED", "1");
  EngineWith with;
  with.settings.nccl = NcclChoice::kPatched;
  with.settings.wide_half_sums = false;
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

// Where a patched NCCL is asked for.
TEST(cuda_engine_without_a_ring) {
  const Clean clean;
  Settings settings = cuda_settings();
  settings.nccl = NcclChoice::kPatched;
  const auto make = [&](const NcclApi& nccl) {
    // Before it meets anybody.
    CudaEngine(
        gpu(),
        nccl,
        0,
        2,
        0,
        settings,
        true,
        nullptr,
        nullptr,
        Deadline(kLong),
        nullptr);
  };
  NcclApi bare = fake_gpu::nccl();
  CHECK_THROWS(make(bare), Error, "patched by another version");
  bare.ring_abi = nullptr;
  CHECK_THROWS(make(bare), Error, "is not patched");
}

namespace {

// What a communicator kept goes with it, which nobody waits for.
void wait_for_its_end() {
  const Deadline deadline(kLong);
  while (hooks().now().streams != 0 && CHECK(!deadline.expired())) {
    std::this_thread::sleep_for(milliseconds(1));
  }
}

} // namespace

// A library whose functions do nothing, or not all that they should.
TEST(cuda_engine_refuses_a_wrong_ring) {
  const auto refused = [](const char* kind, const std::string& what) {
    const Clean clean("FUSEDPG_FAKE_PATCHED", kind);
    EngineWith with;
    with.settings = cuda_settings(0);
    with.settings.nccl = NcclChoice::kPatched;
    on_threads(2, [&](int rank, Store& store) {
      expect_error(
          ErrorKind::kSystem,
          {"wrong results for " + what, "patches/nccl/README.md"},
          [&] { GpuRank r(rank, 2, store, with); });
    });
    wait_for_its_end();
  };
  // A partial build: all functions are empty, or one protocol's.
  refused("2", "SGD of float32 in buffers of 524288 bytes by the protocol");
  refused("3", "SGD of float32 in buffers of 32768 bytes by the protocol");
  refused("4", "LAMB's norms of float32 in buffers of 2048 bytes by LL,");
  refused("5", "Adam with amsgrad of float32 in buffers of 2048 bytes by LL,");
  refused("6", "SGD with Nesterov's momentum of float32");
}

// Which NCCL would not choose for the sizes that are tried; and what it has
// switched off is not missed.
TEST(cuda_engine_tries_all_protocols_of_a_ring) {
  const Clean clean("FUSEDPG_FAKE_PATCHED", "3");
  EngineWith with;
  with.settings = cuda_settings(2048);
  with.settings.nccl = NcclChoice::kPatched;
  on_threads(2, [&](int rank, Store& store) {
    expect_error(
        ErrorKind::kSystem,
        {"wrong results for SGD of float32 in buffers of 2048 bytes by LL128,"},
        [&] { GpuRank r(rank, 2, store, with); });
  });
  wait_for_its_end();
  setenv("FUSEDPG_FAKE_PROTOCOLS", "5", 1);
  with_gpus(2, [](GpuRank&) {}, with);
  unsetenv("FUSEDPG_FAKE_PROTOCOLS");
}

// Whatever the chunks' size is.
TEST(cuda_engine_ring_check_needs_little_memory) {
  const Clean clean("FUSEDPG_FAKE_PATCHED", "1");
  EngineWith with;
  with.settings = cuda_settings(0);
  with.settings.nccl = NcclChoice::kPatched;
  for (const int size : {2, 4}) {
    // Of all ranks, which are threads here.
    const std::string bytes = std::to_string(size * (4 << 20));
    setenv("FUSEDPG_FAKE_MEMORY", bytes.c_str(), 1);
    with_gpus(size, [](GpuRank&) {}, with);
  }
  unsetenv("FUSEDPG_FAKE_MEMORY");
}

} // namespace fusedpg::test
