// torch.ops.fusedpg: the fused steps, and an all-reduce that nothing of c10d is in
// front of, as operators that torch.compile and export understand. They are
// synchronous; groups are named.

#include <torch/library.h>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "c10d/process_group_fused.hpp"

namespace fusedpg {
namespace {

// A group during a call. The registry of names does not keep groups alive, and a
// signal's handler or another thread may destroy this one meanwhile.
class Resolved {
 public:
  // The backend of a device's tensors. Raises for names that nobody has.
  Resolved(c10::string_view name, c10::DeviceType device)
      : group_(c10d::resolve_process_group(std::string(name))),
        backend_(group_->getBackend(device)),
        fused_(dynamic_cast<ProcessGroupFused*>(backend_.get())) {
    if (fused_ == nullptr) {
      // TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around it.
      ProcessGroupFused* inside = find_group(std::string(name));
      if (inside != nullptr &&
          inside->getBackendName() == backend_->getBackendName()) {
        fused_ = inside;
      }
    }
    TORCH_CHECK_VALUE(
        fused_ != nullptr,
        formatted(
            "fused: group \"{}\" is of another backend; create it with "
            "init_process_group(\"fused\") or new_group(backend=\"fused\")",
            name));
  }
  ProcessGroupFused* operator->() const {
    return fused_;
  }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  ProcessGroupFused* fused_;
};

using Lr = std::variant<double, at::Tensor>;
using OptionalTensor = std::optional<at::Tensor>;

// What all steps have in common.
struct Common {
  at::TensorList params;
  at::TensorList grads;
  at::TensorList master_params;
  const OptionalTensor& grad_scale;
  const OptionalTensor& found_inf;
  c10::string_view reduce;
  std::optional<double> weight;
  bool block_skip = false;
};

StepArguments arguments(OpCode op, const Common& c, HyperArguments hyper) {
  TORCH_CHECK_VALUE(
      c.reduce == "mean" || c.reduce == "sum",
      formatted(
          "fused: {}: reduce must be \"mean\" or \"sum\", found \"{}\"",
          op_name(op),
          c.reduce));
  StepArguments a;
  a.op = op;
  a.params = c.params.vec();
  a.grads = c.grads.vec();
  a.masters = c.master_params.vec();
  a.hypers = {std::move(hyper)};
  a.reduction.mean = c.reduce == "mean";
  a.reduction.weight = c.weight;
  a.block_skip = c.block_skip;
  a.grad_scale = c.grad_scale;
  a.found_inf = c.found_inf;
  return a;
}

void run(StepArguments a, c10::string_view group_name) {
  // A synchronous step has succeeded when it returns nothing to wait for.
  const Resolved group(group_name, c10::DeviceType::CPU);
  if (const auto work = group->fused_step_(std::move(a), false)) {
    work->wait();
  }
}

template <typename L>
void sgd(
    at::TensorList params,
    at::TensorList grads,
    at::TensorList momentum_buffer_list,
    at::TensorList master_params,
    double weight_decay,
    double momentum,
    L lr,
    double dampening,
    bool nesterov,
    bool maximize,
    bool is_first_step,
    const OptionalTensor& grad_scale,
    const OptionalTensor& found_inf,
    c10::string_view reduce,
    std::optional<double> weight,
    bool block_skip,
    c10::string_view group_name) {
  HyperArguments h{Lr(lr), {}};
  h.rest.weight_decay = weight_decay;
  h.rest.momentum = momentum;
  h.rest.dampening = dampening;
  h.rest.nesterov = nesterov;
  h.rest.maximize = maximize;
  h.rest.first_step = is_first_step;
  StepArguments a = arguments(
      OpCode::kFusedSgd,
      {params,
       grads,
       master_params,
       grad_scale,
       found_inf,
       reduce,
       weight,
       block_skip},
      std::move(h));
  a.states = {momentum_buffer_list.vec()};
  run(std::move(a), group_name);
}

template <OpCode op, typename L>
void adam(
    at::TensorList params,
    at::TensorList grads,
    at::TensorList exp_avgs,
    at::TensorList exp_avg_sqs,
    at::TensorList max_exp_avg_sqs,
    at::TensorList state_steps,
    at::TensorList master_params,
    L lr,
    double beta1,
    double beta2,
    double weight_decay,
    double eps,
    bool amsgrad,
    bool maximize,
    const OptionalTensor& grad_scale,
    const OptionalTensor& found_inf,
    c10::string_view reduce,
    std::optional<double> weight,
    bool block_skip,
    c10::string_view group_name) {
  HyperArguments h{Lr(lr), {}};
  h.rest.beta1 = beta1;
  h.rest.beta2 = beta2;
  h.rest.weight_decay = weight_decay;
  h.rest.eps = eps;
  h.rest.decoupled = op == OpCode::kFusedAdamW;
  h.rest.amsgrad = amsgrad;
  h.rest.maximize = maximize;
  StepArguments a = arguments(
      op,
      {params,
       grads,
       master_params,
       grad_scale,
       found_inf,
       reduce,
       weight,
       block_skip},
      std::move(h));
  a.states = {exp_avgs.vec(), exp_avg_sqs.vec(), max_exp_avg_sqs.vec()};
  a.steps = state_steps.vec();
  run(std::move(a), group_name);
}

template <typename L>
void lamb(
    at::TensorList params,
    at::TensorList grads,
    at::TensorList exp_avgs,
    at::TensorList exp_avg_sqs,
    at::TensorList state_steps,
    at::TensorList master_params,
    L lr,
    double beta1,
    double beta2,
    double weight_decay,
    double eps,
    bool trust_clip,
    bool always_adapt,
    bool maximize,
    const OptionalTensor& grad_scale,
    const OptionalTensor& found_inf,
    c10::string_view reduce,
    std::optional<double> weight,
    c10::string_view group_name) {
  HyperArguments h{Lr(lr), {}};
  h.rest.beta1 = beta1;
  h.rest.beta2 = beta2;
  h.rest.weight_decay = weight_decay;
  h.rest.eps = eps;
  h.rest.trust_clip = trust_clip;
  h.rest.always_adapt = always_adapt;
  h.rest.maximize = maximize;
  StepArguments a = arguments(
      OpCode::kFusedLamb,
      {params, grads, master_params, grad_scale, found_inf, reduce, weight},
      std::move(h));
  a.states = {exp_avgs.vec(), exp_avg_sqs.vec()};
  a.steps = state_steps.vec();
  run(std::move(a), group_name);
}

void all_reduce(
    const at::Tensor& tensor,
    c10::string_view op,
    c10::string_view group_name) {
  TORCH_CHECK_VALUE(
      tensor.is_cpu() || (!tensor.is_conj() && !tensor.is_neg()),
      "fused: all_reduce_ takes no conjugate or negative view on ",
      tensor.device(),
      ": call resolve_conj() or resolve_neg() first");
  const Resolved group(group_name, tensor.device().type());
  group->all_reduce_(tensor, op);
}

void all_reduce_of_meta(
    const at::Tensor& /* tensor */,
    c10::string_view op,
    c10::string_view /* group_name */) {
  reduction_named(op);
}

void all_reduce_of_autograd(
    c10::DispatchKeySet keys,
    const at::Tensor& tensor,
    c10::string_view op,
    c10::string_view group_name) {
  if (at::GradMode::is_enabled() && tensor.requires_grad()) {
    const std::string reason =
        "fused: all_reduce_ writes to a tensor that requires grad, and has no "
        "derivative: call it under torch.no_grad(), or "
        "torch.distributed.nn.functional.all_reduce()";
    if (tensor.is_cpu() &&
        !tensor.unsafeGetTensorImpl()->is_python_dispatch()) {
      const Resolved group(group_name, c10::DeviceType::CPU);
      group->refuse(reason); // peers may wait in it
    }
    TORCH_CHECK(false, reason);
  }
  static const auto handle =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("fusedpg::all_reduce_", "")
          .typed<void(const at::Tensor&, c10::string_view, c10::string_view)>();
  // By keys, not by a guard of the thread: handlers of signals run in this call.
  handle.redispatch(
      keys & c10::after_ADInplaceOrView_keyset, tensor, op, group_name);
}

void check_meta(const c10::OperatorHandle& op, const at::Tensor& t) {
  TORCH_CHECK_VALUE(
      t.is_meta(),
      formatted(
          "fused: {}: some tensors are on the device meta and one is on {}: "
          "nothing can be computed from tensors without values",
          op.schema().name(),
          t.device()));
}

// With fake and meta tensors nothing happens: outputs are the inputs.
void nothing(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  for (const c10::IValue& value : torch::jit::last(*stack, count)) {
    if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorVector()) {
        check_meta(op, t);
      }
    }
  }
  torch::jit::drop(*stack, count);
}

// LAMB looks for no blocks of zeros.
// `lr` is a number, or in the overload tensor_lr a tensor, as in torch's own
// _fused_*_; $lr stands for it. found_inf is written because it becomes global.
std::string schema(
    const std::string& name,
    bool tensor_lr,
    const std::string& states,
    std::string hypers,
    bool skips = true) {
  hypers.replace(hypers.find("$lr"), 3, tensor_lr ? "Tensor lr" : "float lr");
  return name + (tensor_lr ? ".tensor_lr" : "") +
      "(Tensor(a!)[] params, Tensor[] grads, " + states +
      ", *, Tensor(f!)[] master_params, " + hypers +
      ", Tensor? grad_scale=None, Tensor(g!)? found_inf=None, "
      "str reduce=\"mean\", float? weight=None, " +
      (skips ? "bool block_skip=False, " : "") + "str group_name) -> ()";
}

void define(torch::Library& m, const std::string& text) {
  m.def(text.c_str());
}

} // namespace

TORCH_LIBRARY(fusedpg, m) {
  m.def("all_reduce_(Tensor(a!) tensor, str op, str group_name) -> ()");
  for (const bool tensor_lr : {false, true}) {
    define(
        m,
        schema(
            "fused_sgd_",
            tensor_lr,
            "Tensor(b!)[] momentum_buffer_list",
            "float weight_decay, float momentum, $lr, float dampening, "
            "bool nesterov, bool maximize, bool is_first_step"));
    for (const char* name : {"fused_adam_", "fused_adamw_"}) {
      define(
          m,
          schema(
              name,
              tensor_lr,
              "Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
              "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] state_steps",
              "$lr, float beta1, float beta2, float weight_decay, float eps, "
              "bool amsgrad, bool maximize"));
    }
    define(
        m,
        schema(
            "fused_lamb_",
            tensor_lr,
            "Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
            "Tensor(e!)[] state_steps",
            "$lr, float beta1, float beta2, float weight_decay, float eps, "
            "bool trust_clip, bool always_adapt, bool maximize",
            /*skips=*/false));
  }
}

namespace {

void implement(torch::Library& m) {
  using Tensor = const at::Tensor&;
  m.impl("all_reduce_", &all_reduce);
  m.impl("fused_sgd_", &sgd<double>);
  m.impl("fused_sgd_.tensor_lr", &sgd<Tensor>);
  m.impl("fused_adam_", &adam<OpCode::kFusedAdam, double>);
  m.impl("fused_adam_.tensor_lr", &adam<OpCode::kFusedAdam, Tensor>);
  m.impl("fused_adamw_", &adam<OpCode::kFusedAdamW, double>);
  m.impl("fused_adamw_.tensor_lr", &adam<OpCode::kFusedAdamW, Tensor>);
  m.impl("fused_lamb_", &lamb<double>);
  m.impl("fused_lamb_.tensor_lr", &lamb<Tensor>);
}

} // namespace

TORCH_LIBRARY_IMPL(fusedpg, CPU, m) {
  implement(m);
}
TORCH_LIBRARY_IMPL(fusedpg, CUDA, m) {
  implement(m);
}

TORCH_LIBRARY_IMPL(fusedpg, Autograd, m) {
  m.impl("all_reduce_", &all_reduce_of_autograd);
}

// torch would reduce a copy without the bit, and expects a result to copy back.
// Tensors of ours are read and written through the bit.
TORCH_LIBRARY_IMPL(fusedpg, Conjugate, m) {
  m.impl("all_reduce_", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(fusedpg, Negative, m) {
  m.impl("all_reduce_", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(fusedpg, Meta, m) {
  m.impl("all_reduce_", &all_reduce_of_meta);
  for (const char* name :
       {"fused_sgd_", "fused_adam_", "fused_adamw_", "fused_lamb_"}) {
    for (const char* overload : {"", ".tensor_lr"}) {
      m.impl(
          (std::string(name) + overload).c_str(),
          torch::CppFunction::makeFromBoxedFunction<&nothing>());
    }
  }
}

} // namespace fusedpg
