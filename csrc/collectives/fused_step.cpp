#include "collectives/fused_step.hpp"

#include <cmath>
#include <cstring>

#include "base/ownership.hpp"
#include "collectives/reduction.hpp"

namespace fusedpg {
namespace {

using kernels::Formula;

OpDescriptor describe_step(Way& way, const StepCall& call) {
  OpDescriptor d = facts(call, /*on_device=*/false);
  Hash places;
  OpDescriptor grads;
  grads.dtype = call.grad_type;
  for (const StepTensor& t : call.tensors) {
    if (call.shared_params && t.count != 0) {
      places.add(
          way.shared_place(t.param, t.count * dtype_size(call.param_type)));
    }
    if (!call.reduced) {
      check_nan(way.op(), grads, t.grad, t.count);
    }
  }
  d.flags |= grads.flags;
  d.shape_hash = Hash().add(d.shape_hash).add(places.value()).value();
  if (call.found_inf && *call.found_inf != 0.0F) {
    d.flags |= kFoundInf;
  }
  return d;
}

// A step that is being executed.
class Step {
 public:
  Step(Way& way, const StepCall& call) : way_(way), call_(call) {
    for (const StepTensor& t : call.tensors) {
      counts_.push_back(t.count);
      args_.push_back(update_args(call, t, way.size()));
    }
  }

  void run() {
    OpDescriptor d = describe_step(way_, call_);
    const bool lamb = formula(call_.op) == Formula::kLamb;
    Plan first = lamb ? moments_plan() : update_plan(!call_.reduced);
    begin_reduction(way_, first, d, call_.reduction, call_.used);
    weights_ = first.weights;
    if (any_rank(way_, kFoundInf)) {
      if (call_.found_inf) {
        *call_.found_inf = 1.0F;
      }
      return;
    }
    way_.run(first, d);
    if (lamb) {
      exchange_norms(d);
      Plan second = update_plan(false);
      drop_unused(second);
      d.flags = 0;
      way_.enter(&second, d, {});
      way_.run(second, d);
    }
    for (size_t t = 0; t < call_.tensors.size(); ++t) {
      if (call_.tensors[t].step && used(t)) {
        *call_.tensors[t].step += 1.0F;
      }
    }
  }

 private:
  bool used(size_t tensor) const {
    return call_.used == nullptr || call_.used[tensor] != 0;
  }

  void drop_unused(Plan& plan) const {
    for (size_t t = 0; t < call_.tensors.size(); ++t) {
      if (!used(t)) {
        plan.drop(t);
      }
    }
  }

  Plan plan(bool reads) const {
    Plan plan;
    plan.src_size = dtype_size(call_.grad_type);
    plan.dst_size = dtype_size(call_.param_type);
    plan.src_type = call_.grad_type;
    plan.reads = reads;
    if (reads && call_.skip_block != 0) {
      plan.skip = SkipOptions{call_.skip_block};
      // LAMB takes sums over runs that have nothing to do with blocks; a
      // weighted mean has a weight a rank; a tensor that is not used has no
      // gradient.
      plan.needs_all = formula(call_.op) == Formula::kLamb ||
          call_.reduction.weight || call_.used != nullptr;
    }
    plan.lanes = Plan::shards(counts_, way_.size());
    for (const StepTensor& t : call_.tensors) {
      plan.tensors.push_back(
          {reads ? static_cast<const char*>(t.grad) : nullptr,
           static_cast<char*>(t.param)});
    }
    return plan;
  }

  // [gradients ->] new parameters
  Plan update_plan(bool reads) {
    Plan p = plan(reads);
    if (call_.shared_params) {
      p.receiver = Plan::kOwner;
      p.shared_results = true;
    }
    p.epilogue = [this](
                     size_t tensor,
                     size_t begin,
                     size_t count,
                     void* const* dsts,
                     size_t num_dsts,
                     const Sources& srcs,
                     bool stream) {
      const void* slice = nullptr;
      kernels::UpdateSpans s = spans(tensor, begin, count, srcs, slice);
      s.params_out = dsts;
      s.num_out = num_dsts;
      s.stream = stream;
      way_.kernels().update(args(tensor, srcs), s);
    };
    return p;
  }

  // Contributions that were folded have been multiplied by their weights.
  kernels::UpdateArgs args(size_t tensor, const Sources& srcs) const {
    kernels::UpdateArgs a = args_[tensor];
    const bool weighted = !weights_.empty() && !call_.reduced && !srcs.folded;
    a.weights = weighted ? weights_.data() : nullptr;
    return a;
  }

  // LAMB's first half: moments, and the norms of what the second half needs.
  Plan moments_plan() {
    sums_.resize(counts_.size());
    for (size_t t = 0; t < counts_.size(); ++t) {
      const size_t blocks =
          (static_cast<size_t>(shard(t).length) + kernels::kSumBlock - 1) /
          kernels::kSumBlock;
      sums_[t].resize(2 * blocks);
    }
    Plan p = plan(!call_.reduced);
    p.receiver = Plan::kNobody;
    p.granule = kernels::kSumBlock;
    p.epilogue = [this](
                     size_t tensor,
                     size_t begin,
                     size_t count,
                     void* const* /* dsts */,
                     size_t /* num_dsts */,
                     const Sources& srcs,
                     bool /* stream */) {
      const size_t at = begin - static_cast<size_t>(shard(tensor).offset);
      const void* slice = nullptr;
      way_.kernels().lamb_moments(
          args(tensor, srcs),
          spans(tensor, begin, count, srcs, slice),
          sums_[tensor].data() + 2 * (at / kernels::kSumBlock));
    };
    return p;
  }

  // Sums of squares of whole tensors: blocks in order, then ranks in order.
  void exchange_norms(const OpDescriptor& step) {
    const size_t n = counts_.size();
    std::vector<double> mine(2 * n);
    for (size_t t = 0; t < n; ++t) {
      for (size_t i = 0; i < sums_[t].size(); ++i) {
        mine[2 * t + i % 2] += sums_[t][i];
      }
    }
    std::vector<uint64_t> words(2 * n);
    std::memcpy(words.data(), mine.data(), 2 * n * sizeof(double));
    OpDescriptor d = step;
    d.flags = 0;
    way_.enter(nullptr, d, words);
    for (size_t t = 0; t < n; ++t) {
      double sums[2] = {0, 0};
      for (int p = 0; p < way_.size(); ++p) {
        double theirs[2];
        std::memcpy(theirs, way_.extra(p) + 2 * t, sizeof theirs);
        sums[0] += theirs[0];
        sums[1] += theirs[1];
      }
      const StepHyper& hyper = call_.hypers[call_.tensors[t].hyper];
      args_[t].lamb.step_size = hyper.lr * trust_ratio(hyper, sums[0], sums[1]);
    }
  }

  ShardRange shard(size_t tensor) const {
    return shard_range(
        static_cast<int64_t>(counts_[tensor]), way_.size(), way_.rank());
  }

  // `slice` must live as long as the result.
  kernels::UpdateSpans spans(
      size_t tensor,
      size_t begin,
      size_t count,
      const Sources& srcs,
      const void*& slice) const {
    const StepTensor& t = call_.tensors[tensor];
    const size_t at = begin - static_cast<size_t>(shard(tensor).offset);
    const auto advance = [](void* base, size_t elements, DType type) {
      return base == nullptr
          ? base
          : static_cast<char*>(base) + elements * dtype_size(type);
    };
    kernels::UpdateSpans s;
    s.param_type = call_.param_type;
    s.grad_type = call_.grad_type;
    s.state_type = call_.state_type;
    s.param = advance(t.param, begin, call_.param_type);
    if (call_.has_masters) {
      s.master = advance(t.master, at, DType::kFloat32);
      s.follow = call_.follow;
    }
    for (int k = 0; k < 3; ++k) {
      s.state[k] = advance(t.state[k], at, call_.state_type);
    }
    if (call_.reduced) {
      slice =
          static_cast<const char*>(t.grad) + at * dtype_size(call_.grad_type);
      s.grads = &slice;
      s.num_grads = 1;
    } else {
      s.grads = srcs.data;
      s.num_grads = srcs.num;
      if (srcs.folded) {
        s.grad_type = wide_type(call_.grad_type);
      }
    }
    s.count = count;
    return s;
  }

  Way& way_;
  const StepCall& call_;
  std::vector<size_t> counts_;
  std::vector<kernels::UpdateArgs> args_;
  std::vector<double> weights_;
  std::vector<std::vector<double>> sums_; // of blocks: parameter, direction
};

} // namespace

kernels::UpdateArgs update_args(
    const StepCall& call,
    const StepTensor& tensor,
    int world_size) {
  const StepHyper& h = call.hypers[tensor.hyper];
  kernels::UpdateArgs a;
  a.formula = formula(call.op);
  const double scale = call.grad_scale ? *call.grad_scale : 1.0;
  const bool divide =
      call.reduction.mean && !call.reduction.weight && !call.reduced;
  a.grad_factor =
      (h.maximize ? -1.0 : 1.0) / (scale * (divide ? world_size : 1));
  const double step = tensor.step ? *tensor.step + 1.0 : 1.0;
  kernels::resolve_scalars(h, step, a);
  return a;
}

void fused_step(Way& way, const StepCall& call) {
  Step(way, call).run();
  way.count(call.op);
}

} // namespace fusedpg
