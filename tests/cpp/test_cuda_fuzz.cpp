// Random steps on the fake GPU. FUSEDPG_FAKE_SEED repeats a seed that a
// failure names; FUSEDPG_FUZZ_SECONDS makes it go on.

#include "cuda_fuzz_steps.hpp"

namespace fusedpg::test {

namespace {

using namespace fuzz; // NOLINT: all of this is about it

// --- worlds ------------------------------------------------------------------

// One group of ranks, and some calls on it.
bool run_world(uint32_t seed) {
  Random random(seed);
  const int size = pick(random, {1, 2, 3, 5});
  const bool has_arena = size > 1 && one_in(random, 2);
  const bool patched = size > 1 && !has_arena && one_in(random, 3);
  setenv("FUSEDPG_FAKE_SEED", std::to_string(seed).c_str(), 1);
  const Clean clean("FUSEDPG_FAKE_PATCHED", patched ? "1" : "0");
  EngineWith with;
  with.settings = cuda_settings(
      pick<size_t>(random, {2048, 4096, size_t{1} << 14, size_t{1} << 20}),
      has_arena ? size_t{2} << 20 : 0);
  with.reach = one_in(random, 2) ? Reach::kMulticast : Reach::kAll;
  with.settings.nccl = patched ? NcclChoice::kPatched : NcclChoice::kAuto;
  with.settings.wide_half_sums = one_in(random, 2);
  std::vector<Plan> plans;
  std::deque<Shared> shared(kOnlyThreads ? 2 : 6);
  for (Shared& one : shared) {
    plans.push_back(draw_plan(random, size, has_arena));
    plans.back().wide_sums = with.settings.wide_half_sums;
    one.ranks.resize(static_cast<size_t>(size));
  }
  const size_t before = failure_count();
  with_gpus(
      size,
      [&](GpuRank& r) {
        hooks().set_delay(0);
        for (size_t i = 0; i < plans.size(); ++i) {
          const std::string wrong =
              Stepper(r, plans[i], shared[i]).run(formatted("plan {}", i));
          if (!wrong.empty()) {
            report_failure(
                __FILE__,
                __LINE__,
                formatted(
                    "FUSEDPG_FAKE_SEED={}, rank {}: {}\n  {}",
                    seed,
                    r.rank,
                    wrong,
                    plans[i].text()));
          }
          r.meet(formatted("after plan {}", i));
        }
      },
      with);
  return CHECK(failure_count() == before);
}

} // namespace

// A fresh seed each time, which is told, and so for each group of ranks.
TEST(cuda_fuzz) {
  const char* given = std::getenv("FUSEDPG_FAKE_SEED");
  const std::string kept = given == nullptr ? "" : given;
  const char* seconds = std::getenv("FUSEDPG_FUZZ_SECONDS");
  const double limit = seconds == nullptr ? 3 : std::strtod(seconds, nullptr);
  uint32_t seed = given == nullptr ? std::random_device()()
                                   : static_cast<uint32_t>(std::stoul(kept));
  std::cout << "cuda_fuzz: FUSEDPG_FAKE_SEED=" << seed << std::endl;
  const auto begin = Clock::now();
  size_t worlds = 0;
  do {
    if (!run_world(seed)) {
      break;
    }
    ++worlds;
    ++seed;
  } while (seconds_since(begin) < limit);
  std::cout << "cuda_fuzz: " << worlds << " groups of ranks" << std::endl;
  if (given == nullptr) {
    unsetenv("FUSEDPG_FAKE_SEED");
  } else {
    setenv("FUSEDPG_FAKE_SEED", kept.c_str(), 1);
  }
  hooks().reset();
}

} // namespace fusedpg::test
