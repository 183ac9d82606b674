#pragma once

#include "cuda/kernels/moves.hpp"
#include "kernels/formulas/rules.hpp"

// Updates of slices. The operations and their order are those of the CPU's
// kernels (kernels/update_impl.hpp), so both give the same bits.
namespace fusedpg::cuda {

using kernels::with_rule;

// A thread works on kUnroll vectors of kElements elements at a time: all loads,
// then the formula, then the stores.
template <int elements, int unroll>
struct Shape {
  static constexpr int kElements = elements;
  static constexpr int kUnroll = unroll;
};
// As much in flight as registers allow at half of the most threads.
template <typename Rule, bool kFolds>
using LocalShape =
    Shape<kWidth<typename Rule::Value>, (kFolds || Rule::kStates > 1 ? 1 : 2)>;

// This rank's parameters (the masters where there are some) and states.
template <typename C>
struct Slices {
  Column<C> param;
  Column<C> state[3];
};

template <typename Rule>
FUSEDPG_HOST_DEVICE Slices<typename Rule::Value> slices_of(
    const UpdateArgs& args,
    const Span& span) {
  using C = typename Rule::Value;
  constexpr int kStates = static_cast<int>(Rule::kStates);
  Slices<C> s;
  s.param = args.masters
      ? Column<C>(span.tensor->master, span.begin, DType::kFloat32)
      : Column<C>(
            span.tensor->param, span.first(args.chunk.rank), args.param_type);
  FUSEDPG_UNROLL
  for (int k = 0; k < kStates; ++k) {
    s.state[k] = Column<C>(span.tensor->state[k], span.begin, args.state_type);
  }
  return s;
}

// The reduced gradient, from one array. Where it comes from all ranks', see
// FoldedBlocks, and direct.cu.
template <typename C>
struct ReducedGradient {
  Column<C> grads;

  FUSEDPG_HOST_DEVICE bool aligned() const {
    return grads.aligned;
  }
  template <int W, int U, bool kFull>
  FUSEDPG_HOST_DEVICE void gather(
      const Vectors<W, U, kFull>& at,
      C (&grad)[U][W]) const {
    Raw<C, W> raw[U];
    at.load(grads, raw);
    FUSEDPG_UNROLL
    for (int u = 0; u < U; ++u) {
      if (at.has(u)) {
        grads.widen(grad[u], raw[u]);
      }
    }
  }
};

template <typename C, bool kFolds>
FUSEDPG_HOST_DEVICE auto reduced_gradient(
    const UpdateArgs& args,
    const Span& span) {
  if constexpr (kFolds) {
    return FoldedBlocks<C>{
        at(args.grads, span.wire, args.grad_type),
        args.chunk.block * float_size(args.grad_type),
        args.weights,
        args.chunk.size,
        args.grad_type};
  } else {
    return ReducedGradient<C>{
        args.grads != nullptr
            ? Column<C>(args.grads, span.wire, args.grad_type)
            : Column<C>(span.tensor->grad, span.begin, args.grad_type)};
  }
}

// Where new parameters go: the masters if any, and their rounding.
template <typename C>
struct ParameterSink {
  bool masters;
  Column<C> master;
  Column<C> out;

  FUSEDPG_HOST_DEVICE bool aligned() const {
    return out.aligned;
  }
  template <typename At>
  FUSEDPG_HOST_DEVICE void take(
      const At& at,
      int u,
      const C* /* old */,
      const C* result) {
    if (masters) {
      at.store(master, u, result);
    }
    at.store(out, u, result);
  }
};

// Sums of squares of parameters and LAMB's directions.
struct Sums {
  double param;
  double direction;

  FUSEDPG_HOST_DEVICE bool aligned() const {
    return true;
  }
  template <int W, int U, bool kFull, typename C>
  FUSEDPG_HOST_DEVICE void take(
      const Vectors<W, U, kFull>& at,
      int u,
      const C* old,
      const C* result) {
    FUSEDPG_UNROLL
    for (int e = 0; e < W; ++e) {
      if (kFull || at[u] + e < at.end) {
        const double x = old[e];
        const double y = result[e];
        param = param + x * x;
        direction = direction + y * y;
      }
    }
  }
  FUSEDPG_HOST_DEVICE void add(const Sums& other) {
    param = param + other.param;
    direction = direction + other.direction;
  }
};

// The rule on the vectors of `at`.
template <
    typename Rule,
    typename Gradient,
    typename Sink,
    int W,
    int U,
    bool kFull>
FUSEDPG_HOST_DEVICE void step_vectors(
    const Rule& rule,
    typename Rule::Value factor,
    const Slices<typename Rule::Value>& s,
    const Gradient& gradient,
    Sink& sink,
    const Vectors<W, U, kFull>& at) {
  using C = typename Rule::Value;
  constexpr int kStates = static_cast<int>(Rule::kStates);
  Raw<C, W> param[U];
  Raw<C, W> state[kStates + 1][U];
  at.load(s.param, param);
  FUSEDPG_UNROLL
  for (int k = 0; k < kStates; ++k) {
    at.load(s.state[k], state[k]);
  }
  C grad[U][W] = {};
  if constexpr (Rule::kFirstHalf) {
    gradient.gather(at, grad);
  }
  FUSEDPG_UNROLL
  for (int u = 0; u < U; ++u) {
    if (!at.has(u)) {
      continue;
    }
    C old[W];
    C result[W];
    C wide[kStates + 1][W];
    s.param.widen(old, param[u]);
    FUSEDPG_UNROLL
    for (int k = 0; k < kStates; ++k) {
      s.state[k].widen(wide[k], state[k][u]);
    }
    FUSEDPG_UNROLL
    for (int e = 0; e < W; ++e) {
      C values[3] = {};
      FUSEDPG_UNROLL
      for (int k = 0; k < kStates; ++k) {
        values[k] = wide[k][e];
      }
      result[e] = rule.step(old[e], grad[u][e] * factor, values);
      FUSEDPG_UNROLL
      for (int k = 0; k < kStates; ++k) {
        wide[k][e] = values[k];
      }
    }
    if constexpr (Rule::kFirstHalf) {
      FUSEDPG_UNROLL
      for (int k = 0; k < kStates; ++k) {
        at.store(s.state[k], u, wide[k]);
      }
    }
    sink.take(at, u, old, result);
  }
}

// The rule on elements [0, n) of a tile. Thread t has vectors t, t + threads,
// ..., in this order, whatever the alignment.
template <typename Shape, typename Rule, typename Gradient, typename Sink>
FUSEDPG_HOST_DEVICE void run_rule(
    const Slices<typename Rule::Value>& s,
    const TensorScalars& scalars,
    const Gradient& gradient,
    Sink& sink,
    uint32_t n,
    int thread,
    int threads) {
  using C = typename Rule::Value;
  constexpr uint32_t W = Shape::kElements;
  constexpr uint32_t U = Shape::kUnroll;
  const Rule rule(scalars);
  const C factor = static_cast<C>(scalars.grad_factor);
  bool aligned = s.param.aligned && gradient.aligned() && sink.aligned();
  FUSEDPG_UNROLL
  for (int k = 0; k < static_cast<int>(Rule::kStates); ++k) {
    aligned = aligned && s.state[k].aligned;
  }
  const uint32_t stride = threads * W;
  const uint32_t full = aligned ? n / W * W : 0;
  uint32_t i = thread * W;
  for (; i < full; i += U * stride) {
    step_vectors(
        rule, factor, s, gradient, sink, Vectors<W, U, true>{i, stride, full});
  }
  // The first of this thread's vectors that is not full.
  i = full <= thread * W
      ? thread * W
      : thread * W + (full - thread * W + stride - 1) / stride * stride;
  for (; i < n; i += stride) {
    step_vectors(
        rule, factor, s, gradient, sink, Vectors<W, 1, false>{i, stride, n});
  }
}

// Rule is the one that `args` ask for: see with_rule(). kFolds: args.folds.
template <typename Rule, bool kFolds>
FUSEDPG_HOST_DEVICE void update_span(
    const UpdateArgs& args,
    const Span& span,
    int thread,
    int threads) {
  using C = typename Rule::Value;
  const TensorScalars& scalars = args.scalars[span.index];
  const int rank = args.chunk.rank;
  const uint32_t n = span.count(rank);
  char* param = at(span.tensor->param, span.first(rank), args.param_type);
  char* out = args.params_out != nullptr
      ? at(args.params_out, span.wire, args.param_type)
      : param;
  if (scalars.skip) {
    if (out != param) {
      copy_elements(out, param, n, args.param_type, thread, threads);
    }
    return;
  }
  const Slices<C> slices = slices_of<Rule>(args, span);
  ParameterSink<C> sink{
      args.masters, slices.param, Column<C>(out, 0, args.param_type)};
  run_rule<LocalShape<Rule, kFolds>, Rule>(
      slices,
      scalars,
      reduced_gradient<C, kFolds>(args, span),
      sink,
      n,
      thread,
      threads);
}

template <typename Rule, bool kFolds>
FUSEDPG_HOST_DEVICE void update_tile(
    const UpdateArgs& args,
    uint32_t tile,
    int thread,
    int threads) {
  update_span<Rule, kFolds>(args, span_of(args.chunk, tile), thread, threads);
}

// LAMB's first half; this thread's part of the sums.
template <typename C, bool kFolds>
FUSEDPG_HOST_DEVICE Sums moments_span(
    const UpdateArgs& update,
    const Span& span,
    int thread,
    int threads) {
  using Rule = kernels::LambRule<C, true>;
  const TensorScalars& scalars = update.scalars[span.index];
  Sums sums{};
  if (!scalars.skip) {
    run_rule<LocalShape<Rule, kFolds>, Rule>(
        slices_of<Rule>(update, span),
        scalars,
        reduced_gradient<C, kFolds>(update, span),
        sums,
        span.count(update.chunk.rank),
        thread,
        threads);
  }
  return sums;
}

// The caller adds the threads' parts with fold_lanes() and stores them at
// tile_sums[2 * tile].
template <typename C, bool kFolds>
FUSEDPG_HOST_DEVICE Sums
moments_tile(const MomentsArgs& args, uint32_t tile, int thread, int threads) {
  return moments_span<C, kFolds>(
      args.update, span_of(args.update.chunk, tile), thread, threads);
}

// A level of the tree that adds kThreads sums: calls with half = kThreads / 2,
// ..., 2, 1, a barrier of the threads before each, leave the total in lanes[0].
FUSEDPG_HOST_DEVICE void fold_lanes(
    Sums* lanes,
    int half,
    int thread,
    int threads) {
  for (int i = thread; i < half; i += threads) {
    lanes[i].add(lanes[i + half]);
  }
}

} // namespace fusedpg::cuda
