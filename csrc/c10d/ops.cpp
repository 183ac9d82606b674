// torch.ops.fusedpg: the fused steps, and an all-reduce that nothing of c10d is in
// front of, as operators that torch.compile and export understand. They are
// synchronous; groups are named.

#include <memory>
#include <optional>
#include <string>

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/function_schema_parser.h>
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

// Tells the peers, which may wait in the call, before it raises on this rank alone.
// Peers of a call with tensors on GPUs are not told.
void tell_refusal(
    c10::string_view group_name,
    const at::Tensor& tensor,
    const std::string& reason) {
  if (tensor.is_cpu() && !tensor.unsafeGetTensorImpl()->is_python_dispatch()) {
    const Resolved group(group_name, c10::DeviceType::CPU);
    group->refuse(reason);
  }
}

// The same for a call of an operator, whose last argument is the group's name.
void tell_refusal(
    const c10::OperatorHandle& op,
    const torch::jit::Stack& stack,
    const std::string& reason) {
  const size_t count = op.schema().arguments().size();
  const c10::IValue& first = torch::jit::last(stack, count)[0];
  const std::string& name = stack.back().toStringRef();
  if (first.isTensor()) {
    tell_refusal(name, first.toTensor(), reason);
  } else if (const Tensors params = first.toTensorVector(); !params.empty()) {
    tell_refusal(name, params[0], reason);
  }
}

// `lr` is a number, or in the overload tensor_lr a tensor, as in torch's own
// _fused_*_. found_inf is written because it becomes global.
std::string schema(const StepInputs& step, bool tensor_lr) {
  std::string states;
  char alias = 'b';
  for (const StepInputs::State& state : step.states) {
    states += formatted("Tensor({}!)[] {}, ", alias++, state.name);
  }
  std::string hypers = step.hypers;
  hypers.replace(hypers.find("$lr"), 3, tensor_lr ? "Tensor lr" : "float lr");
  return std::string(op_name(step.op)) + (tensor_lr ? ".tensor_lr" : "") +
      "(Tensor(a!)[] params, Tensor[] grads, " + states +
      (step.counts ? "Tensor(e!)[] state_steps, " : "") +
      "*, Tensor(f!)[] master_params, " + hypers +
      ", Tensor? grad_scale=None, Tensor(g!)? found_inf=None, "
      "str reduce=\"mean\", float? weight=None, " +
      (step.two_passes ? "" : "bool block_skip=False, ") +
      "str group_name) -> ()";
}

// What executes one step, in both overloads.
class Step final : public c10::OperatorKernel {
 public:
  explicit Step(const StepInputs& inputs) : inputs_(inputs) {
    const auto parsed = torch::jit::parseSchema(schema(inputs, false));
    const auto index = [&](const std::string& name) {
      return parsed.argumentIndexWithName(name);
    };
    count_ = parsed.arguments().size();
    lr_ = index("lr").value();
    rest_ = index("grad_scale").value();
    int known = 0;
    const StepHyper any;
    kernels::for_each_hyper(any, [&](const std::string& name, auto) {
      const bool first = name == "first_step"; // torch has another name
      const auto found = index(first ? "is_first_step" : name);
      known += found.has_value();
      hypers_.push_back(name == "lr" ? std::nullopt : found);
    });
    // Ranks would not compare a hyperparameter that for_each_hyper lacks.
    TORCH_INTERNAL_ASSERT(
        known == rest_ - index("master_params").value() - 1, inputs.hypers);
  }

  // Arguments are in schema()'s order.
  void operator()(
      const c10::OperatorHandle& op,
      c10::DispatchKeySet /* keys */,
      torch::jit::Stack* stack) {
    const auto values = torch::jit::last(*stack, count_);
    const c10::IValue* next = values.begin();
    StepArguments a;
    a.op = inputs_.op;
    a.params = (next++)->toTensorVector();
    a.grads = (next++)->toTensorVector();
    for (size_t k = 0; k < inputs_.states.size(); ++k) {
      a.states.push_back((next++)->toTensorVector());
    }
    if (inputs_.counts) {
      a.steps = (next++)->toTensorVector();
    }
    a.masters = next->toTensorVector();
    a.hypers.resize(1);
    HyperArguments& hyper = a.hypers[0];
    if (values[lr_].isTensor()) {
      hyper.lr = values[lr_].toTensor();
    } else {
      hyper.lr = values[lr_].toDouble();
    }
    hyper.rest.decoupled = a.op != OpCode::kFusedAdam;
    auto at = hypers_.begin();
    kernels::for_each_hyper(hyper.rest, [&](const char*, auto& member) {
      if (*at) {
        member = values[**at].template to<std::decay_t<decltype(member)>>();
      }
      ++at;
    });
    next = &values[rest_];
    a.grad_scale = (next++)->toOptional<at::Tensor>();
    a.found_inf = (next++)->toOptional<at::Tensor>();
    const std::string& reduce = (next++)->toStringRef();
    a.reduction.weight = (next++)->toOptional<double>();
    a.block_skip = !inputs_.two_passes && (next++)->toBool();
    if (reduce != "mean" && reduce != "sum") {
      const std::string reason = formatted(
          "fused: {}: reduce must be \"mean\" or \"sum\", found \"{}\"",
          op_name(a.op),
          reduce);
      tell_refusal(op, *stack, reason);
      TORCH_CHECK_VALUE(false, reason);
    }
    a.reduction.mean = reduce == "mean";
    const Resolved group(next->toStringRef(), c10::DeviceType::CPU);
    torch::jit::drop(*stack, count_);
    // A synchronous step has succeeded when it returns nothing to wait for.
    if (const auto work = group->fused_step_(std::move(a), false)) {
      work->wait();
    }
  }

 private:
  const StepInputs& inputs_;
  // Places in the schema: of `lr`, of each hyperparameter by for_each_hyper's
  // order, of what follows them.
  int lr_;
  std::vector<std::optional<int>> hypers_;
  int rest_;
  size_t count_; // of arguments
};

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
  const bool tangent = c10::AutogradState::get_tls_state().get_fw_grad_mode() &&
      tensor._fw_grad(/*level=*/0).defined();
  if (tangent || (at::GradMode::is_enabled() && tensor.requires_grad())) {
    const std::string reason = tangent
        ? "fused: all_reduce_ writes to a tensor that has a tangent, and has "
          "no derivative: reduce both parts of forward_ad.unpack_dual()"
        : "fused: all_reduce_ writes to a tensor that requires grad, and has "
          "no derivative: call it under torch.no_grad(), or "
          "torch.distributed.nn.functional.all_reduce()";
    tell_refusal(group_name, tensor, reason);
    TORCH_CHECK(false, reason);
  }
  // By keys, not by a guard of the thread: handlers of signals run in this call.
  all_reduce_operator().redispatch(
      keys & c10::after_ADInplaceOrView_keyset, tensor, op, group_name);
}

// Checks the tensors that torch.func.grad and jvp differentiate, which are unwrapped
// when the step checks its arguments.
void step_of_autograd(
    const c10::OperatorHandle& op,
    c10::DispatchKeySet keys,
    torch::jit::Stack* stack) {
  const char* const name = op.schema().name().c_str() + sizeof("fusedpg::") - 1;
  const auto check = [&](const at::Tensor& t) {
    if (!t.key_set().has(c10::DispatchKey::FuncTorchGradWrapper)) {
      return;
    }
    const std::string reason = lost_derivative(name, t, /*is_param=*/false);
    if (!reason.empty()) {
      tell_refusal(op, *stack, reason);
      TORCH_CHECK(false, reason);
    }
  };
  for (const c10::IValue& value :
       torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) {
      check(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorList()) {
        check(t);
      }
    }
  }
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

// Without this, torch.vmap would raise on this rank alone.
void under_vmap(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string reason = formatted(
      "fused: {} has no rule for torch.vmap: call it outside",
      op.schema().name().substr(sizeof("fusedpg::") - 1));
  tell_refusal(op, *stack, reason);
  TORCH_CHECK(false, reason);
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
  if (op == nullptr) { // no UTF-8
    PyErr_Clear();
    Py_RETURN_FALSE;
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

// All steps' operators. `make`: an implementation from the step's inputs.
template <typename Make>
void implement_steps(torch::Library& m, Make&& make) {
  for (const StepInputs& step : all_step_inputs()) {
    for (const char* overload : {"", ".tensor_lr"}) {
      m.impl((std::string(op_name(step.op)) + overload).c_str(), make(step));
    }
  }
}

void implement(torch::Library& m) {
  m.impl("all_reduce_", &all_reduce);
  implement_steps(m, [](const StepInputs& step) {
    return torch::CppFunction::makeFromBoxedFunctor(
        std::make_unique<Step>(step));
  });
}

} // namespace

TORCH_LIBRARY(fusedpg, m) {
  m.def("all_reduce_(Tensor(a!) tensor, str op, str group_name) -> ()");
  for (const StepInputs& step : all_step_inputs()) {
    for (const bool tensor_lr : {false, true}) {
      m.def(schema(step, tensor_lr).c_str());
    }
  }
}

TORCH_LIBRARY_IMPL(fusedpg, CPU, m) {
  implement(m);
}
TORCH_LIBRARY_IMPL(fusedpg, CUDA, m) {
  implement(m);
}

TORCH_LIBRARY_IMPL(fusedpg, Autograd, m) {
  m.impl("all_reduce_", &all_reduce_of_autograd);
  implement_steps(m, [](const StepInputs& /* step */) {
    return torch::CppFunction::makeFromBoxedFunction<&step_of_autograd>();
  });
}

TORCH_LIBRARY_IMPL(fusedpg, FuncTorchBatched, m) {
  m.impl(
      "all_reduce_", torch::CppFunction::makeFromBoxedFunction<&under_vmap>());
  implement_steps(m, [](const StepInputs& /* step */) {
    return torch::CppFunction::makeFromBoxedFunction<&under_vmap>();
  });
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
  implement_steps(m, [](const StepInputs& /* step */) {
    return torch::CppFunction::makeFromBoxedFunction<&nothing>();
  });
}

} // namespace fusedpg
