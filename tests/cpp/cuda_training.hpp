#pragma once

#include <cmath>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "base/ownership.hpp"
#include "collective_cases.hpp"
#include "cuda_cases.hpp"
#include "fused_reference.hpp"

// A training run on the CUDA engine whose ranks are compared, bit by bit, with
// what one process makes of everybody's gradients, added in the order of the
// fake's NCCL.
namespace fusedpg::test {

inline Recipe adam() {
  return recipe(OpCode::kFusedAdamW);
}

// --- arithmetic --------------------------------------------------------------

// x times a factor, both in the compute type.
inline double scaled(DType type, double x, double factor) {
  const DType compute = type == kDouble ? kDouble : kSingle;
  return rounded(type, rounded(compute, x * rounded(compute, factor)));
}

// --- training ----------------------------------------------------------------

// Where tensors are laid.
struct Places {
  char* arena =
      nullptr; // each rank's at other offsets; null: memory of its own
  bool alike = false; // at the same offsets
  uint32_t shifts = 0; // seed of unaligned addresses; 0: all are aligned

  Places(char* arena = nullptr) : arena(arena) {} // NOLINT: a place is one
};

class GpuTraining {
 public:
  GpuTraining(
      GpuRank& r,
      const Recipe& recipe,
      const StepTypes& types,
      const std::vector<size_t>& counts,
      const Places& places = {})
      : r_(r),
        recipe_(recipe),
        types_(types),
        counts_(counts),
        arena_(
            places.arena && !places.alike ? places.arena + 512 * r.rank
                                          : places.arena),
        shifts_(places.shifts),
        shift_(places.shifts + (places.alike ? 0 : uint32_t(r.rank))),
        memory_(std::make_shared<Memory>(counts.size())) {
    wire = r.wire_sums;
    call.op = recipe.op;
    call.param_type = types.param;
    call.grad_type = types.grad;
    call.state_type = types.state;
    call.has_masters = types.master;
    call.hypers = {recipe.hyper};
    for (size_t t = 0; t < counts.size(); ++t) {
      add(t);
    }
  }
  GpuTraining(const GpuTraining&) = delete;
  // The copies of gradients; the engine keeps the tensors for as long as it
  // uses them.
  ~GpuTraining() {
    r_.sync();
  }

  // Scalars in device memory; to be set when no work is under way.
  void set_found_inf(bool found) {
    memory_->found_inf.as<float>() = found ? 1 : 0;
    call.found_inf = &memory_->found_inf.as<float>();
  }
  void set_grad_scale(float scale) {
    memory_->grad_scale.as<float>() = scale;
    call.grad_scale = &memory_->grad_scale.as<float>();
  }
  void set_lr(double lr, DType type) {
    put_number(type, memory_->lr.data(), 0, lr);
    call.lrs = {{memory_->lr.data(), type}};
  }
  bool found_inf() const {
    return memory_->found_inf.as<float>() != 0;
  }

  // Enqueues the arrival of the next step's gradients and flags.
  void load() {
    ++steps_;
    for (size_t t = 0; t < memory_->parts.size(); ++t) {
      arrive(memory_->parts[t].grad, gradient(t, r_.rank));
    }
    for (GpuBuffer& output : memory_->outputs) { // that no step has written to
      arrive(output, Bytes(output.bytes(), 0x5a));
    }
    call.used = nullptr;
    if (uses) {
      Bytes flags;
      for (size_t t = 0; t < memory_->parts.size(); ++t) {
        flags.push_back(uses(r_.rank, t) ? 1 : 0);
      }
      arrive(memory_->used, std::move(flags));
      call.used = &memory_->used.as<uint8_t>();
    }
    call.reduction.weight.reset();
    if (!weights.empty()) {
      call.reduction.weight = weights[static_cast<size_t>(r_.rank)];
    }
  }

  // In one operation.
  OperationPtr step(std::shared_ptr<void> keep = nullptr) {
    reduced_ = false;
    const auto op = r_.engine.fused_step(call, submission(std::move(keep)));
    r_.engine.wait(*op, r_.stream);
    return op;
  }

  // In two, without waiting in between.
  void reduce_and_step(bool in_place) {
    reduced_ = true;
    if (!in_place && memory_->outputs.empty()) {
      for (const Part& part : memory_->parts) {
        memory_->outputs.emplace_back(part.grad.bytes());
      }
    }
    r_.engine.reduce_shards(shards(), submission());
    StepCall second = call;
    second.reduced = true;
    second.reduction.weight.reset(); // has done its work
    for (size_t t = 0; t < memory_->parts.size(); ++t) {
      second.tensors[t].grad = output(t) + offset(t) * dtype_size(types_.grad);
    }
    const auto op = r_.engine.fused_step(second, submission());
    r_.engine.wait(*op, r_.stream);
  }
  CudaEngine::Submission submission(std::shared_ptr<void> keep = nullptr) {
    using Both = std::pair<std::shared_ptr<Memory>, std::shared_ptr<void>>;
    CudaEngine::Submission s = r_.from(timeout);
    s.tensors = std::make_shared<Both>(memory_, std::move(keep));
    return s;
  }
  ShardsCall shards() const {
    ShardsCall c;
    c.dtype = types_.grad;
    for (size_t t = 0; t < memory_->parts.size(); ++t) {
      c.grads.push_back(memory_->parts[t].grad.data());
      c.outputs.push_back(output(t));
      c.counts.push_back(counts_[t]);
    }
    c.reduction = call.reduction;
    c.used = call.used;
    return c;
  }

  // Waits for the stream, lets the reference do as many steps, and compares.
  void check(int steps = 1) {
    r_.sync();
    arrived_.clear();
    for (size_t t = 0; t < memory_->parts.size(); ++t) {
      if (!reduced_) {
        CHECK(memory_->parts[t].grad.holds(gradient(t, r_.rank)));
      } else {
        check_reduced(t);
      }
      for (int i = 0; i < steps && is_used(t); ++i) {
        advance(t);
      }
      if (call.used != nullptr && steps != 0) {
        CHECK_EQ((&memory_->used.as<uint8_t>())[t], is_used(t) ? 1 : 0);
      }
      compare(t);
    }
    call.hypers[0].first_step = call.hypers[0].first_step && steps == 0;
  }

  // Gradients are as they came.
  bool holds_gradients() const {
    bool all = true;
    for (size_t t = 0; t < memory_->parts.size(); ++t) {
      all = all && memory_->parts[t].grad.holds(gradient(t, r_.rank));
    }
    return all;
  }
  GpuBuffer& param(size_t t) {
    return memory_->parts[t].param;
  }
  float counted(size_t t) const {
    return memory_->parts[t].step.as<float>();
  }
  const Bytes& expected_param(size_t t) const {
    return wholes_[t].param;
  }

  StepCall call;
  // Whether a rank uses a tensor; empty: no flags.
  std::function<bool(int rank, size_t tensor)> uses;
  // What is made of the gradients that are drawn; empty: nothing.
  std::function<void(Bytes& gradient, uint64_t seed)> change;
  std::vector<double> weights; // by rank; empty: none
  bool direct = false; // sums are not rounded to the gradients' type ...
  bool wire; // ... nor are others of half types, but with half_sums="wire"
  milliseconds timeout = kLong;

 private:
  // One parameter as a rank has it.
  struct Part {
    GpuBuffer param, grad, master;
    std::vector<GpuBuffer> state;
    GpuBuffer step;
  };

  // On the device.
  struct Memory {
    std::vector<Part> parts;
    std::vector<GpuBuffer> outputs; // none: in place
    GpuBuffer used, found_inf{4}, grad_scale{4}, lr{8};

    explicit Memory(size_t tensors) : used(tensors) {}
  };

  GpuBuffer buffer(DType type, size_t count, bool in_arena = false) {
    const size_t size = dtype_size(type);
    const size_t shift =
        shifts_ == 0 || shift_() % 2 == 0 ? 0 : size * (shift_() % 5);
    char* at = in_arena ? arena_ : nullptr;
    if (at != nullptr) {
      arena_ += (GpuBuffer::room(count * size, shift) + 511) / 512 * 512;
    }
    return GpuBuffer(count * size, at, shift);
  }

  void add(size_t t) {
    const size_t n = counts_[t];
    Whole w;
    w.param = values(types_.param, n, 7 + t);
    w.master.resize(types_.master ? n * 4 : 0);
    for (size_t i = 0; types_.master && i < n; ++i) {
      put_number(
          kSingle, w.master.data(), i, number(types_.param, w.param.data(), i));
    }
    const StepHyper& h = recipe_.hyper;
    const size_t states = recipe_.sgd() ? (h.momentum != 0 ? 1 : 0)
        : h.amsgrad                     ? 3
                                        : 2;
    Part part{
        buffer(types_.param, n, true),
        buffer(types_.grad, n, true),
        buffer(kSingle, length(t)),
        {},
        GpuBuffer(4)};
    StepTensor tensor;
    part.param.assign(w.param);
    tensor.param = part.param.data();
    tensor.grad = part.grad.data();
    tensor.count = n;
    tensor.layout_hash = 7 + t;
    if (types_.master) {
      part.master.assign(slice(w.master, t, 4));
      tensor.master = part.master.data();
    }
    for (size_t k = 0; k < states; ++k) {
      const size_t size = dtype_size(types_.state);
      // What SGD's buffers hold before the first step means nothing: a NaN.
      w.state[k].assign(n * size, h.first_step ? 0xff : 0);
      part.state.push_back(buffer(types_.state, length(t)));
      part.state[k].assign(slice(w.state[k], t, size));
      tensor.state[k] = part.state[k].data();
    }
    part.step.as<float>() = 0;
    // SGD may do without counters.
    tensor.step =
        recipe_.sgd() && !h.nesterov ? nullptr : &part.step.as<float>();
    call.tensors.push_back(tensor);
    memory_->parts.push_back(std::move(part));
    wholes_.push_back(std::move(w));
  }

  void arrive(const GpuBuffer& to, Bytes from) {
    arrived_.push_back(std::move(from));
    const Bytes& kept = arrived_.back();
    if (!kept.empty()) {
      CHECK_EQ(gpu().copy(to.data(), kept.data(), kept.size(), r_.stream), 0);
    }
  }

  char* output(size_t t) const {
    return memory_->outputs.empty() ? memory_->parts[t].grad.data()
                                    : memory_->outputs[t].data();
  }
  ShardRange range(size_t t, int rank) const {
    return shard_range(static_cast<int64_t>(counts_[t]), r_.size, rank);
  }
  size_t offset(size_t t) const {
    return static_cast<size_t>(range(t, r_.rank).offset);
  }
  size_t length(size_t t) const {
    return static_cast<size_t>(range(t, r_.rank).length);
  }
  Bytes slice(const Bytes& whole, size_t t, size_t element) const {
    const auto begin =
        whole.begin() + static_cast<ptrdiff_t>(offset(t) * element);
    return Bytes(begin, begin + static_cast<ptrdiff_t>(length(t) * element));
  }
  bool is_used(size_t t) const {
    bool any = !uses;
    for (int p = 0; p < r_.size && !any; ++p) {
      any = uses(p, t);
    }
    return any;
  }
  Bytes gradient(size_t t, int rank) const {
    const uint64_t seed =
        steps_ * 1000003 + t * 20 + static_cast<uint64_t>(rank);
    Bytes drawn = values(types_.grad, counts_[t], seed);
    if (change) {
      change(drawn, seed);
    }
    return drawn;
  }
  std::vector<Bytes> gradients(size_t t) const {
    std::vector<Bytes> all;
    for (int p = 0; p < r_.size; ++p) {
      all.push_back(gradient(t, p));
    }
    return all;
  }
  double total_weight() const {
    double total = weights.empty() ? 1 : 0;
    for (const double weight : weights) {
      total += weight;
    }
    return total;
  }

  // Whether owners add all ranks' gradients up, in the compute type.
  bool folds() const {
    return direct || (dtype_size(types_.grad) == 2 && !wire && r_.size > 1);
  }
  // In the type that sums are in: NCCL's are rounded at each hop.
  std::vector<double> sums(const std::vector<Bytes>& grads) const {
    const DType type = types_.grad;
    const DType sum_type = folds() && dtype_size(type) == 2 ? kSingle : type;
    std::vector<double> out(grads[0].size() / dtype_size(type));
    for (size_t i = 0; i < out.size(); ++i) {
      for (size_t p = 0; p < grads.size(); ++p) {
        const double x = number(type, grads[p].data(), i);
        const double term =
            weights.empty() ? x : scaled(sum_type, x, weights[p]);
        out[i] = p == 0 ? term : rounded(sum_type, out[i] + term);
      }
    }
    return out;
  }
  Bytes summed(const std::vector<Bytes>& grads) const {
    Bytes out(grads[0].size());
    const std::vector<double> exact = sums(grads);
    for (size_t i = 0; i < exact.size(); ++i) {
      put_number(types_.grad, out.data(), i, exact[i]);
    }
    return out;
  }
  double divisor() const {
    return !weights.empty()   ? total_weight()
        : call.reduction.mean ? r_.size
                              : 1;
  }
  // What reduce_shards leaves.
  Bytes combined(size_t t) const {
    Bytes out = summed(gradients(t));
    const double d = divisor();
    const std::vector<double> exact = sums(gradients(t));
    for (size_t i = 0; d != 1 && i < counts_[t]; ++i) {
      put_number(
          types_.grad,
          out.data(),
          i,
          scaled(types_.grad, exact[i], d > 0 ? 1 / d : 0));
    }
    return out;
  }
  void check_reduced(size_t t) const {
    const size_t size = dtype_size(types_.grad);
    const Bytes mine = gradient(t, r_.rank);
    Bytes wanted = memory_->outputs.empty() ? mine : Bytes(mine.size(), 0x5a);
    if (is_used(t)) {
      const Bytes owned = slice(combined(t), t, size);
      std::copy(
          owned.begin(),
          owned.end(),
          wanted.begin() + static_cast<ptrdiff_t>(offset(t) * size));
    }
    CHECK(memory_->outputs.empty() || memory_->parts[t].grad.holds(mine));
    CHECK(same(types_.grad, output(t), wanted));
  }

  // What one process does with everybody's gradients.
  void advance(size_t t) {
    Whole& w = wholes_[t];
    StepHyper h = call.hypers[0];
    if (!call.lrs.empty()) {
      h.lr = number(call.lrs[0].type, call.lrs[0].data, 0);
    }
    kernels::UpdateArgs args;
    args.formula = recipe_.sgd() ? kernels::Formula::kSgd
        : recipe_.lamb()         ? kernels::Formula::kLamb
                                 : kernels::Formula::kAdam;
    kernels::resolve_scalars(
        h, call.tensors[t].step ? w.step + 1.0 : 1.0, args);
    const double scale =
        call.grad_scale ? static_cast<double>(*call.grad_scale) : 1;
    const double d = reduced_ ? 1 : divisor();
    args.grad_factor = d > 0 ? (h.maximize ? -1 : 1) / (scale * d) : 0;
    std::vector<Bytes> grads = gradients(t);
    if (folds() && !reduced_) {
      args.weights = weights.empty() ? nullptr : weights.data();
    } else {
      grads = {reduced_ ? combined(t) : summed(grads)};
    }
    const WholeOperands o(w, types_, grads, 0, counts_[t]);
    if (recipe_.lamb()) {
      const auto [params, directions] = o.moments(args);
      args.lamb.step_size = h.lr * kernels::trust_ratio(h, params, directions);
    }
    kernels::table()->update(args, o.spans);
    w.step += 1;
  }

  void compare(size_t t) const {
    const Part& part = memory_->parts[t];
    const Whole& w = wholes_[t];
    if (!recipe_.lamb()) {
      CHECK(same(types_.param, part.param.data(), w.param));
      if (types_.master) {
        CHECK(same(kSingle, part.master.data(), slice(w.master, t, 4)));
      }
    } else {
      // Norms are sums in another order.
      CHECK(near(types_.param, part.param.data(), w.param));
      if (types_.master) {
        CHECK(near(kSingle, part.master.data(), slice(w.master, t, 4)));
      }
    }
    for (size_t k = 0; k < part.state.size(); ++k) {
      CHECK(same(
          types_.state,
          part.state[k].data(),
          slice(w.state[k], t, dtype_size(types_.state))));
    }
    CHECK_EQ(part.step.as<float>(), call.tensors[t].step ? w.step : 0.0F);
  }
  // Which of two NaNs an operation keeps is left to compilers.
  static bool same(DType type, const char* got, const Bytes& wanted) {
    const size_t size = dtype_size(type);
    for (size_t i = 0; i < wanted.size() / size; ++i) {
      if (std::memcmp(got + i * size, wanted.data() + i * size, size) != 0 &&
          !(std::isnan(number(type, got, i)) &&
            std::isnan(number(type, wanted.data(), i)))) {
        return false;
      }
    }
    return true;
  }
  static bool near(DType type, const char* got, const Bytes& wanted) {
    const double tolerance = type == kDouble ? 1e-13
        : type == kSingle                    ? 2e-6
        : type == kHalf                      ? 0x1p-9
                                             : 0x1p-6;
    for (size_t i = 0; i < wanted.size() / dtype_size(type); ++i) {
      const double x = number(type, wanted.data(), i);
      if (!(std::abs(number(type, got, i) - x) <=
            tolerance * std::max(std::abs(x), 0.01))) {
        return false;
      }
    }
    return true;
  }

  GpuRank& r_;
  const Recipe recipe_;
  const StepTypes types_;
  const std::vector<size_t> counts_;
  char* arena_;
  const uint32_t shifts_;
  std::mt19937 shift_;
  std::vector<Whole> wholes_;
  const std::shared_ptr<Memory> memory_;
  std::deque<Bytes> arrived_; // until they have
  uint64_t steps_ = 0;
  bool reduced_ = false;
};

} // namespace fusedpg::test
