#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "base/ownership.hpp"
#include "collective_cases.hpp"
#include "collectives/fused_step.hpp"
#include "fused_reference.hpp"

// What the tests of the fused steps have in common: a training run whose ranks
// are compared, bit by bit, with one process that has everybody's gradients,
// and that process with the formulas in double.
namespace fusedpg::test {

// In shared memory.
inline void fused_step(Context& ctx, const StepCall& call) {
  ShmWay way(ctx);
  fusedpg::fused_step(way, call);
}
inline void reduce_shards(Context& ctx, const ShardsCall& call) {
  ShmWay way(ctx);
  fusedpg::reduce_shards(way, call);
}

// A group that trains, and what its parameters have to be.
class Training {
 public:
  Training(
      Group& g,
      const Recipe& recipe,
      const StepTypes& types,
      const std::vector<size_t>& counts,
      Place params,
      Place grads)
      : g_(g),
        recipe_(recipe),
        types_(types) {
    call.op = recipe.op;
    call.param_type = types.param;
    call.grad_type = types.grad;
    call.state_type = types.state;
    call.has_masters = types.master;
    call.hypers = {recipe.hyper};
    for (size_t t = 0; t < counts.size(); ++t) {
      add(counts[t], 7 + t, params, grads);
    }
    for (Part& part : parts_) {
      // SGD may do without counters.
      part.tensor.step =
          recipe.sgd() && !recipe.hyper.nesterov ? nullptr : &part.step;
      call.tensors.push_back(part.tensor);
    }
  }
  // `call` points into it.
  Training(const Training&) = delete;

  // Moves the parameters to memory that all ranks see.
  void share() {
    size_t bytes = 0;
    for (const Part& part : parts_) {
      bytes += (part.param.bytes() + 63) / 64 * 64;
    }
    char* memory = nullptr;
    g_.run([&](Context& ctx) {
      memory = static_cast<char*>(share_memory(ctx, bytes));
    });
    for (size_t t = 0; t < parts_.size(); ++t) {
      const size_t size = parts_[t].param.bytes();
      if (g_.rank == 0 && size != 0) {
        std::memcpy(memory, wholes_[t].param.data(), size);
      }
      call.tensors[t].param = memory;
      memory += (size + 63) / 64 * 64;
    }
    g_.run([](Context& ctx) { barrier(ctx); });
    call.shared_params = true;
  }

  // Reduced gradients go to memory of their own.
  void separate_outputs(Place place) {
    for (size_t t = 0; t < parts_.size(); ++t) {
      outputs_.push_back(
          placed(g_, place, parts_[t].grad.bytes(), static_cast<int>(t)));
    }
  }

  // In one operation.
  void step() {
    load();
    reduced_ = false;
    run_step(call);
  }

  // In two.
  void reduce_and_step() {
    load();
    reduced_ = true;
    g_.run([&](Context& ctx) {
      ShmWay here(ctx);
      reduce_shards(way != nullptr ? *way : here, shards());
    });
    check_reduced();
    StepCall second = call;
    second.reduced = true;
    if (!weight_again) {
      second.reduction.weight.reset(); // has done its work
    }
    for (size_t t = 0; t < parts_.size(); ++t) {
      second.tensors[t].grad = output(t) + offset(t) * dtype_size(types_.grad);
    }
    run_step(second);
  }

  ShardsCall shards() {
    ShardsCall c;
    c.dtype = types_.grad;
    for (const Part& part : parts_) {
      c.grads.push_back(part.grad.data());
      c.outputs.push_back(output(c.counts.size()));
      c.counts.push_back(part.grad.bytes() / dtype_size(types_.grad));
    }
    c.reduction = call.reduction;
    c.used = call.used;
    return c;
  }

  // This rank's gradients and flags of the next step.
  void load() {
    ++steps_;
    for (size_t t = 0; t < parts_.size(); ++t) {
      parts_[t].grad.assign(gradient(t, g_.rank).data());
    }
    call.used = nullptr;
    if (uses) {
      used_.clear();
      for (size_t t = 0; t < parts_.size(); ++t) {
        used_.push_back(uses(g_.rank, t) ? 1 : 0);
      }
      call.used = used_.data();
    }
    call.reduction.weight.reset();
    if (!weights.empty()) {
      call.reduction.weight = weights[g_.rank];
    }
  }

  // At once after reduce_shards().
  void check_reduced() {
    const size_t element = dtype_size(types_.grad);
    for (size_t t = 0; t < parts_.size(); ++t) {
      const Bytes mine = gradient(t, g_.rank);
      Bytes wanted = outputs_.empty() ? mine : Bytes(mine.size(), 0x5a);
      if (is_used(t)) {
        const Bytes whole = together(gradients(t));
        const auto begin = static_cast<ptrdiff_t>(offset(t) * element);
        const auto end = begin + static_cast<ptrdiff_t>(length(t) * element);
        std::copy(
            whole.begin() + begin, whole.begin() + end, wanted.begin() + begin);
      }
      if (mine.empty()) {
        continue;
      }
      CHECK(std::memcmp(output(t), wanted.data(), wanted.size()) == 0);
      CHECK(outputs_.empty() || parts_[t].grad.holds(mine.data()));
      CHECK(call.used == nullptr || (used_[t] != 0) == is_used(t));
    }
  }

  // At once after a step: the result, and that gradients were only read.
  void check(bool updated = true) {
    for (size_t t = 0; t < parts_.size(); ++t) {
      Part& part = parts_[t];
      CHECK(reduced_ || part.grad.holds(gradient(t, g_.rank).data()));
      const bool active = updated && is_used(t);
      if (active) {
        advance(t);
      }
      if (updated && call.used) {
        CHECK_EQ(used_[t] != 0, is_used(t));
      }
      // Nobody may still read them.
      std::memset(part.grad.data(), 0xff, part.grad.bytes());
      compare(t);
    }
    for (StepHyper& h : call.hypers) {
      h.first_step = h.first_step && !updated;
    }
  }

  // How far the reference is from the formulas.
  void check_exact() const {
    if (!types_.precise()) {
      return;
    }
    const DType type = types_.master ? kSingle : types_.param;
    double difference = 0, norm = 0;
    for (const Checked& w : wholes_) {
      const Bytes& bytes = types_.master ? w.master : w.param;
      for (size_t i = 0; i < w.exact.param.size(); ++i) {
        const double wanted = w.exact.param[i];
        const double error = number(type, bytes.data(), i) - wanted;
        difference += error * error;
        norm += wanted * wanted;
      }
    }
    const double limit = types_.param == kDouble ? 1e-13 : 2e-6;
    if (!(std::sqrt(difference) <= limit * std::sqrt(norm))) {
      report_failure(
          op_name(recipe_.op),
          static_cast<int>(types_.param),
          formatted("relative error {}", std::sqrt(difference / norm)));
    }
  }

  const Bytes& param(size_t tensor) const {
    return wholes_[tensor].param;
  }
  float& counter(size_t tensor) {
    return parts_[tensor].step;
  }

  StepCall call;
  // Whether a rank uses a tensor; empty: no flags.
  std::function<bool(int rank, size_t tensor)> uses;
  std::vector<double> weights; // by rank; empty: none
  bool weight_again = false; // also in the step on reduced gradients
  Way* way = nullptr; // instead of shared memory
  // How that adds gradients, if not in rank order: the sums of several ranks'
  // each, in the wide type and times their shares; and the whole.
  using Gradients = std::vector<Bytes>;
  std::function<Gradients(const Gradients&, const std::vector<double>&)> sums;
  std::function<Bytes(const Gradients&, bool mean, const std::vector<double>&)>
      sum;

 private:
  void run_step(const StepCall& what) {
    g_.run([&](Context& ctx) {
      ShmWay here(ctx);
      fused_step(way != nullptr ? *way : here, what);
    });
  }

  // One parameter of the reference: the whole of it in one place.
  struct Checked : Whole {
    Exact exact;
  };
  // One parameter as a rank of the group has it.
  struct Part {
    PlacedMemory param, grad;
    Bytes master, state[3];
    float step;
    StepTensor tensor;
  };

  size_t states(const StepHyper& h) const {
    return recipe_.sgd() ? (h.momentum != 0 ? 1 : 0) : h.amsgrad ? 3 : 2;
  }

  void add(size_t n, uint64_t seed, Place params, Place grads) {
    Checked w;
    w.param = values(types_.param, n, seed);
    for (size_t i = 0; i < n; ++i) {
      w.exact.param.push_back(number(types_.param, w.param.data(), i));
      const auto value = static_cast<float>(w.exact.param.back());
      if (types_.master) {
        w.master.resize(n * 4);
        std::memcpy(w.master.data() + 4 * i, &value, 4);
      }
    }
    const size_t states = this->states(recipe_.hyper);
    const auto salt = static_cast<int>(seed);
    parts_.push_back(
        {placed(g_, params, w.param.size(), salt),
         placed(g_, grads, n * dtype_size(types_.grad), salt),
         {},
         {},
         0,
         {}});
    const size_t t = wholes_.size();
    for (size_t k = 0; k < 3; ++k) {
      w.exact.state[k].resize(n);
      // What SGD's buffers hold before the first step means nothing: a NaN.
      w.state[k].assign(
          k < states ? n * dtype_size(types_.state) : 0,
          recipe_.hyper.first_step ? 0xff : 0);
    }
    counts_.push_back(n);
    Part& part = parts_.back();
    part.param.assign(w.param.data());
    StepTensor& tensor = part.tensor;
    tensor.param = part.param.data();
    tensor.grad = part.grad.data();
    tensor.count = n;
    tensor.layout_hash = seed;
    // Moving a vector leaves its elements where they are.
    if (types_.master) {
      part.master = slice(w.master, t, 4);
      tensor.master = part.master.data();
    }
    for (size_t k = 0; k < states; ++k) {
      part.state[k] = slice(w.state[k], t, dtype_size(types_.state));
      tensor.state[k] = part.state[k].data();
    }
    wholes_.push_back(std::move(w));
  }

  char* output(size_t t) const {
    return outputs_.empty() ? parts_[t].grad.data() : outputs_[t].data();
  }

  size_t offset(size_t t) const {
    return static_cast<size_t>(
        shard_range(static_cast<int64_t>(counts_[t]), g_.size, g_.rank).offset);
  }
  size_t length(size_t t) const {
    return static_cast<size_t>(
        shard_range(static_cast<int64_t>(counts_[t]), g_.size, g_.rank).length);
  }
  Bytes slice(const Bytes& whole, size_t t, size_t element) const {
    const auto begin =
        whole.begin() + static_cast<ptrdiff_t>(offset(t) * element);
    Bytes out;
    out.reserve(1); // has an address
    out.assign(begin, begin + static_cast<ptrdiff_t>(length(t) * element));
    return out;
  }

  bool is_used(size_t t) const {
    bool any = !uses;
    for (int p = 0; p < g_.size && !any; ++p) {
      any = uses(p, t);
    }
    return any;
  }

  Bytes gradient(size_t tensor, int rank) const {
    return values(
        types_.grad,
        counts_[tensor],
        steps_ * 1000003 + tensor * 20 + static_cast<uint64_t>(rank));
  }
  std::vector<Bytes> gradients(size_t tensor) const {
    std::vector<Bytes> all;
    for (int p = 0; p < g_.size; ++p) {
      all.push_back(gradient(tensor, p));
    }
    return all;
  }

  void compare(size_t t) const {
    const Part& part = parts_[t];
    const Checked& w = wholes_[t];
    CHECK(
        w.param.empty() ||
        std::memcmp(call.tensors[t].param, w.param.data(), w.param.size()) ==
            0);
    CHECK(part.master == slice(w.master, t, types_.master ? 4 : 0));
    for (size_t k = 0; k < 3; ++k) {
      const bool has = call.tensors[t].state[k] != nullptr;
      if (has) {
        CHECK(part.state[k] == slice(w.state[k], t, dtype_size(types_.state)));
      }
    }
    CHECK_EQ(part.step, call.tensors[t].step ? w.step : 0.0F);
  }

  Bytes together(const Gradients& grads) const {
    return sum ? sum(grads, call.reduction.mean, shares(weights))
               : combined(types_.grad, grads, call.reduction.mean, weights);
  }
  // Those of what the reference works on.
  StepTypes types() const {
    StepTypes t = types_;
    if (sums && !reduced_) {
      t.grad = wide_type(t.grad);
    }
    return t;
  }

  // What one process does with everybody's gradients.
  void advance(size_t t) {
    Checked& w = wholes_[t];
    const StepHyper& h = call.hypers[call.tensors[t].hyper];
    std::vector<Bytes> grads = gradients(t);
    const std::vector<double> share = shares(weights);
    advance_exact(t, h, grads, share);
    StepTensor tensor = call.tensors[t];
    tensor.step = &w.step;
    StepCall as = call;
    as.reduced = reduced_;
    kernels::UpdateArgs args = update_args(as, tensor, g_.size);
    if (reduced_) {
      grads = {together(grads)};
    } else if (sums) {
      grads = sums(grads, share);
    } else if (!share.empty()) {
      args.weights = share.data();
    }
    if (recipe_.lamb()) {
      args.lamb.step_size = h.lr * moments(t, h, args, grads);
    }
    const WholeOperands o(w, types(), grads, 0, counts_[t]);
    kernels::table()->update(args, o.spans);
    w.step += 1;
  }

  // LAMB's first half; returns the trust ratio. Norms are sums over owners.
  double moments(
      size_t t,
      const StepHyper& h,
      const kernels::UpdateArgs& args,
      const std::vector<Bytes>& grads) {
    double sums[2] = {0, 0};
    for (int p = 0; p < g_.size; ++p) {
      const ShardRange r =
          shard_range(static_cast<int64_t>(counts_[t]), g_.size, p);
      const WholeOperands o(
          wholes_[t],
          types(),
          grads,
          static_cast<size_t>(r.offset),
          static_cast<size_t>(r.length));
      const auto [params, directions] = o.moments(args);
      sums[0] += params;
      sums[1] += directions;
    }
    if ((h.weight_decay == 0 && !h.always_adapt) || sums[0] == 0 ||
        sums[1] == 0) {
      return 1;
    }
    const double ratio = std::sqrt(sums[0]) / std::sqrt(sums[1]);
    return h.trust_clip && ratio > 1 ? 1 : ratio;
  }

  void advance_exact(
      size_t t,
      const StepHyper& h,
      const std::vector<Bytes>& grads,
      const std::vector<double>& share) {
    std::vector<double> sum(counts_[t]);
    const double divisor =
        (share.empty() && call.reduction.mean ? g_.size : 1) *
        (call.grad_scale ? *call.grad_scale : 1.0);
    for (size_t i = 0; i < sum.size(); ++i) {
      for (size_t p = 0; p < grads.size(); ++p) {
        sum[i] += number(types_.grad, grads[p].data(), i) *
            (share.empty() ? 1 : share[p]);
      }
      sum[i] /= divisor;
    }
    wholes_[t].exact.step(recipe_, h, sum, wholes_[t].step + 1.0);
  }

  Group& g_;
  const Recipe recipe_;
  const StepTypes types_;
  std::vector<size_t> counts_;
  std::vector<Checked> wholes_;
  std::vector<Part> parts_;
  std::vector<PlacedMemory> outputs_; // none: in place
  std::vector<uint8_t> used_;
  uint64_t steps_ = 0;
  bool reduced_ = false;
};

// LAMB's moments are of the compute type.
inline bool takes(const Recipe& r, const StepTypes& types) {
  return !r.lamb() || dtype_size(types.state) != 2;
}

// Every recipe with all types, in turn with one, some odd and a few long
// tensors, in every place, with each way to combine and scale gradients.
inline void train_recipes(
    Group& g,
    const std::vector<Recipe>& recipes,
    const std::vector<size_t>& odd) {
  const size_t longest = kSanitized ? 9100 : g.size == 2 ? 150000 : 30000;
  const std::vector<std::vector<size_t>> lists{{1}, odd, {longest, 31, 9001}};
  size_t turn = 0;
  for (const Recipe& r : recipes) {
    for (const StepTypes& types : step_types()) {
      if (!takes(r, types)) {
        continue;
      }
      const size_t kind = turn++;
      const float scale = 8;
      Training training(
          g,
          r,
          types,
          lists[(kind + kind / 3) % 3],
          kPlaces[kind % 3],
          kPlaces[kind / 3 % 3]);
      training.call.hypers[0].maximize = kind % 5 == 1;
      training.call.reduction.mean = kind % 4 != 2;
      training.call.grad_scale = kind % 4 == 3 ? &scale : nullptr;
      for (int step = 0; step < 3; ++step) {
        training.call.hypers[0].lr *= 0.9;
        training.step();
        training.check();
      }
      training.check_exact();
    }
  }
}

} // namespace fusedpg::test
