// Arguments of the fused steps: checks, and the way to the engine's form.

#include "c10d/fused_arguments.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include <c10/core/AutogradState.h>

#include "base/ownership.hpp"
#include "c10d/tensor_memory.hpp"
#include "c10d/tensors.hpp"

namespace fusedpg {
namespace {

using Tensors = std::vector<at::Tensor>;

bool is_half(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16;
}

bool is_supported(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || is_half(type);
}

at::ScalarType compute_type(at::ScalarType param) {
  return param == at::kDouble ? at::kDouble : at::kFloat;
}

bool any_hyper(const StepArguments& a, bool (*holds)(const StepHyper&)) {
  return std::any_of(
      a.hypers.begin(), a.hypers.end(), [&](const HyperArguments& h) {
        return holds(h.rest);
      });
}

// Only the last of an operator's lists may be left out.
std::vector<const char*> state_names(
    const StepArguments& a,
    const StepInputs& inputs) {
  std::vector<const char*> names;
  for (const StepInputs::State& state : inputs.states) {
    if (state.needed == nullptr || any_hyper(a, state.needed)) {
      names.push_back(state.name);
    }
  }
  return names;
}

class Checker {
 public:
  Checker(const StepArguments& a, int rank, int size)
      : a_(a),
        op_(op_name(a.op)),
        inputs_(step_inputs(a.op)),
        states_(state_names(a, inputs_)),
        rank_(rank),
        size_(size),
        device_(a.params.empty() ? at::kCPU : a.params[0].device()) {}

  void check() const {
    check_lists();
    for (size_t i = 0; i < a_.params.size(); ++i) {
      check_param(i);
      check_slices(i);
    }
    check_scalars();
  }

 private:
  void check_derivative(const at::Tensor& t, bool is_param = false) const {
    const std::string lost = lost_derivative(op_, t, is_param);
    TORCH_CHECK(lost.empty(), lost);
  }

  void check_place(const char* op, const at::Tensor& t) const {
    check_dense(op, t);
    TORCH_CHECK_VALUE(
        t.device() == device_,
        formatted(
            "fused: {}: tensors of one call must be on one device, found {} "
            "and {}",
            op,
            device_,
            t.device()));
  }

  void check_list(const char* name, size_t found, size_t expected) const {
    TORCH_CHECK_VALUE(
        found == expected,
        formatted(
            "fused: {}: {} has {} tensors, expected {} (params has {})",
            op_,
            name,
            found,
            expected,
            a_.params.size()));
  }

  void check_lists() const {
    const size_t n = a_.params.size();
    TORCH_CHECK_VALUE(n != 0, formatted("fused: {}: params is empty", op_));
    check_list("grads", a_.grads.size(), n);
    check_list("master_params", a_.masters.size(), a_.masters.empty() ? 0 : n);
    const bool counts = inputs_.counts || !a_.steps.empty();
    check_list("state_steps", a_.steps.size(), counts ? n : 0);
    for (size_t k = 0; k < states_.size(); ++k) {
      check_list(states_[k], k < a_.states.size() ? a_.states[k].size() : 0, n);
    }
    for (size_t k = states_.size(); k < a_.states.size(); ++k) {
      check_list("a state list without use here", a_.states[k].size(), 0);
    }
    if (!a_.hyper_index.empty()) {
      check_list("hyper_index", a_.hyper_index.size(), n);
    }
  }

  void check_param(size_t i) const {
    const at::Tensor& p = a_.params[i];
    const at::Tensor& g = a_.grads[i];
    check_place(op_, p);
    check_place(op_, g);
    check_derivative(p, /*is_param=*/true);
    check_derivative(g);
    TORCH_CHECK_VALUE(
        is_supported(p.scalar_type()),
        formatted(
            "fused: {}: params[{}] must be float32, float64, bfloat16 or "
            "float16, found {}",
            op_,
            i,
            p.scalar_type()));
    TORCH_CHECK_VALUE(
        p.scalar_type() == at::kDouble
            ? g.scalar_type() == at::kDouble
            : is_supported(g.scalar_type()) && g.scalar_type() != at::kDouble,
        formatted(
            "fused: {}: grads[{}] of type {} does not go with params of type "
            "{} (float64 with float64; float32, bfloat16 and float16 with each "
            "other)",
            op_,
            i,
            g.scalar_type(),
            p.scalar_type()));
    TORCH_CHECK_VALUE(
        p.is_non_overlapping_and_dense(),
        formatted(
            "fused: {}: params[{}] must be dense in memory (no gaps, no "
            "overlaps)",
            op_,
            i));
    if (!a_.reduced) {
      TORCH_CHECK_VALUE(
          g.sizes() == p.sizes(),
          formatted(
              "fused: {}: grads[{}] has shape {}, params[{}] {}",
              op_,
              i,
              g.sizes(),
              i,
              p.sizes()));
    }
  }

  void check_slice(
      const char* name,
      size_t i,
      const at::Tensor& t,
      const ShardRange& range,
      std::initializer_list<at::ScalarType> types) const {
    check_place(op_, t);
    check_derivative(t);
    const bool typed =
        std::find(types.begin(), types.end(), t.scalar_type()) != types.end();
    TORCH_CHECK_VALUE(
        typed && t.is_contiguous() && t.numel() == range.length,
        formatted(
            "fused: {}: {}[{}] must be a contiguous {} tensor with this rank's "
            "slice of params[{}], {} elements (fusedpg.shard_range); found {} "
            "with {}",
            op_,
            name,
            i,
            *types.begin(),
            i,
            range.length,
            t.scalar_type(),
            t.numel()));
  }

  void check_slices(size_t i) const {
    const at::Tensor& p = a_.params[i];
    const ShardRange range = shard_range(p.numel(), size_, rank_);
    const at::ScalarType compute = compute_type(p.scalar_type());
    for (size_t k = 0; k < states_.size(); ++k) {
      const at::ScalarType other =
          inputs_.two_passes ? compute : p.scalar_type();
      check_slice(states_[k], i, a_.states[k][i], range, {compute, other});
    }
    if (!a_.masters.empty()) {
      TORCH_CHECK_VALUE(
          is_half(p.scalar_type()),
          formatted(
              "fused: {}: master_params are for bfloat16 and float16 params, "
              "found {}",
              op_,
              p.scalar_type()));
      check_slice("master_params", i, a_.masters[i], range, {at::kFloat});
    }
    if (a_.reduced) {
      check_slice("grads", i, a_.grads[i], range, {a_.grads[i].scalar_type()});
    }
    if (!a_.steps.empty()) {
      const at::Tensor& step = a_.steps[i];
      TORCH_CHECK_VALUE(
          step.numel() == 1 && step.scalar_type() == at::kFloat &&
              step.device() == device_,
          formatted(
              "fused: {}: state_steps[{}] must be a float32 scalar tensor on "
              "{}",
              op_,
              i,
              device_));
      check_memory(op_, step);
    }
  }

  void check_scalars() const {
    for (const auto& t : {a_.grad_scale, a_.found_inf}) {
      TORCH_CHECK_VALUE(
          !t ||
              (t->numel() == 1 && t->scalar_type() == at::kFloat &&
               t->device() == device_),
          formatted(
              "fused: {}: grad_scale and found_inf must be float32 scalar "
              "tensors on {}",
              op_,
              device_));
      if (t) {
        check_memory(op_, *t);
      }
    }
    TORCH_CHECK_VALUE(
        !a_.hypers.empty(), formatted("fused: {}: no hyperparameters", op_));
    for (const int64_t index : a_.hyper_index) {
      TORCH_CHECK_VALUE(
          index >= 0 && index < static_cast<int64_t>(a_.hypers.size()),
          formatted(
              "fused: {}: hyper_index {} of {}", op_, index, a_.hypers.size()));
    }
    for (const HyperArguments& h : a_.hypers) {
      if (const auto* lr = std::get_if<at::Tensor>(&h.lr)) {
        check_memory(op_, *lr);
        check_derivative(*lr);
      }
      const auto in_range = [](double beta) { return beta >= 0 && beta < 1; };
      TORCH_CHECK_VALUE(
          in_range(h.rest.beta1) && in_range(h.rest.beta2),
          formatted(
              "fused: {}: betas must be in [0, 1), found {} and {}",
              op_,
              h.rest.beta1,
              h.rest.beta2));
    }
  }

  const StepArguments& a_;
  const char* op_;
  const StepInputs& inputs_;
  const std::vector<const char*> states_; // names of those that are needed
  const int rank_;
  const int size_;
  const at::Device device_;
};

void check_reduction(
    const char* op,
    const ReductionArguments& r,
    size_t tensors,
    at::Device device) {
  TORCH_CHECK_VALUE(
      !r.weight || (r.mean && *r.weight >= 0 && std::isfinite(*r.weight)),
      formatted(
          "fused: {}: weight must be finite and not negative, and needs "
          "reduce=\"mean\"",
          op));
  TORCH_CHECK_VALUE(
      !r.used ||
          (r.used->scalar_type() == at::kByte && r.used->is_contiguous() &&
           r.used->device() == device &&
           r.used->numel() == static_cast<int64_t>(tensors)),
      formatted(
          "fused: {}: used must be a contiguous uint8 tensor on {} with an "
          "element for each of {} tensors",
          op,
          device,
          tensors));
  if (r.used) {
    check_memory(op, *r.used);
  }
}

// A gradient laid out in memory as its parameter is.
at::Tensor like_param(const at::Tensor& grad, const at::Tensor& param) {
  if (grad.strides() == param.strides()) {
    return grad;
  }
  at::Tensor copy = at::empty_like(param, grad.options());
  copy.copy_(grad.detach());
  return copy;
}

uint64_t layout_hash(const at::Tensor& t) {
  Hash layout;
  for (int64_t d = 0; d < t.dim(); ++d) {
    layout.add(static_cast<uint64_t>(t.size(d)));
    // The stride of a dimension of one element means nothing.
    layout.add(static_cast<uint64_t>(t.size(d) == 1 ? 0 : t.stride(d)));
  }
  return layout.value();
}

GradReduction to_engine(const ReductionArguments& r) {
  return {r.mean, r.weight};
}

unsigned variant_of(const StepHyper& h) {
  return unsigned(h.momentum != 0) | unsigned(h.nesterov) << 1 |
      unsigned(h.decoupled) << 2 | unsigned(h.amsgrad) << 3;
}

StepTensor to_engine(const StepArguments& a, size_t i, const at::Tensor& grad) {
  const at::Tensor& param = a.params[i];
  StepTensor t;
  t.param = param.data_ptr();
  t.grad = grad.const_data_ptr();
  t.master = a.masters.empty() ? nullptr : a.masters[i].data_ptr();
  for (size_t k = 0; k < a.states.size(); ++k) {
    t.state[k] = a.states[k].empty() ? nullptr : a.states[k][i].data_ptr();
  }
  t.step = a.steps.empty() ? nullptr : a.steps[i].data_ptr<float>();
  t.count = static_cast<size_t>(param.numel());
  t.layout_hash = layout_hash(param);
  t.hyper = a.hyper_index.empty() ? 0 : static_cast<size_t>(a.hyper_index[i]);
  return t;
}

// A learning rate in the memory of a GPU stays there: nobody waits for it.
DeviceScalar device_lr(const HyperArguments& h) {
  const auto* lr = std::get_if<at::Tensor>(&h.lr);
  if (lr == nullptr || lr->device().is_cpu()) {
    return {};
  }
  TORCH_CHECK_VALUE(
      lr->numel() == 1 &&
          (lr->scalar_type() == at::kFloat || lr->scalar_type() == at::kDouble),
      "fused: lr on a GPU must be a float32 or float64 scalar tensor");
  return {lr->const_data_ptr(), to_dtype(lr->scalar_type())};
}

StepHyper to_engine(const HyperArguments& h) {
  StepHyper hyper = h.rest;
  if (const auto* lr = std::get_if<double>(&h.lr)) {
    hyper.lr = *lr;
  } else if (device_lr(h).data == nullptr) {
    hyper.lr = std::get<at::Tensor>(h.lr).item<double>();
  }
  return hyper;
}

} // namespace

void follow_params(const StepArguments& a, int rank, int size) {
  c10::NoGradGuard no_grad;
  for (size_t i = 0; i < a.masters.size(); ++i) {
    const at::Tensor& param = a.params[i];
    const ShardRange own = shard_range(param.numel(), size, rank);
    const at::Tensor now =
        memory_order(param).narrow(0, own.offset, own.length);
    const at::Tensor& master = a.masters[i];
    master.copy_(
        at::where(
            master.to(param.scalar_type()).eq(now),
            master,
            now.to(at::kFloat)));
  }
}

const std::vector<StepInputs>& all_step_inputs() {
  static constexpr const char* kOfAdam =
      "$lr, float beta1, float beta2, float weight_decay, float eps, "
      "bool amsgrad, bool maximize";
  static const std::vector<StepInputs::State> kMoments{
      {"exp_avgs"},
      {"exp_avg_sqs"},
      {"max_exp_avg_sqs", [](const StepHyper& h) { return h.amsgrad; }}};
  static const std::vector<StepInputs> kAll{
      {OpCode::kFusedSgd,
       "fused:fused_sgd_",
       {{"momentum_buffer_list",
         [](const StepHyper& h) { return h.momentum != 0; }}},
       /*counts=*/false,
       "float weight_decay, float momentum, $lr, float dampening, "
       "bool nesterov, bool maximize, bool is_first_step"},
      {OpCode::kFusedAdam,
       "fused:fused_adam_",
       kMoments,
       /*counts=*/true,
       kOfAdam},
      {OpCode::kFusedAdamW,
       "fused:fused_adamw_",
       kMoments,
       /*counts=*/true,
       kOfAdam},
      {OpCode::kFusedLamb,
       "fused:fused_lamb_",
       {{"exp_avgs"}, {"exp_avg_sqs"}},
       /*counts=*/true,
       "$lr, float beta1, float beta2, float weight_decay, float eps, "
       "bool trust_clip, bool always_adapt, bool maximize",
       /*two_passes=*/true}};
  return kAll;
}

const StepInputs& step_inputs(std::string_view name) {
  for (const StepInputs& step : all_step_inputs()) {
    if (name == op_name(step.op)) {
      return step;
    }
  }
  TORCH_CHECK_VALUE(
      false, formatted("fused: {} is not an optimizer step", name));
}

const StepInputs& step_inputs(OpCode op) {
  return step_inputs(op_name(op));
}

std::string lost_derivative(
    const char* op,
    const at::Tensor& t,
    bool is_param) {
  if (c10::AutogradState::get_tls_state().get_fw_grad_mode() &&
      t._fw_grad(/*level=*/0).defined()) {
    return formatted(
        "fused: {} got a tensor that has a tangent, and has no derivative: "
        "pass forward_ad.unpack_dual()'s primal",
        op);
  }
  const bool of_model = is_param && t.is_leaf();
  if (at::GradMode::is_enabled() && t.requires_grad() && !of_model) {
    return formatted(
        "fused: {} got a tensor that requires grad and is no parameter of a "
        "model (a leaf), and has no derivative: call it under torch.no_grad(), "
        "outside of torch.func's transformations",
        op);
  }
  return {};
}

void check_arguments(const StepArguments& a, int rank, int size) {
  Checker(a, rank, size).check();
  check_reduction(
      op_name(a.op), a.reduction, a.params.size(), a.params[0].device());
}

void check_arguments(const ShardsArguments& a) {
  const char* op = op_name(OpCode::kReduceShards);
  TORCH_CHECK_VALUE(!a.grads.empty(), formatted("fused: {}: no tensors", op));
  for (const at::Tensor& g : a.grads) {
    check_dense(op, g);
    TORCH_CHECK_VALUE(
        g.device() == a.grads[0].device(),
        formatted("fused: {}: gradients must be on one device", op));
    TORCH_CHECK_VALUE(
        is_supported(g.scalar_type()) && g.is_non_overlapping_and_dense() &&
            g.scalar_type() == a.grads[0].scalar_type(),
        formatted(
            "fused: {}: gradients must be dense in memory and of one type of "
            "float32, float64, bfloat16, float16",
            op));
  }
  TORCH_CHECK_VALUE(
      a.outputs.empty() || a.outputs.size() == a.grads.size(),
      formatted(
          "fused: {}: outputs has {} tensors, expected {}",
          op,
          a.outputs.size(),
          a.grads.size()));
  for (size_t i = 0; i < a.outputs.size(); ++i) {
    check_dense(op, a.outputs[i]);
    TORCH_CHECK_VALUE(
        a.outputs[i].device() == a.grads[i].device() &&
            a.outputs[i].sizes() == a.grads[i].sizes() &&
            a.outputs[i].strides() == a.grads[i].strides() &&
            a.outputs[i].scalar_type() == a.grads[i].scalar_type(),
        formatted(
            "fused: {}: outputs[{}] must have the sizes, strides, type and "
            "device of its gradient",
            op,
            i));
  }
  check_reduction(op, a.reduction, a.grads.size(), a.grads[0].device());
}

StepPlan::StepPlan(std::shared_ptr<const StepArguments> arguments, size_t block)
    : arguments_(std::move(arguments)) {
  const StepArguments& a = *arguments_;
  // What one engine call cannot mix: types, and variants of the formula.
  using Types =
      std::tuple<at::ScalarType, at::ScalarType, at::ScalarType, unsigned>;
  const bool on_cpu = a.params[0].device().is_cpu();
  std::map<Types, size_t> open; // calls that still take tensors
  Hash whole;
  whole.add(a.done_before);
  StepCall shared;
  shared.op = a.op;
  shared.reduction = to_engine(a.reduction);
  shared.has_masters = !a.masters.empty();
  shared.follow = a.masters_follow && on_cpu;
  shared.reduced = a.reduced;
  shared.shared_params = a.shared_params;
  shared.skip_block = a.block_skip ? block : 0;
  shared.grad_scale =
      a.grad_scale ? a.grad_scale->const_data_ptr<float>() : nullptr;
  shared.found_inf = a.found_inf ? a.found_inf->data_ptr<float>() : nullptr;
  for (const HyperArguments& h : a.hypers) {
    shared.hypers.push_back(to_engine(h));
    shared.lrs.push_back(device_lr(h));
  }
  for (size_t i = 0; i < a.params.size(); ++i) {
    const at::Tensor& param = a.params[i];
    grads_.push_back(a.reduced ? a.grads[i] : like_param(a.grads[i], param));
    const at::ScalarType state = a.states.empty() || a.states[0].empty()
        ? compute_type(param.scalar_type())
        : a.states[0][i].scalar_type();
    const size_t group =
        a.hyper_index.empty() ? 0 : static_cast<size_t>(a.hyper_index[i]);
    const Types types{
        param.scalar_type(),
        grads_.back().scalar_type(),
        state,
        variant_of(a.hypers[group].rest)};
    auto found = open.find(types);
    if (found == open.end() ||
        members_[found->second].size() == kMaxStepTensors) {
      open[types] = calls_.size();
      found = open.find(types);
      calls_.push_back(shared);
      calls_.back().param_type = to_dtype(std::get<0>(types));
      calls_.back().grad_type = to_dtype(std::get<1>(types));
      calls_.back().state_type = to_dtype(state);
      members_.emplace_back();
    }
    const size_t call = found->second;
    calls_[call].tensors.push_back(to_engine(a, i, grads_.back()));
    members_[call].push_back(static_cast<int64_t>(i));
    const StepTensor& t = calls_[call].tensors.back();
    whole.add(t.layout_hash).add(t.step && on_cpu ? double(*t.step) : 0.0);
  }
  for (size_t c = 0; c < calls_.size(); ++c) {
    // A disagreement anywhere must stop all of it.
    calls_[c].call_hash =
        calls_.size() > 1 || a.done_before != 0 ? whole.value() : 0;
    if (a.reduction.used) {
      const at::Tensor& used = *a.reduction.used;
      used_.push_back(calls_.size() == 1 ? used : at::cat(flags_of(c)));
      calls_[c].used = used_[c].data_ptr<uint8_t>();
    }
  }
}

std::vector<at::Tensor> StepPlan::flags_of(size_t i) const {
  const std::vector<int64_t>& members = members_[i];
  std::vector<at::Tensor> runs;
  for (size_t begin = 0; begin < members.size();) {
    size_t end = begin + 1;
    while (end < members.size() && members[end] == members[end - 1] + 1) {
      ++end;
    }
    runs.push_back(arguments_->reduction.used->narrow(
        0, members[begin], static_cast<int64_t>(end - begin)));
    begin = end;
  }
  return runs;
}

void StepPlan::take_used(size_t i) {
  if (has_used() && calls_.size() > 1) {
    const std::vector<at::Tensor> to = flags_of(i);
    std::vector<at::Tensor> from;
    int64_t begin = 0;
    for (const at::Tensor& run : to) {
      from.push_back(used_[i].narrow(0, begin, run.numel()));
      begin += run.numel();
    }
    at::_foreach_copy_(to, from);
  }
}

std::vector<ShardsCall> split_shards(const ShardsCall& whole) {
  std::vector<ShardsCall> parts;
  const size_t n = whole.grads.size();
  for (size_t begin = 0; begin < n; begin += kMaxStepTensors) {
    const size_t end = std::min(n, begin + kMaxStepTensors);
    ShardsCall part = whole;
    part.grads.assign(whole.grads.begin() + begin, whole.grads.begin() + end);
    part.outputs.assign(
        whole.outputs.begin() + begin, whole.outputs.begin() + end);
    part.counts.assign(
        whole.counts.begin() + begin, whole.counts.begin() + end);
    part.used = whole.used ? whole.used + begin : nullptr;
    parts.push_back(std::move(part));
  }
  return parts;
}

ShardsCall to_engine(const ShardsArguments& a) {
  ShardsCall call;
  call.dtype = to_dtype(a.grads[0].scalar_type());
  Hash layout;
  for (const at::Tensor& output : a.outputs.empty() ? a.grads : a.outputs) {
    call.outputs.push_back(output.data_ptr());
  }
  for (const at::Tensor& g : a.grads) {
    call.grads.push_back(g.const_data_ptr());
    call.counts.push_back(static_cast<size_t>(g.numel()));
    layout.add(layout_hash(g));
  }
  call.layout_hash = layout.value();
  call.reduction = to_engine(a.reduction);
  call.used =
      a.reduction.used ? a.reduction.used->data_ptr<uint8_t>() : nullptr;
  return call;
}

at::Tensor memory_order(const at::Tensor& t) {
  return t.detach().as_strided({t.numel()}, {1});
}

} // namespace fusedpg
