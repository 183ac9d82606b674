// Part of kernels_impl.hpp: optimizer updates and sums of squares. The formula
// loops know only the compute type; a tile of anything else is widened to it
// before the loop and rounded after it, both in L1.

// One tile of operands, all in the compute type. The gradient is the sum of
// `grad` and, if any, `last`.
template <typename C>
struct Operands {
  char* out; // may be `param`
  const char* param;
  const char* grad;
  const char* last;
  char* state[3];
};

template <typename Rule, bool has_last>
static void update_tile(
    const UpdateArgs& args,
    const Operands<typename Rule::Value>& tile,
    size_t n) {
  using C = typename Rule::Value;
  // Copies: the stores below could alias the caller's.
  const Rule rule(args);
  const C factor = static_cast<C>(args.grad_factor);
  const Operands<C> t = tile;
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) {
    C state[3] = {};
    if constexpr (Rule::kStates > 0) {
      state[0] = load<C>(t.state[0], i);
    }
    if constexpr (Rule::kStates > 1) {
      state[1] = load<C>(t.state[1], i);
    }
    if constexpr (Rule::kStates > 2) {
      state[2] = load<C>(t.state[2], i);
    }
    C grad = 0;
    if constexpr (Rule::kFirstHalf) {
      grad = load<C>(t.grad, i);
      if constexpr (has_last) {
        grad = grad + load<C>(t.last, i);
      }
      grad = grad * factor;
    }
    const C out = rule.step(load<C>(t.param, i), grad, state);
    if constexpr (Rule::kFirstHalf && Rule::kStates > 0) {
      store(t.state[0], i, state[0]);
    }
    if constexpr (Rule::kFirstHalf && Rule::kStates > 1) {
      store(t.state[1], i, state[1]);
    }
    if constexpr (Rule::kFirstHalf && Rule::kStates > 2) {
      store(t.state[2], i, state[2]);
    }
    store(t.out, i, out);
  }
}

// The parts of a rule that the drivers use.
template <typename C>
struct Loop {
  using Run = void (*)(const UpdateArgs&, const Operands<C>&, size_t n);
  Run run;
  Run run_last; // the operands have a `last`
  size_t states;
  bool first_half; // reads gradients and writes states
};

template <typename Rule>
constexpr Loop<typename Rule::Value> loop_of() {
  return {
      update_tile<Rule, false>,
      update_tile<Rule, Rule::kFirstHalf>,
      Rule::kStates,
      Rule::kFirstHalf};
}

template <typename C>
static Loop<C> update_loop(const UpdateArgs& args) {
  const struct {
    Formula formula;
    bool momentum, nesterov, decoupled, amsgrad;
  } options{
      args.formula,
      args.sgd.momentum != 0,
      args.sgd.nesterov,
      args.adam.decoupled,
      args.adam.amsgrad};
  return with_rule<C>(options, [](auto rule) {
    return loop_of<typename decltype(rule)::Type>();
  });
}

FUSEDPG_INLINE bool is_half(DType type) {
  return type == DType::kFloat16 || type == DType::kBFloat16;
}

FUSEDPG_INLINE char* at(const void* base, size_t i, DType type) {
  return static_cast<char*>(const_cast<void*>(base)) + i * dtype_size(type);
}

// Values of the compute type: `in` itself where it holds them, else `tile`.
template <typename C>
FUSEDPG_INLINE char* widened(C* tile, DType type, char* in, size_t n) {
  if constexpr (sizeof(C) == sizeof(float)) {
    if (type == DType::kFloat16) {
      widen(tile, static_cast<const Half*>(nullptr), in, n);
      return reinterpret_cast<char*>(tile);
    }
    if (type == DType::kBFloat16) {
      widen(tile, static_cast<const BFloat*>(nullptr), in, n);
      return reinterpret_cast<char*>(tile);
    }
  }
  return in;
}

// Rounds to a half type; other types: nothing.
template <typename C>
FUSEDPG_INLINE void narrow_to(
    char* out,
    DType type,
    const char* values,
    size_t n) {
  if constexpr (sizeof(C) == sizeof(float)) {
    if (type == DType::kFloat16) {
      narrow(out, static_cast<const Half*>(nullptr), values, n);
    } else if (type == DType::kBFloat16) {
      narrow(out, static_cast<const BFloat*>(nullptr), values, n);
    }
  }
}

template <typename C>
constexpr size_t kUpdateTile = kTileBytes / sizeof(C);

// Elements [i, i + n) of masters whose parameters were written.
template <typename C>
static void follow_params(const UpdateSpans& s, size_t i, size_t n) {
  if constexpr (sizeof(C) == sizeof(float)) {
    alignas(kLine) char rounded[kUpdateTile<C> * sizeof(Half)];
    char* master = at(s.master, i, DType::kFloat32);
    char* param = at(s.param, i, s.param_type);
    narrow_to<C>(rounded, s.param_type, master, n);
    if (__builtin_memcmp(rounded, param, n * sizeof(Half)) == 0) {
      return;
    }
    alignas(kLine) C wide[kUpdateTile<C>];
    widened(wide, s.param_type, param, n);
    for (size_t k = 0; k < n; ++k) {
      if (load<uint16_t>(rounded, k) != load<uint16_t>(param, k)) {
        store(master, k, wide[k]);
      }
    }
  }
}

// tile = weighted sum of elements [i, i + n) of the sources.
template <typename C>
static void weighted_gradient(
    const UpdateArgs& args,
    const UpdateSpans& s,
    C* tile,
    size_t i,
    size_t n) {
  alignas(kLine) C wide[kUpdateTile<C>];
  for (size_t k = 0; k < s.num_grads; ++k) {
    const PremulSum<C> weighted{static_cast<C>(args.weights[k])};
    const char* src =
        widened(wide, s.grad_type, at(s.grads[k], i, s.grad_type), n);
    if (k == 0) {
      fold<PremulSum<C>, 1, true>(weighted, tile, &src, n);
    } else {
      fold<PremulSum<C>, 1, false>(weighted, tile, &src, n);
    }
  }
}

// Sets `grad` and `last` for elements [i, i + n). If it can, it leaves the last
// addition to the loop: memory is then read while the loop computes.
template <typename C>
static void set_gradient(
    const UpdateArgs& args,
    const UpdateSpans& s,
    C* tile,
    Operands<C>& operands,
    size_t i,
    size_t n) {
  operands.grad = reinterpret_cast<const char*>(tile);
  if (args.weights != nullptr) {
    return weighted_gradient(args, s, tile, i, n);
  }
  if constexpr (sizeof(C) == sizeof(float)) {
    if (s.grad_type == DType::kFloat16) {
      return fold_all<Half, Sum<C>, 2>(
          Sum<C>(), tile, s.grads, s.num_grads, i, n);
    }
    if (s.grad_type == DType::kBFloat16) {
      return fold_all<BFloat, Sum<C>, 2>(
          Sum<C>(), tile, s.grads, s.num_grads, i, n);
    }
  }
  if (s.num_grads > 1) {
    operands.last = at(s.grads[s.num_grads - 1], i, s.grad_type);
  }
  if (s.num_grads <= 2) {
    operands.grad = at(s.grads[0], i, s.grad_type);
  } else {
    fold_all<C, Sum<C>, 4>(Sum<C>(), tile, s.grads, s.num_grads - 1, i, n);
  }
}

template <typename C>
struct Tiles {
  alignas(kLine) C out[kUpdateTile<C>];
  alignas(kLine) C grad[kUpdateTile<C>];
  alignas(kLine) C param[kUpdateTile<C>];
  alignas(kLine) C state[3][kUpdateTile<C>];
};

// Runs the loop on elements [i, i + n): its output to `out`, states in place.
// Returns the parameters it read.
template <typename C>
static const char* run_tile(
    const UpdateArgs& args,
    const UpdateSpans& s,
    const Loop<C>& loop,
    Tiles<C>& tiles,
    char* out,
    size_t i,
    size_t n) {
  Operands<C> operands{};
  operands.out = out;
  if (loop.first_half) {
    set_gradient(args, s, tiles.grad, operands, i, n);
  }
  if (s.follow && is_half(s.param_type)) {
    follow_params<C>(s, i, n);
  }
  operands.param = s.master != nullptr
      ? static_cast<const char*>(s.master) + i * sizeof(C)
      : widened(tiles.param, s.param_type, at(s.param, i, s.param_type), n);
  for (size_t k = 0; k < loop.states; ++k) {
    operands.state[k] = widened(
        tiles.state[k], s.state_type, at(s.state[k], i, s.state_type), n);
  }
  (operands.last != nullptr ? loop.run_last : loop.run)(args, operands, n);
  if (loop.first_half && is_half(s.state_type)) {
    for (size_t k = 0; k < loop.states; ++k) {
      narrow_to<C>(
          at(s.state[k], i, s.state_type), s.state_type, operands.state[k], n);
    }
  }
  return operands.param;
}

template <typename C>
static void update_spans(const UpdateArgs& args, const UpdateSpans& s) {
  const Loop<C> loop = update_loop<C>(args);
  if (loop.first_half && s.num_grads == 0) {
    return;
  }
  Tiles<C> tiles;
  alignas(kLine) char narrowed[kUpdateTile<C> * sizeof(Half)];
  const bool narrows = is_half(s.param_type);
  const size_t size = dtype_size(s.param_type);
  // Conversions need more of L1: measured, a quarter is best there.
  const size_t tile =
      narrows || is_half(s.grad_type) ? kUpdateTile<C> / 4 : kUpdateTile<C>;
  // Values of the compute type that the loop can write where it reads them.
  void* own = s.master;
  if (own == nullptr && !narrows &&
      contains(s.params_out, s.num_out, s.param)) {
    own = const_cast<void*>(s.param);
  }
  // With master weights the parameters are not read, unless they are followed.
  const size_t num_read = s.master != nullptr && !s.follow ? 0 : 1;
  const void* lead = nullptr; // the first that is streamed to
  for (size_t j = s.num_out; j-- > 0;) {
    if (!contains(&s.param, num_read, s.params_out[j])) {
      lead = s.params_out[j];
    }
  }
  size_t n = first_tile(lead, size, tile, s.stream);
  for (size_t i = 0; i < s.count; i += n, n = tile) {
    n = smaller(n, s.count - i);
    char* out = own != nullptr ? static_cast<char*>(own) + i * sizeof(C)
                               : reinterpret_cast<char*>(tiles.out);
    run_tile(args, s, loop, tiles, out, i, n);
    const char* result = out;
    if (narrows) {
      narrow_to<C>(narrowed, s.param_type, out, n);
      result = narrowed;
    }
    for (size_t j = 0; j < s.num_out; ++j) {
      if (s.params_out[j] != own) {
        store_tile(
            s.params_out + j,
            1,
            &s.param,
            num_read,
            i * size,
            result,
            n * size,
            s.stream);
      }
    }
  }
  stream_fence(s.stream);
}

static void update(const UpdateArgs& args, const UpdateSpans& spans) {
  if (spans.param_type == DType::kFloat64) {
    update_spans<double>(args, spans);
  } else {
    update_spans<float>(args, spans);
  }
}

#if defined(__AVX512F__)
constexpr size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr size_t kVectorBytes = 32;
#else
constexpr size_t kVectorBytes = 16;
#endif

// Sum of squares of one block. Vector types, so that the partial sums stay in
// registers.
template <typename C>
static double block_sum(const char* base, size_t n) {
  constexpr size_t kSums = 16;
  constexpr size_t kAhead = 2048; // bytes
  constexpr size_t kLanes = kVectorBytes / sizeof(double);
  constexpr size_t kVectors = kSums / kLanes;
  typedef C In __attribute__((vector_size(kLanes * sizeof(C))));
  typedef double Sums __attribute__((vector_size(kVectorBytes)));
  Sums sums[kVectors] = {};
  size_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    // A single stream: the hardware alone reads it a fifth slower.
    for (size_t k = 0; k < kSums * sizeof(C); k += kLine) {
      __builtin_prefetch(base + i * sizeof(C) + k + kAhead);
    }
#pragma GCC unroll 8
    for (size_t k = 0; k < kVectors; ++k) {
      In in;
      __builtin_memcpy(&in, base + (i + k * kLanes) * sizeof(C), sizeof(in));
      const Sums x = __builtin_convertvector(in, Sums);
      sums[k] += x * x;
    }
  }
  double ends[kSums];
  __builtin_memcpy(ends, sums, sizeof(ends));
  for (size_t k = 0; i + k < n; ++k) {
    const double x = load<C>(base, i + k);
    ends[k] += x * x;
  }
  double sum = ends[0];
  for (size_t k = 1; k < kSums; ++k) {
    sum += ends[k];
  }
  return sum;
}

template <typename C>
static void lamb_moments_spans(
    const UpdateArgs& args,
    const UpdateSpans& s,
    double* block_sums) {
  constexpr size_t kTile = kUpdateTile<C>;
  static_assert(kTile % kSumBlock == 0);
  constexpr Loop<C> loop = loop_of<LambRule<C, true>>();
  if (s.num_grads == 0) {
    return;
  }
  Tiles<C> tiles;
  for (size_t i = 0; i < s.count; i += kTile) {
    const size_t n = smaller(kTile, s.count - i);
    auto* direction = reinterpret_cast<char*>(tiles.out);
    const char* param = run_tile(args, s, loop, tiles, direction, i, n);
    for (size_t b = 0; b < n; b += kSumBlock) {
      const size_t block = smaller(kSumBlock, n - b);
      *block_sums++ = block_sum<C>(param + b * sizeof(C), block);
      *block_sums++ = block_sum<C>(direction + b * sizeof(C), block);
    }
  }
}

static void lamb_moments(
    const UpdateArgs& args,
    const UpdateSpans& spans,
    double* block_sums) {
  if (spans.param_type == DType::kFloat64) {
    lamb_moments_spans<double>(args, spans, block_sums);
  } else {
    lamb_moments_spans<float>(args, spans, block_sums);
  }
}

template <typename C>
static double sum_squares_of(DType dtype, const void* src, size_t count) {
  alignas(kLine) C tile[kSumBlock];
  double sum = 0;
  for (size_t i = 0; i < count; i += kSumBlock) {
    const size_t n = smaller(kSumBlock, count - i);
    sum += block_sum<C>(widened(tile, dtype, at(src, i, dtype), n), n);
  }
  return sum;
}

static double sum_squares(DType dtype, const void* src, size_t count) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kFloat32:
      return sum_squares_of<float>(dtype, src, count);
    case DType::kFloat64:
      return sum_squares_of<double>(dtype, src, count);
    default:
      return 0;
  }
}
