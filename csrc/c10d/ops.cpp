// torch.ops.fusedpg: the fused steps, and an all-reduce that nothing of c10d is in
// front of, as operators that torch.compile and export understand. They are
// synchronous; groups are named.

#include <map>
#include <string>
#include <variant>

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "c10d/bindings.hpp"
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

// All fused steps: their schemas name the arguments.
void step(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  using Hyper = std::variant<double StepHyper::*, bool StepHyper::*>;
  static const std::map<std::string, Hyper> hypers = {
      {"beta1", &StepHyper::beta1},
      {"beta2", &StepHyper::beta2},
      {"eps", &StepHyper::eps},
      {"weight_decay", &StepHyper::weight_decay},
      {"momentum", &StepHyper::momentum},
      {"dampening", &StepHyper::dampening},
      {"nesterov", &StepHyper::nesterov},
      {"is_first_step", &StepHyper::first_step},
      {"amsgrad", &StepHyper::amsgrad},
      {"maximize", &StepHyper::maximize},
      {"trust_clip", &StepHyper::trust_clip},
      {"always_adapt", &StepHyper::always_adapt}};
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  const std::string& name = op.schema().name(); // "fusedpg::fused_adamw_"
  StepArguments a;
  a.op = step_op(name.substr(name.rfind(':') + 1));
  HyperArguments hyper;
  hyper.rest.decoupled = a.op != OpCode::kFusedAdam;
  std::string reduce;
  std::string group_name;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& what = arguments[i].name();
    const c10::IValue& value = torch::jit::peek(*stack, i, arguments.size());
    if (value.isTensorList()) {
      auto& list = what == "params" ? a.params
          : what == "grads"         ? a.grads
          : what == "master_params" ? a.masters
          : what == "state_steps"   ? a.steps
                                    : a.states.emplace_back();
      list = value.toTensorVector();
    } else if (what == "lr" && value.isTensor()) {
      hyper.lr = value.toTensor();
    } else if (what == "lr") {
      hyper.lr = value.toDouble();
    } else if (what == "grad_scale") {
      a.grad_scale = value.toOptional<at::Tensor>();
    } else if (what == "found_inf") {
      a.found_inf = value.toOptional<at::Tensor>();
    } else if (what == "reduce") {
      reduce = value.toStringRef();
    } else if (what == "weight") {
      a.reduction.weight = value.toOptional<double>();
    } else if (what == "block_skip") {
      a.block_skip = value.toBool();
    } else if (what == "group_name") {
      group_name = value.toStringRef();
    } else if (const auto* number = std::get_if<0>(&hypers.at(what))) {
      hyper.rest.*(*number) = value.toDouble();
    } else {
      hyper.rest.*std::get<1>(hypers.at(what)) = value.toBool();
    }
  }
  torch::jit::drop(*stack, arguments.size());
  TORCH_CHECK_VALUE(
      reduce == "mean" || reduce == "sum",
      formatted(
          "fused: {}: reduce must be \"mean\" or \"sum\", found \"{}\"",
          op_name(a.op),
          reduce));
  a.reduction.mean = reduce == "mean";
  a.hypers = {std::move(hyper)};
  // A synchronous step has succeeded when it returns nothing to wait for.
  const Resolved group(group_name, c10::DeviceType::CPU);
  if (const auto work = group->fused_step_(std::move(a), false)) {
    work->wait();
  }
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

const auto& all_reduce_operator() {
  static const auto handle =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("fusedpg::all_reduce_", "")
          .typed<void(const at::Tensor&, c10::string_view, c10::string_view)>();
  return handle;
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
  // By keys, not by a guard of the thread: handlers of signals run in this call.
  all_reduce_operator().redispatch(
      keys & c10::after_ADInplaceOrView_keyset, tensor, op, group_name);
}

// fusedpg._C.all_reduce_(tensor, op, group): calls torch.ops.fusedpg.all_reduce_
// without what torch.ops does in front of the dispatcher, which takes as long as
// the rest of a small call. Returns False, and has done nothing, where a
// __torch_function__ may take the call, or an argument is of no usual type.
PyObject* call_all_reduce(
    PyObject* /* module */,
    PyObject* const* arguments,
    Py_ssize_t count) {
  HANDLE_TH_ERRORS
  static const py::handle group_type = py::type::of<c10d::ProcessGroup>();
  if (count != 3 || !THPVariable_CheckExact(arguments[0]) ||
      !PyUnicode_CheckExact(arguments[1]) ||
      !py::type::handle_of(arguments[2]).is(group_type) ||
      at::impl::torch_function_mode_enabled()) {
    Py_RETURN_FALSE;
  }
  Py_ssize_t length = 0;
  const char* op = PyUnicode_AsUTF8AndSize(arguments[1], &length);
  if (op == nullptr) {
    throw python_error();
  }
  const auto group =
      py::handle(arguments[2]).cast<c10::intrusive_ptr<c10d::ProcessGroup>>();
  const at::Tensor& tensor = THPVariable_Unpack(arguments[0]);
  const std::string& name = group->getGroupName();
  {
    const py::gil_scoped_release no_gil;
    all_reduce_operator().call(tensor, {op, static_cast<size_t>(length)}, name);
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
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

template <c10::BoxedKernel::BoxedKernelFunction* kernel>
void implement_steps(torch::Library& m) {
  for (const char* name :
       {"fused_sgd_", "fused_adam_", "fused_adamw_", "fused_lamb_"}) {
    for (const char* overload : {"", ".tensor_lr"}) {
      m.impl(
          (std::string(name) + overload).c_str(),
          torch::CppFunction::makeFromBoxedFunction<kernel>());
    }
  }
}

} // namespace

TORCH_LIBRARY_IMPL(fusedpg, CPU, m) {
  m.impl("all_reduce_", &all_reduce);
  implement_steps<&step>(m);
}
TORCH_LIBRARY_IMPL(fusedpg, CUDA, m) {
  m.impl("all_reduce_", &all_reduce);
  implement_steps<&step>(m);
}

TORCH_LIBRARY_IMPL(fusedpg, Autograd, m) {
  m.impl("all_reduce_", &all_reduce_of_autograd);
}

void bind_operators(py::module_& m) {
  static PyMethodDef methods[] = {
      {"all_reduce_",
       reinterpret_cast<PyCFunction>(
           reinterpret_cast<void (*)()>(&call_all_reduce)),
       METH_FASTCALL,
       "fusedpg.all_reduce_(tensor, op, group), where that is plain; returns "
       "whether it is."},
      {}};
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) {
    throw py::error_already_set();
  }
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
  implement_steps<&nothing>(m);
}

} // namespace fusedpg
