// Random steps and sums on the fake GPU. FUSEDPG_FAKE_SEED repeats a seed that a
// failure names; FUSEDPG_FUZZ_SECONDS makes it go on.

#include "cuda_fuzz_steps.hpp"

namespace fusedpg::test {

namespace {

using namespace fuzz; // NOLINT: all of this is about it

// --- all-reduces that skip blocks of zeros ------------------------------------

struct SumPlan {
  uint32_t seed = 0;
  DType type = kSingle;
  size_t count = 0;
  size_t block = 0;
  size_t present = 100; // percent of a rank's blocks
  bool mean = false;
  bool in_arena = false;
};

SumPlan draw_sum(Random& random, bool has_arena) {
  SumPlan p;
  p.seed = random();
  p.type = pick(
      random, {kSingle, kDouble, kHalf, kBHalf, DType::kInt32, DType::kInt64});
  p.count = 1 + draw_count(random);
  p.block = pick<size_t>(random, {32, 33, 100, 256, 1000, 4096});
  p.present = pick<size_t>(random, {0, 5, 50, 100});
  const bool whole = p.type == DType::kInt32 || p.type == DType::kInt64;
  p.mean = !whole && one_in(random, 2);
  p.in_arena = has_arena && !one_in(random, 4);
  return p;
}

// Small whole numbers: their sums are exact in every type and order.
std::vector<int> contribution(const SumPlan& p, int rank) {
  Random random(p.seed + static_cast<uint32_t>(rank));
  std::vector<int> values(p.count);
  bool present = true;
  for (size_t i = 0; i < p.count; ++i) {
    if (i % p.block == 0) {
      present = below(random, 100) < p.present;
    }
    values[i] = present ? static_cast<int>(below(random, 17)) - 8 : 0;
  }
  return values;
}

std::string run_sum(GpuRank& r, const SumPlan& p) {
  Random place(p.seed * 17 + static_cast<uint32_t>(r.rank));
  const size_t size = dtype_size(p.type);
  char* arena = static_cast<char*>(r.engine.arena());
  arena += arena == nullptr ? 0 : 1024 * static_cast<ptrdiff_t>(r.rank);
  const Held data(
      p.count * size, size * below(place, 4), p.in_arena ? &arena : nullptr);
  const auto store = [&](size_t i, int64_t x) {
    const auto narrow = static_cast<int32_t>(x);
    if (p.type == DType::kInt64) {
      std::memcpy(data.data() + 8 * i, &x, 8);
    } else if (p.type == DType::kInt32) {
      std::memcpy(data.data() + 4 * i, &narrow, 4);
    } else {
      put(p.type, data.data(), i, static_cast<double>(x));
    }
  };
  const auto load = [&](size_t i) -> double {
    int64_t wide = 0;
    int32_t narrow = 0;
    if (p.type == DType::kInt64) {
      std::memcpy(&wide, data.data() + 8 * i, 8);
      return static_cast<double>(wide);
    }
    if (p.type == DType::kInt32) {
      std::memcpy(&narrow, data.data() + 4 * i, 4);
      return narrow;
    }
    return number(p.type, data.data(), i);
  };
  std::vector<int64_t> want(p.count);
  for (int rank = 0; rank < r.size; ++rank) {
    const std::vector<int> values = contribution(p, rank);
    for (size_t i = 0; i < p.count; ++i) {
      want[i] += values[i];
      if (rank == r.rank) {
        store(i, values[i]);
      }
    }
  }
  CudaEngine::SkipCall call;
  call.data = data.data();
  call.count = p.count;
  call.dtype = p.type;
  call.mean = p.mean;
  call.block = p.block;
  if (p.in_arena != r.engine.can_sum_directly(call)) {
    return "another path";
  }
  if (p.in_arena) {
    finish(r.engine.direct_sum(call, r.from()).operation);
  } else {
    const CudaEngine::SkipFind find = r.engine.find_blocks(call, r.from());
    const auto found = r.engine.found_blocks(find).blocks_union;
    finish(r.engine.reduce_blocks(call, r.from(), find, found));
  }
  r.engine.drain(kLong);
  for (size_t i = 0; i < p.count; ++i) {
    const double x = static_cast<double>(want[i]) /
        (p.mean ? static_cast<double>(r.size) : 1);
    if (!(std::fabs(load(i) - x) <=
          (p.mean ? 2 * rounding(p.type) : 0) * std::fabs(x))) {
      return formatted("element {}: {} != {}", i, load(i), x);
    }
  }
  return data.guards_intact() ? "" : "guards";
}

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
  with.settings.cuda_multimem = one_in(random, 2);
  with.settings.nccl = patched ? NcclChoice::kPatched : NcclChoice::kAuto;
  std::vector<Plan> plans;
  std::vector<SumPlan> sums;
  std::deque<Shared> shared(kOnlyThreads ? 2 : 6);
  for (Shared& one : shared) {
    plans.push_back(draw_plan(random, size, has_arena));
    sums.push_back(draw_sum(random, has_arena));
    one.ranks.resize(static_cast<size_t>(size));
  }
  const size_t before = failure_count();
  with_gpus(
      size,
      [&](GpuRank& r) {
        hooks().set_delay(0);
        for (size_t i = 0; i < plans.size(); ++i) {
          const auto said = [&](const std::string& wrong,
                                const std::string& of) {
            if (!wrong.empty()) {
              report_failure(
                  __FILE__,
                  __LINE__,
                  formatted(
                      "FUSEDPG_FAKE_SEED={}, rank {}: {}\n  {}",
                      seed,
                      r.rank,
                      wrong,
                      of));
            }
          };
          said(
              Stepper(r, plans[i], shared[i]).run(formatted("plan {}", i)),
              plans[i].text());
          const SumPlan& sum = sums[i];
          said(
              run_sum(r, sum),
              formatted(
                  "sum of {} {}, blocks of {}, {}% present, arena {}, mean {}",
                  sum.count,
                  dtype_name(sum.type),
                  sum.block,
                  sum.present,
                  sum.in_arena,
                  sum.mean));
          r.meet(formatted("sum {}", i));
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
