#pragma once

#include <cmath>
#include <deque>
#include <limits>
#include <random>
#include <sstream>

#include "cuda_cases.hpp"
#include "fused_reference.hpp"

// What random steps on the fake GPU are about, and their tensors.
namespace fusedpg::test::fuzz {

using Random = std::mt19937;

inline size_t below(Random& random, size_t bound) {
  return random() % bound;
}
inline bool one_in(Random& random, size_t n) {
  return below(random, n) == 0;
}
template <typename T>
inline T pick(Random& random, std::initializer_list<T> from) {
  return from.begin()[below(random, from.size())];
}

inline void put(DType type, void* data, size_t i, double x) {
  const auto narrow = static_cast<float>(x);
  uint16_t half = 0;
  switch (type) {
    case DType::kFloat64:
      std::memcpy(static_cast<char*>(data) + 8 * i, &x, 8);
      return;
    case DType::kFloat32:
      std::memcpy(static_cast<char*>(data) + 4 * i, &narrow, 4);
      return;
    case DType::kFloat16:
      half = nearest_half(narrow);
      break;
    default:
      half = nearest_bfloat(narrow);
  }
  std::memcpy(static_cast<char*>(data) + 2 * i, &half, 2);
}

inline double in_type(DType type, double x) {
  char bytes[8];
  put(type, bytes, 0, x);
  return number(type, bytes, 0);
}

// Memory at a random alignment, guarded on both sides.
class Held {
 public:
  Held() = default;
  // In the arena from `place` on, which goes on, or in memory of its own.
  Held(size_t bytes, size_t shift, char** place)
      : room_(
            std::make_unique<GpuBuffer>(
                bytes + 2 * kPad,
                place != nullptr ? *place : nullptr)),
        shift_(shift),
        bytes_(bytes) {
    std::memset(room_->data(), kFill, room_->bytes());
    if (place != nullptr) {
      *place += (room_->bytes() + 32 + 511) / 512 * 512;
    }
  }
  char* data() const {
    return room_->data() + kPad / 2 + shift_;
  }
  size_t bytes() const {
    return bytes_;
  }
  bool guards_intact() const {
    if (room_ == nullptr) {
      return true;
    }
    const char* all = room_->data();
    const size_t begin = kPad / 2 + shift_;
    for (size_t i = 0; i < room_->bytes(); ++i) {
      if ((i < begin || i >= begin + bytes_) && all[i] != kFill) {
        return false;
      }
    }
    return true;
  }

 private:
  static constexpr size_t kPad = 128;
  static constexpr char kFill = 0x3c;
  std::unique_ptr<GpuBuffer> room_;
  size_t shift_ = 0;
  size_t bytes_ = 0;
};

// --- steps -------------------------------------------------------------------

struct Plan {
  uint32_t seed = 0;
  int size = 1;
  OpCode op = OpCode::kFusedAdamW;
  StepHyper hyper;
  StepTypes types;
  std::vector<size_t> counts;
  bool in_arena = false;
  bool two_calls = false; // reduce_shards, then the step
  size_t present = 100; // percent of the gradients' blocks that are not zero
  bool mean = true;
  bool wide_sums = true; // of half gradients
  std::vector<double> weights;
  float grad_scale = 0; // 0: none
  bool device_lr = false;
  bool uses = false; // flags of used tensors
  bool not_finite = false; // a few gradients are not
  double magnitude = 1; // of gradients
  int steps = 2;

  DType compute() const {
    return types.param == kDouble ? kDouble : kSingle;
  }
  bool lamb() const {
    return op == OpCode::kFusedLamb;
  }
  bool sgd() const {
    return op == OpCode::kFusedSgd;
  }
  size_t states() const {
    return sgd() ? (hyper.momentum != 0 ? 1 : 0) : hyper.amsgrad ? 3 : 2;
  }
  bool counts_steps() const {
    return !sgd();
  }
  std::string text() const {
    std::ostringstream s;
    s << size << " ranks, op " << static_cast<int>(op) << ", param "
      << dtype_name(types.param) << ", grad " << dtype_name(types.grad)
      << ", state " << dtype_name(types.state) << ", masters " << types.master
      << ", arena " << in_arena << ", two calls " << two_calls << ", present "
      << present << ", mean " << mean << ", weights " << weights.size()
      << ", scale " << grad_scale << ", used " << uses << ", magnitude "
      << magnitude << ", amsgrad " << hyper.amsgrad << ", momentum "
      << hyper.momentum << ", nesterov " << hyper.nesterov << ", maximize "
      << hyper.maximize << ", decay " << hyper.weight_decay << ", not finite "
      << not_finite << ", counts";
    for (const size_t count : counts) {
      s << " " << count;
    }
    return s.str();
  }
};

inline StepTypes draw_types(Random& random) {
  if (one_in(random, 6)) {
    return {kDouble, kDouble, kDouble, false};
  }
  const DType param = pick(random, {kSingle, kHalf, kBHalf});
  const DType grad = pick(random, {kSingle, kHalf, kBHalf});
  const bool half = param != kSingle;
  const DType state = half && one_in(random, 3) ? param : kSingle;
  return {param, grad, state, half && one_in(random, 2)};
}

inline size_t draw_count(Random& random) {
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

inline Plan draw_plan(Random& random, int size, bool has_arena) {
  Plan p;
  p.seed = random();
  p.size = size;
  p.op = pick(
      random,
      {OpCode::kFusedSgd,
       OpCode::kFusedAdam,
       OpCode::kFusedAdamW,
       OpCode::kFusedLamb});
  StepHyper& h = p.hyper;
  h.lr = pick(random, {0.05, 0.2});
  h.beta1 = pick(random, {0.9, 0.5, 0.0});
  h.beta2 = pick(random, {0.99, 0.9});
  h.eps = pick(random, {1e-3, 1e-2});
  h.weight_decay = pick(random, {0.0, 0.1});
  h.decoupled = p.op == OpCode::kFusedAdamW;
  h.amsgrad = !p.sgd() && !p.lamb() && one_in(random, 2);
  h.maximize = one_in(random, 4);
  if (p.sgd()) {
    h.momentum = pick(random, {0.0, 0.9, 0.9});
    h.nesterov = h.momentum != 0 && one_in(random, 2);
    h.dampening = h.momentum != 0 && !h.nesterov ? 0.25 : 0;
  }
  h.trust_clip = p.lamb() && one_in(random, 3);
  h.always_adapt = p.lamb() && one_in(random, 3);
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
  p.grad_scale = one_in(random, 3) ? 8.0F : 0.0F;
  p.device_lr = one_in(random, 4);
  p.uses = one_in(random, 4);
  // Of tensors whose first steps are different ones buffers begin as zeros.
  h.first_step = p.sgd() && !p.uses && p.grad_scale == 0;
  p.not_finite = !p.lamb() && one_in(random, 8);
  p.magnitude = pick(random, {1.0, 1.0, 1.0, 1e-3, 1e-6, 30.0});
  p.steps = 1 + static_cast<int>(below(random, 3));
  return p;
}

// One rank's tensors.
struct Tensors {
  struct One {
    Held param, grad, output, master, state[3];
    float step = 0;
  };
  std::deque<One> all;
  Bytes used;
  float found_inf = 0;
  double lr_double = 0;
  float grad_scale = 0;
};

// What all ranks of a plan share: rank 0 looks at everybody's memory.
struct Shared {
  std::deque<Tensors> ranks;
};

inline bool uses(const Plan& p, int step, int rank, size_t t) {
  return (p.seed >> (t + static_cast<size_t>(step)) & 1) == 0 ||
      (p.seed >> (8 + (t + static_cast<size_t>(rank)) % 8) & 3) == 0;
}
inline bool any_uses(const Plan& p, int step, size_t t) {
  bool any = !p.uses;
  for (int r = 0; r < p.size; ++r) {
    any = any || uses(p, step, r, t);
  }
  return any;
}
// On which rank an infinity was found; -1: on none.
inline int overflows(const Plan& p, int step) {
  const uint32_t draw = p.seed / 7 + static_cast<uint32_t>(step) * 11;
  return p.grad_scale != 0 && draw % 4 == 0
      ? static_cast<int>(draw / 4 % static_cast<uint32_t>(p.size))
      : -1;
}

inline std::vector<double> gradient(
    const Plan& p,
    int step,
    int rank,
    size_t t) {
  Random random(
      p.seed + static_cast<uint32_t>(step * 1009 + rank * 101) +
      static_cast<uint32_t>(t) * 13);
  std::normal_distribution<double> normal;
  std::vector<double> g(p.counts[t]);
  const double scale = p.magnitude * (p.grad_scale != 0 ? p.grad_scale : 1.0F);
  constexpr size_t kBlock = 96;
  bool present = true;
  for (size_t i = 0; i < g.size(); ++i) {
    if (i % kBlock == 0) {
      present = below(random, 100) < p.present;
    }
    const double x = normal(random) * scale;
    g[i] = in_type(p.types.grad, present ? x : i % 7 == 3 ? -0.0 : 0.0);
  }
  if (p.not_finite && !g.empty()) {
    constexpr double kInf = std::numeric_limits<double>::infinity();
    g[below(random, g.size())] = kInf;
    g[below(random, g.size())] = -kInf;
    g[below(random, g.size())] = std::numeric_limits<double>::quiet_NaN();
  }
  return g;
}

} // namespace fusedpg::test::fuzz
