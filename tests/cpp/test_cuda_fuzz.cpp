// Random steps on the fake GPU, whose kernels are the .cu files. FUSEDPG_FAKE_SEED
// repeats a seed that a failure names; FUSEDPG_FUZZ_SECONDS makes it go on.

#include <limits>
#include <random>
#include <sstream>

#include "cuda_training.hpp"

namespace fusedpg::test {

namespace {

using Random = std::mt19937;

size_t below(Random& random, size_t bound) {
  return random() % bound;
}
bool one_in(Random& random, size_t n) {
  return below(random, n) == 0;
}
template <typename T>
T pick(Random& random, std::initializer_list<T> from) {
  return from.begin()[below(random, from.size())];
}

struct Plan {
  uint32_t seed = 0;
  Recipe recipe;
  StepTypes types;
  std::vector<size_t> counts;
  bool in_arena = false;
  bool two_calls = false; // reduce_shards, then the step
  size_t present = 100; // percent of the gradients' blocks that are not zero
  bool mean = true;
  std::vector<double> weights;
  bool scales = false; // gradients, which may overflow
  bool device_lr = false;
  bool uses = false; // flags of used tensors
  bool not_finite = false; // a few gradients are not
  double magnitude = 1; // of gradients
  int steps = 2;

  std::string text() const {
    const StepHyper& h = recipe.hyper;
    std::ostringstream s;
    s << "op " << static_cast<int>(recipe.op) << ", param "
      << dtype_name(types.param) << ", grad " << dtype_name(types.grad)
      << ", state " << dtype_name(types.state) << ", masters " << types.master
      << ", arena " << in_arena << ", two calls " << two_calls << ", present "
      << present << ", mean " << mean << ", weights " << weights.size()
      << ", scales " << scales << ", used " << uses << ", magnitude "
      << magnitude << ", amsgrad " << h.amsgrad << ", momentum " << h.momentum
      << ", nesterov " << h.nesterov << ", maximize " << h.maximize
      << ", decay " << h.weight_decay << ", not finite " << not_finite
      << ", counts";
    for (const size_t count : counts) {
      s << " " << count;
    }
    return s.str();
  }
};

StepTypes draw_types(Random& random) {
  if (one_in(random, 6)) {
    return {kDouble, kDouble, kDouble, false};
  }
  const DType param = pick(random, {kSingle, kHalf, kBHalf});
  const DType grad = pick(random, {kSingle, kHalf, kBHalf});
  const bool half = param != kSingle;
  const DType state = half && one_in(random, 3) ? param : kSingle;
  return {param, grad, state, half && one_in(random, 2)};
}

size_t draw_count(Random& random) {
  switch (below(random, 6)) {
    case 0:
      return pick<size_t>(random, {0, 1, 31, 32, 33, 63, 64, 65});
    case 1:
      return below(random, 300);
    case 2:
      return 4096 + below(random, 5);
    case 3:
      return 32 * below(random, 200);
    default:
      return below(random, 9000);
  }
}

Plan draw_plan(Random& random, int size, bool has_arena) {
  Plan p;
  p.seed = random();
  p.recipe.op = pick(
      random,
      {OpCode::kFusedSgd,
       OpCode::kFusedAdam,
       OpCode::kFusedAdamW,
       OpCode::kFusedLamb});
  const bool sgd = p.recipe.sgd();
  const bool lamb = p.recipe.lamb();
  StepHyper& h = p.recipe.hyper;
  h.lr = pick(random, {0.05, 0.2});
  h.beta1 = pick(random, {0.9, 0.5, 0.0});
  h.beta2 = pick(random, {0.99, 0.9});
  h.eps = pick(random, {1e-3, 1e-2});
  h.weight_decay = pick(random, {0.0, 0.1});
  h.decoupled = p.recipe.op == OpCode::kFusedAdamW;
  h.amsgrad = !sgd && !lamb && one_in(random, 2);
  h.maximize = one_in(random, 4);
  if (sgd) {
    h.momentum = pick(random, {0.0, 0.9, 0.9});
    h.nesterov = h.momentum != 0 && one_in(random, 2);
    h.dampening = h.momentum != 0 && !h.nesterov ? 0.25 : 0;
  }
  h.trust_clip = lamb && one_in(random, 3);
  h.always_adapt = lamb && one_in(random, 3);
  p.types = draw_types(random);
  for (size_t n = 1 + below(random, 4); n > 0; --n) {
    p.counts.push_back(draw_count(random));
  }
  p.in_arena = has_arena && !one_in(random, 4);
  p.two_calls = !p.in_arena && one_in(random, 4);
  p.present = pick<size_t>(random, {0, 3, 50, 100, 100, 100});
  p.mean = !one_in(random, 3);
  if (one_in(random, 3)) {
    p.mean = true;
    for (int r = 0; r < size; ++r) {
      p.weights.push_back(pick(random, {0.3, 1.0, 2.7, 0.5}));
    }
  }
  p.scales = one_in(random, 3);
  p.device_lr = one_in(random, 4);
  p.uses = one_in(random, 4);
  // Of tensors whose first steps are different ones buffers begin as zeros.
  h.first_step = sgd && !p.uses && !p.scales;
  p.not_finite = !lamb && one_in(random, 8);
  p.magnitude = pick(random, {1.0, 1.0, 1.0, 1e-3, 1e-6, 30.0});
  p.steps = 1 + static_cast<int>(below(random, 3));
  return p;
}

void change_gradient(const Plan& p, Bytes& gradient, uint64_t seed) {
  Random random(p.seed + static_cast<uint32_t>(seed));
  const DType type = p.types.grad;
  const size_t count = gradient.size() / dtype_size(type);
  constexpr size_t kBlock = 96;
  bool present = true;
  for (size_t i = 0; i < count; ++i) {
    if (i % kBlock == 0) {
      present = below(random, 100) < p.present;
    }
    const double zero = i % 7 == 3 ? -0.0 : 0.0;
    const double x = p.magnitude * number(type, gradient.data(), i);
    put_number(type, gradient.data(), i, present ? x : zero);
  }
  if (p.not_finite && count != 0) {
    using Limits = std::numeric_limits<double>;
    for (const double x :
         {Limits::infinity(), -Limits::infinity(), Limits::quiet_NaN()}) {
      put_number(type, gradient.data(), below(random, count), x);
    }
  }
}

// The same on all ranks.
void run_plan(GpuRank& r, const Plan& p) {
  Places places;
  places.arena = p.in_arena ? static_cast<char*>(r.engine.arena()) : nullptr;
  // At the same places of all arenas stores go to all ranks at once.
  places.alike = p.seed % 2 == 0;
  places.shifts = p.seed | 1;
  GpuTraining training(r, p.recipe, p.types, p.counts, places);
  training.direct = p.in_arena && !p.recipe.lamb();
  training.call.reduction.mean = p.mean;
  training.weights = p.weights;
  training.change = [&](Bytes& gradient, uint64_t seed) {
    change_gradient(p, gradient, seed);
  };
  int step = 0;
  if (p.uses) {
    training.uses = [&](int rank, size_t t) {
      return (p.seed >> (t + static_cast<size_t>(step)) & 1) == 0 ||
          (p.seed >> (8 + (t + static_cast<size_t>(rank)) % 8) & 3) == 0;
    };
  }
  if (p.scales) {
    training.set_grad_scale(8);
  }
  if (p.device_lr) {
    training.set_lr(p.recipe.hyper.lr, kDouble);
  }
  for (; step < p.steps; ++step) {
    const uint32_t draw = p.seed / 7 + static_cast<uint32_t>(step) * 11;
    const bool overflows = p.scales && draw % 4 == 0;
    if (p.scales) {
      const auto where = draw / 4 % static_cast<uint32_t>(r.size);
      training.set_found_inf(overflows && where == uint32_t(r.rank));
    }
    training.load();
    if (p.two_calls) {
      training.reduce_and_step(p.seed % 3 == 0);
    } else {
      training.step();
    }
    training.check(overflows ? 0 : 1);
    // Nothing lies in every arena.
    const bool nothing =
        std::all_of(p.counts.begin(), p.counts.end(), [](size_t count) {
          return count == 0;
        });
    const std::string path = r.engine.path_of_last_step();
    CHECK(nothing || (path == "direct") == training.direct);
  }
  r.engine.drain(kLong); // nobody uses this part of the arena
}

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
  std::vector<Plan> plans(kOnlyThreads ? 2 : 6);
  for (Plan& plan : plans) {
    plan = draw_plan(random, size, has_arena);
  }
  const size_t before = failure_count();
  with_gpus(
      size,
      [&](GpuRank& r) {
        hooks().set_delay(0);
        for (const Plan& plan : plans) {
          const size_t failures = failure_count();
          run_plan(r, plan);
          if (failure_count() != failures) {
            report_failure(
                __FILE__,
                __LINE__,
                formatted(
                    "FUSEDPG_FAKE_SEED={}, rank {} of {}: {}",
                    seed,
                    r.rank,
                    size,
                    plan.text()));
          }
          r.meet(formatted("after plan {}", &plan - plans.data()));
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
