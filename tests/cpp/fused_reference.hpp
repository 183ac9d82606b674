#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <vector>

#include "collectives/fused_step.hpp"
#include "kernels_reference.hpp"

// What the tests of the fused steps compute with: cases, the combined gradient,
// and the formulas of the papers in double.
namespace fusedpg::test {

struct StepTypes {
  DType param = DType::kFloat32;
  DType grad = DType::kFloat32;
  DType state = DType::kFloat32;
  bool master = false;

  bool half_param() const {
    return dtype_size(param) == 2;
  }
  // Whether anything but the last rounding happens in the compute type.
  bool precise() const {
    return dtype_size(state) != 2 && (!half_param() || master);
  }
};

constexpr DType kHalf = DType::kFloat16;
constexpr DType kBHalf = DType::kBFloat16;
constexpr DType kSingle = DType::kFloat32;
constexpr DType kDouble = DType::kFloat64;

constexpr StepTypes kSingles{};
constexpr StepTypes kStepTypes[] = {
    kSingles,
    {kDouble, kDouble, kDouble, false},
    {kBHalf, kBHalf, kSingle, true},
    {kSingle, kBHalf, kSingle, false},
    {kBHalf, kBHalf, kBHalf, false},
    {kHalf, kHalf, kSingle, true},
    {kBHalf, kSingle, kSingle, true},
    {kHalf, kHalf, kSingle, false}};

// What a test of many types goes through: where types do not matter, one.
inline std::vector<StepTypes> step_types(
    std::vector<StepTypes> types = {
        std::begin(kStepTypes),
        std::end(kStepTypes)}) {
  if (kOnlyThreads) {
    types.resize(1);
  }
  return types;
}

struct Recipe {
  OpCode op = OpCode::kFusedAdamW;
  StepHyper hyper;

  bool lamb() const {
    return op == OpCode::kFusedLamb;
  }
  bool sgd() const {
    return op == OpCode::kFusedSgd;
  }
};

inline Recipe recipe(
    OpCode op,
    const std::function<void(StepHyper&)>& change = nullptr) {
  StepHyper h;
  h.lr = 1e-2;
  h.beta1 = 0.9;
  h.beta2 = 0.99;
  h.eps = 1e-6;
  h.weight_decay = 0.1;
  h.momentum = op == OpCode::kFusedSgd ? 0.9 : 0;
  h.first_step = op == OpCode::kFusedSgd;
  h.dampening = 0.25;
  h.decoupled = op == OpCode::kFusedAdamW;
  if (change) {
    change(h);
  }
  return {op, h};
}

// One of each kind of step.
inline std::vector<Recipe> one_of_each() {
  std::vector<Recipe> all{
      recipe(OpCode::kFusedAdamW, [](StepHyper& h) { h.amsgrad = true; }),
      recipe(OpCode::kFusedLamb)};
  if (!kOnlyThreads) {
    all.push_back(recipe(OpCode::kFusedSgd));
    all.push_back(recipe(OpCode::kFusedAdam));
  }
  return all;
}

// For tensors whose first steps are different ones: buffers of zeros.
inline Recipe without_first_step(Recipe r) {
  r.hyper.first_step = false;
  return r;
}

// Shares of a weighted mean.
inline std::vector<double> shares(const std::vector<double>& weights) {
  double total = 0;
  for (const double weight : weights) {
    total += weight;
  }
  std::vector<double> out;
  for (const double weight : weights) {
    out.push_back(total > 0 ? weight / total : 0);
  }
  return out;
}

// What reduce_shards() makes of gradients, for all slices. A mean is the sum
// times the rounded reciprocal, as in a step.
inline Bytes combined(
    DType type,
    const std::vector<Bytes>& grads,
    bool mean,
    const std::vector<double>& weights) {
  const std::vector<const void*> srcs = pointers_to(grads);
  const size_t count = grads[0].size() / dtype_size(type);
  const bool weighted = !weights.empty();
  const std::vector<double> share = shares(weights);
  const auto sum = [&]<typename T>(const std::vector<T>& xs) {
    T acc = 0;
    for (size_t k = 0; k < xs.size(); ++k) {
      // volatile: every product is rounded.
      const volatile T product =
          weighted ? xs[k] * static_cast<T>(share[k]) : xs[k];
      acc = k == 0 ? T(product) : acc + product;
    }
    return mean && !weighted ? acc * (T(1) / static_cast<T>(xs.size())) : acc;
  };
  const auto half = [&](auto value, auto nearest) {
    return each<uint16_t>(srcs, count, [&](const std::vector<uint16_t>& xs) {
      std::vector<float> wide;
      for (const uint16_t x : xs) {
        wide.push_back(value(x));
      }
      return nearest(sum(wide));
    });
  };
  switch (type) {
    case DType::kFloat16:
      return half(half_value, nearest_half);
    case DType::kBFloat16:
      return half(bfloat_value, nearest_bfloat);
    case DType::kFloat32:
      return each<float>(srcs, count, sum);
    default:
      return each<double>(srcs, count, sum);
  }
}

// The papers' formulas in double, one tensor.
struct Exact {
  std::vector<double> param, state[3];

  void step(
      const Recipe& r,
      const StepHyper& h,
      std::vector<double> grad,
      double number_of_step) {
    const size_t n = param.size();
    const double correct1 = 1 - std::pow(h.beta1, number_of_step);
    const double correct2 = 1 - std::pow(h.beta2, number_of_step);
    std::vector<double> direction(n);
    double norms[2] = {0, 0};
    for (size_t i = 0; i < n; ++i) {
      const double g = h.maximize ? -grad[i] : grad[i];
      double &m = state[0][i], &v = state[1][i], &top = state[2][i];
      double& x = param[i];
      if (r.sgd()) {
        const double d = g + h.weight_decay * x;
        m = h.first_step ? d : h.momentum * m + (1 - h.dampening) * d;
        x -= h.lr * (h.momentum == 0 ? d : h.nesterov ? d + h.momentum * m : m);
        continue;
      }
      const bool l2 = r.op == OpCode::kFusedAdam;
      const double d = l2 ? g + h.weight_decay * x : g;
      m = h.beta1 * m + (1 - h.beta1) * d;
      v = h.beta2 * v + (1 - h.beta2) * d * d;
      top = std::max(top, v);
      const double second = std::sqrt((h.amsgrad ? top : v) / correct2) + h.eps;
      direction[i] = m / correct1 / second + (l2 ? 0 : h.weight_decay * x);
      norms[0] += x * x;
      norms[1] += direction[i] * direction[i];
    }
    if (r.sgd()) {
      return;
    }
    double ratio = 1;
    if (r.lamb() && (h.weight_decay != 0 || h.always_adapt) && norms[0] > 0 &&
        norms[1] > 0) {
      ratio = std::sqrt(norms[0] / norms[1]);
      ratio = h.trust_clip ? std::min(ratio, 1.0) : ratio;
    }
    for (size_t i = 0; i < n; ++i) {
      param[i] -= h.lr * ratio * direction[i];
    }
  }
};

// One parameter with its state, as one process has it.
struct Whole {
  Bytes param, master, state[3];
  float step = 0;
};

// What a kernel reads and writes when one process updates a part of a parameter
// with the gradients of several ranks.
struct WholeOperands {
  kernels::UpdateSpans spans;
  std::vector<const void*> grads;
  void* out;

  WholeOperands(
      Whole& w,
      const StepTypes& types,
      const std::vector<Bytes>& gradients,
      size_t begin,
      size_t count) {
    spans.param_type = types.param;
    spans.grad_type = types.grad;
    spans.state_type = types.state;
    out = w.param.data() + begin * dtype_size(types.param);
    spans.param = out;
    spans.params_out = &out;
    spans.num_out = 1;
    for (const Bytes& grad : gradients) {
      grads.push_back(grad.data() + begin * dtype_size(types.grad));
    }
    spans.grads = grads.data();
    spans.num_grads = grads.size();
    if (types.master) {
      spans.master = w.master.data() + begin * 4;
    }
    for (size_t k = 0; k < 3; ++k) {
      spans.state[k] = w.state[k].empty()
          ? nullptr
          : w.state[k].data() + begin * dtype_size(types.state);
    }
    spans.count = count;
  }
  WholeOperands(const WholeOperands&) = delete;

  // LAMB's first half; the sums of squares of parameters and directions.
  std::array<double, 2> moments(const kernels::UpdateArgs& args) const {
    std::vector<double> blocks(
        (spans.count + kernels::kSumBlock - 1) / kernels::kSumBlock * 2);
    kernels::table()->lamb_moments(args, spans, blocks.data());
    std::array<double, 2> sums{};
    for (size_t b = 0; b < blocks.size(); ++b) {
      sums[b % 2] += blocks[b];
    }
    return sums;
  }
};

} // namespace fusedpg::test
