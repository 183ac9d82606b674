#pragma once

#include "base/ownership.hpp"
#include "cuda_fuzz.hpp"
#include "update_reference.hpp"

// Random steps on the fake GPU, whose kernels are the .cu files, against what
// one process computes in double from the optimizers' papers: it shares no code
// with the kernels' formulas.
namespace fusedpg::test::fuzz {

// The sum that an update begins with, in the order of ranks.
inline std::vector<double> reduced(
    const Plan& p,
    int step,
    size_t t,
    bool direct) {
  const DType compute = p.compute();
  const bool folds =
      direct || (p.wide_sums && dtype_size(p.types.grad) == 2 && p.size > 1);
  const DType wire = folds ? compute : p.types.grad;
  std::vector<double> sum(p.counts[t]);
  double divisor = p.mean ? p.size : 1;
  if (!p.weights.empty()) {
    divisor = 0;
    for (const double weight : p.weights) {
      divisor += weight;
    }
  }
  for (int r = 0; r < p.size; ++r) {
    const std::vector<double> g = gradient(p, step, r, t);
    for (size_t i = 0; i < sum.size(); ++i) {
      double x = g[i];
      if (!p.weights.empty()) {
        const double weight =
            in_type(compute, p.weights[static_cast<size_t>(r)]);
        x = in_type(wire, in_type(compute, x * weight));
      }
      sum[i] = r == 0 ? x : in_type(wire, sum[i] + x);
    }
  }
  for (double& x : sum) {
    // Between two calls it is rounded to the gradient's type.
    x = p.two_calls ? in_type(
                          p.types.grad,
                          divisor != 1 ? x * in_type(compute, 1 / divisor) : x)
                    : x / divisor;
    x /= p.grad_scale != 0 ? static_cast<double>(p.grad_scale) : 1;
    x = p.hyper.maximize ? -x : x;
  }
  return sum;
}

inline ShardRange slice_of(const Plan& p, size_t t, int rank) {
  return shard_range(static_cast<int64_t>(p.counts[t]), p.size, rank);
}

// Everybody's slices put together.
inline std::vector<Element> whole(
    const Plan& p,
    const Shared& shared,
    size_t t) {
  std::vector<Element> all(p.counts[t]);
  for (int r = 0; r < p.size; ++r) {
    const ShardRange own = slice_of(p, t, r);
    const Tensors::One& one = shared.ranks[static_cast<size_t>(r)].all[t];
    for (int64_t k = 0; k < own.length; ++k) {
      Element& e = all[static_cast<size_t>(own.offset + k)];
      const auto i = static_cast<size_t>(k);
      const auto at = static_cast<size_t>(own.offset + k);
      e.param.value = p.types.master
          ? number(kSingle, one.master.data(), i)
          : number(p.types.param, one.param.data(), at);
      for (size_t s = 0; s < p.states(); ++s) {
        const double x = number(p.types.state, one.state[s].data(), i);
        e.state[s] = {x, std::fabs(x)};
      }
    }
  }
  return all;
}

inline bool is_close(
    double got,
    const Sized& want,
    DType stored,
    DType compute) {
  if (std::isnan(want.value)) {
    return std::isnan(got);
  }
  const double exact = want.value;
  if (std::isinf(exact) || std::isinf(in_type(stored, exact))) {
    // Near the largest number rounding decides.
    return got == exact || std::fabs(got) >= 65000;
  }
  // Some roundings of the formula, and one into the memory.
  const double limit = 64 * rounding(compute) * std::max(want.size, 0.0) +
      (stored != compute ? 1.01 * rounding(stored) * std::fabs(exact) : 0) +
      4 * smallest(stored) + 4 * smallest(compute);
  return std::fabs(got - exact) <= limit;
}

inline test::Hyper paper(const StepHyper& h, OpCode op) {
  test::Hyper plain;
  plain.formula = op == OpCode::kFusedSgd ? Formula::kSgd
      : op == OpCode::kFusedLamb          ? Formula::kLamb
                                          : Formula::kAdam;
  plain.lr = h.lr;
  plain.weight_decay = h.weight_decay;
  plain.beta1 = h.beta1;
  plain.beta2 = h.beta2;
  plain.eps = h.eps;
  plain.decoupled = h.decoupled;
  plain.amsgrad = h.amsgrad;
  plain.momentum = h.momentum;
  plain.dampening = h.dampening;
  plain.nesterov = h.nesterov;
  return plain;
}

// `old`: before the step. The first difference, or nothing.
inline std::string compare_tensor(
    const Plan& p,
    const Shared& shared,
    size_t t,
    int step,
    bool direct,
    const std::vector<Element>& old,
    const Bytes& old_param,
    float old_step) {
  const size_t n = p.counts[t];
  const bool stays = overflows(p, step) >= 0 || !any_uses(p, step, t);
  const std::vector<Element> now = whole(p, shared, t);
  for (int r = 0; r < p.size; ++r) {
    const Tensors::One& one = shared.ranks[static_cast<size_t>(r)].all[t];
    const Tensors::One& first = shared.ranks[0].all[t];
    for (const Held* h : {&one.param, &one.grad, &one.output, &one.master}) {
      if (!h->guards_intact()) {
        return formatted("guards of rank {}", r);
      }
    }
    for (const Held& h : one.state) {
      if (!h.guards_intact()) {
        return formatted("guards of a state of rank {}", r);
      }
    }
    const float counter = p.counts_steps() && !stays ? old_step + 1 : old_step;
    if (one.step != counter) {
      return formatted("counter {} of rank {}", one.step, r);
    }
    if (std::memcmp(one.param.data(), first.param.data(), one.param.bytes())) {
      return formatted("rank {} holds other parameters than rank 0", r);
    }
    const std::vector<double> loaded = gradient(p, step, r, t);
    for (size_t i = 0; i < n && !p.not_finite; ++i) {
      if (number(p.types.grad, one.grad.data(), i) != loaded[i]) {
        return formatted("gradient {} of rank {} is overwritten", i, r);
      }
    }
  }
  const char* params = shared.ranks[0].all[t].param.data();
  if (stays) {
    if (n != 0 && std::memcmp(params, old_param.data(), old_param.size())) {
      return "parameters of a step that was to be skipped";
    }
    for (size_t i = 0; i < n; ++i) {
      for (size_t s = 0; s < p.states(); ++s) {
        const double a = now[i].state[s].value;
        const double b = old[i].state[s].value;
        if (a != b && !(std::isnan(a) && std::isnan(b))) {
          return "state of a step that was to be skipped";
        }
      }
    }
    return "";
  }
  const std::vector<double> grads = reduced(p, step, t, direct);
  const test::Hyper h = paper(p.hyper, p.op);
  const int number_of_step = p.sgd() ? (p.hyper.first_step && step == 0 ? 1 : 2)
                                     : static_cast<int>(old_step) + 1;
  std::vector<Element> want(n);
  double params_squared = 0;
  double directions_squared = 0;
  for (size_t i = 0; i < n; ++i) {
    want[i] = reference_step(h, old[i], grads[i], number_of_step);
    params_squared += old[i].param.value * old[i].param.value;
    directions_squared += want[i].direction.value * want[i].direction.value;
  }
  double ratio = 1;
  if (p.lamb() && (h.weight_decay != 0 || p.hyper.always_adapt) &&
      params_squared > 0 && directions_squared > 0) {
    ratio = std::sqrt(params_squared) / std::sqrt(directions_squared);
    ratio = p.hyper.trust_clip ? std::min(ratio, 1.0) : ratio;
  }
  const DType compute = p.compute();
  for (size_t i = 0; i < n; ++i) {
    Element& e = want[i];
    if (p.lamb()) {
      const double x = old[i].param.value;
      if (p.types.state != compute) {
        // The second half reads moments that were rounded to their type.
        const double m =
            now[i].state[0].value / (1 - std::pow(h.beta1, number_of_step));
        const double v =
            now[i].state[1].value / (1 - std::pow(h.beta2, number_of_step));
        const double adam = m / (std::sqrt(v) + h.eps);
        e.direction.value = adam + h.weight_decay * x;
        e.direction.size = std::fabs(adam) + std::fabs(h.weight_decay * x);
      }
      e.param.value = x - h.lr * ratio * e.direction.value;
      e.param.size = std::fabs(x) + h.lr * ratio * e.direction.size;
    }
    for (size_t s = 0; s < p.states(); ++s) {
      if (!is_close(
              now[i].state[s].value, e.state[s], p.types.state, compute)) {
        return formatted(
            "state {} of element {}: {} != {}",
            s,
            i,
            now[i].state[s].value,
            e.state[s].value);
      }
    }
    const DType kept = p.types.master ? kSingle : p.types.param;
    if (!is_close(now[i].param.value, e.param, kept, compute)) {
      return formatted(
          "element {}: {} != {}, before {}, gradient {}",
          i,
          now[i].param.value,
          e.param.value,
          old[i].param.value,
          grads[i]);
    }
    const double stored = number(p.types.param, params, i);
    if (p.types.master &&
        stored != in_type(p.types.param, now[i].param.value) &&
        !std::isnan(stored)) {
      return formatted("parameter {} is not its master's rounding", i);
    }
  }
  return "";
}

// A rank's part of a plan.
class Stepper {
 public:
  Stepper(GpuRank& r, const Plan& plan, Shared& shared)
      : r_(r),
        p_(plan),
        shared_(shared),
        mine_(shared.ranks[static_cast<size_t>(r.rank)]) {
    // At the same places of all arenas stores go to all ranks at once.
    const int way = p_.seed % 2 == 0 ? 0 : r.rank;
    Random place(p_.seed * 31 + static_cast<uint32_t>(way));
    char* arena = static_cast<char*>(r.engine.arena());
    arena += arena == nullptr ? 0 : 512 * way;
    const StepTypes& types = p_.types;
    const auto held = [&](DType type, size_t count, bool inside) {
      const size_t size = dtype_size(type);
      const size_t shift = one_in(place, 2) ? 0 : size * below(place, 5);
      return Held(count * size, shift, inside ? &arena : nullptr);
    };
    for (size_t t = 0; t < p_.counts.size(); ++t) {
      const size_t n = p_.counts[t];
      const ShardRange own = slice_of(p_, t, r.rank);
      const auto length = static_cast<size_t>(own.length);
      Tensors::One& one = mine_.all.emplace_back();
      one.param = held(types.param, n, p_.in_arena);
      one.grad = held(types.grad, n, p_.in_arena);
      one.output = held(types.grad, p_.two_calls ? n : 0, false);
      one.master = held(kSingle, types.master ? length : 0, false);
      Random values(p_.seed + static_cast<uint32_t>(t));
      std::normal_distribution<double> normal;
      for (size_t i = 0; i < n; ++i) {
        const double x = in_type(types.param, normal(values));
        put(types.param, one.param.data(), i, x);
        const auto at = static_cast<int64_t>(i) - own.offset;
        if (types.master && at >= 0 && at < own.length) {
          put(kSingle, one.master.data(), static_cast<size_t>(at), x);
        }
      }
      StepTensor tensor;
      tensor.param = one.param.data();
      tensor.grad = one.grad.data();
      tensor.master = types.master ? one.master.data() : nullptr;
      for (size_t s = 0; s < p_.states(); ++s) {
        one.state[s] = held(types.state, length, false);
        std::memset(
            one.state[s].data(),
            p_.hyper.first_step ? 0xff : 0, // what lies there means nothing
            one.state[s].bytes());
        tensor.state[s] = one.state[s].data();
      }
      tensor.step = p_.counts_steps() ? &one.step : nullptr;
      tensor.count = n;
      tensor.layout_hash = t;
      call_.tensors.push_back(tensor);
    }
    call_.op = p_.op;
    call_.param_type = types.param;
    call_.grad_type = types.grad;
    call_.state_type = types.state;
    call_.has_masters = types.master;
    call_.hypers = {p_.hyper};
    call_.reduction.mean = p_.mean;
    if (!p_.weights.empty()) {
      call_.reduction.weight = p_.weights[static_cast<size_t>(r.rank)];
    }
    if (p_.device_lr) {
      mine_.lr_double = p_.hyper.lr;
      call_.hypers[0].lr = 0;
      call_.lrs = {{&mine_.lr_double, kDouble}};
    }
    if (p_.grad_scale != 0) {
      mine_.grad_scale = p_.grad_scale;
      call_.grad_scale = &mine_.grad_scale;
      call_.found_inf = &mine_.found_inf;
    }
  }

  // The first difference that rank 0 sees.
  std::string run(const std::string& name) {
    std::string wrong;
    for (int step = 0; step < p_.steps && wrong.empty(); ++step) {
      load(step);
      r_.meet(formatted("{} {} loaded", name, step));
      std::vector<std::vector<Element>> old;
      std::vector<Bytes> params;
      std::vector<float> counters;
      if (r_.rank == 0) {
        for (size_t t = 0; t < p_.counts.size(); ++t) {
          old.push_back(whole(p_, shared_, t));
          const Held& param = mine_.all[t].param;
          params.emplace_back(param.data(), param.data() + param.bytes());
          counters.push_back(mine_.all[t].step);
        }
      }
      r_.meet(formatted("{} {} begins", name, step));
      call();
      r_.sync();
      r_.meet(formatted("{} {} done", name, step));
      const std::string path = r_.engine.path_of_last_step();
      const bool direct = path.rfind("direct", 0) == 0;
      // Nothing lies in every arena.
      const bool nothing = std::count(p_.counts.begin(), p_.counts.end(), 0U) ==
          static_cast<ptrdiff_t>(p_.counts.size());
      if (r_.rank == 0) {
        if (!nothing && direct != (p_.in_arena && !p_.lamb())) {
          wrong = "path " + path;
        }
        for (size_t t = 0; t < p_.counts.size() && wrong.empty(); ++t) {
          wrong = compare_tensor(
              p_, shared_, t, step, direct, old[t], params[t], counters[t]);
          if (!wrong.empty()) {
            wrong = formatted("step {}, tensor {}: {}", step, t, wrong);
          }
        }
        r_.store.set(formatted("{} {} verdict", name, step), wrong);
      }
      wrong =
          r_.store.get(formatted("{} {} verdict", name, step), Deadline(kLong));
      call_.hypers[0].first_step = false;
    }
    r_.engine.drain(kLong);
    r_.meet(name + " over");
    mine_.all.clear(); // before the arena
    return wrong;
  }

 private:
  void load(int step) {
    for (size_t t = 0; t < p_.counts.size(); ++t) {
      const std::vector<double> g = gradient(p_, step, r_.rank, t);
      for (size_t i = 0; i < g.size(); ++i) {
        put(p_.types.grad, mine_.all[t].grad.data(), i, g[i]);
      }
    }
    if (p_.uses) {
      mine_.used.clear();
      for (size_t t = 0; t < p_.counts.size(); ++t) {
        mine_.used.push_back(uses(p_, step, r_.rank, t) ? 1 : 0);
      }
      call_.used = mine_.used.data();
    }
    mine_.found_inf = overflows(p_, step) == r_.rank ? 1 : 0;
  }
  void call() {
    if (!p_.two_calls) {
      const auto op = r_.engine.fused_step(call_, r_.from());
      r_.engine.wait(*op, r_.stream);
      return;
    }
    ShardsCall shards;
    shards.dtype = p_.types.grad;
    shards.reduction = call_.reduction;
    shards.used = call_.used;
    StepCall second = call_;
    second.reduced = true;
    second.reduction.weight.reset();
    for (size_t t = 0; t < p_.counts.size(); ++t) {
      const Tensors::One& one = mine_.all[t];
      shards.grads.push_back(one.grad.data());
      shards.outputs.push_back(one.output.data());
      shards.counts.push_back(p_.counts[t]);
      const auto own = slice_of(p_, t, r_.rank);
      second.tensors[t].grad = one.output.data() +
          static_cast<size_t>(own.offset) * dtype_size(p_.types.grad);
    }
    r_.engine.reduce_shards(shards, r_.from());
    const auto op = r_.engine.fused_step(second, r_.from());
    r_.engine.wait(*op, r_.stream);
  }

  GpuRank& r_;
  const Plan& p_;
  Shared& shared_;
  Tensors& mine_;
  StepCall call_;
};

} // namespace fusedpg::test::fuzz
