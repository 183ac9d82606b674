// Gradients of many parameters at once, and the hook that sees each of them:
// what fusedpg/optim/_bridge.py would do parameter by parameter in Python.

#include "c10d/bindings.hpp"

#include <pybind11/stl.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/autograd/python_variable.h>

namespace fusedpg {
namespace {

bool is_plain_grad(const at::Tensor& grad) {
  return grad.defined() && !grad.unsafeGetTensorImpl()->is_python_dispatch();
}

// What the hook of one parameter knows. It is reachable from the parameter, so
// nothing in it may refer to that, or Python would never free either.
struct Watched {
  at::Tensor view; // memory in the bucket of the last pass
  at::Tensor taken;
  bool used = false; // since the last finalisation, as DDP's local_used_map
  bool present = false; // p.grad was there when the reducer was armed
  bool owned = false; // by an optimizer of ours
};

struct State {
  bool armed = false;
  bool takes = false;
  bool as_view = false;
  // Called first while it is set.
  py::object before = py::none();
};

// Another hook of the parameter would see, and might change, what stands in
// p.grad after ours.
bool is_alone(const at::Tensor& param) {
  // Torch keeps nothing but Python's hooks there.
  const auto* hooks =
      static_cast<const torch::autograd::PyFunctionTensorPostAccGradHooks*>(
          torch::autograd::impl::post_acc_grad_hooks(param).get());
  return hooks != nullptr && PyDict_Size(hooks->dict) == 1;
}

struct Hook {
  std::shared_ptr<State> state;
  std::shared_ptr<Watched> watched;
};

void accumulated(const Hook& hook, PyObject* object) {
  const State& s = *hook.state;
  Watched& w = *hook.watched;
  // DDP's map is marked already, and it insists on a gradient then.
  const bool marked = w.used;
  w.used = true;
  if (!s.before.is_none()) {
    const py::object before = s.before;
    before(py::reinterpret_borrow<py::object>(object));
  }
  const at::Tensor& param = THPVariable_Unpack(object);
  at::Tensor& place = param.mutable_grad();
  if (!s.armed || !s.takes || !w.owned || !w.view.defined() ||
      !is_plain_grad(place) || place.layout() != at::kStrided ||
      place.requires_grad() || place.strides() != param.strides() ||
      place.scalar_type() != param.scalar_type() ||
      w.view.scalar_type() != param.scalar_type() || !is_alone(param)) {
    return;
  }
  if (s.as_view) {
    if (w.present) {
      return; // it may lie in a bucket
    }
    // DDP copies nothing when the gradient is its own bucket's memory.
    w.taken = std::exchange(place, w.view);
  } else if (!marked) {
    // It fills the bucket with zeros, which is cheaper than copying.
    w.taken = std::exchange(place, at::Tensor());
  }
}

constexpr const char* kCapsule = "fusedpg.hook";

PyObject* on_gradient(PyObject* self, PyObject* param) {
  HANDLE_TH_ERRORS
  accumulated(*static_cast<Hook*>(PyCapsule_GetPointer(self, kCapsule)), param);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef on_gradient_method = {"on_gradient", on_gradient, METH_O, nullptr};

class Watch {
 public:
  // A callable for register_post_accumulate_grad_hook; the number is the next.
  py::object add() {
    watched_.push_back(std::make_shared<Watched>());
    const py::capsule capsule(
        new Hook{state, watched_.back()}, kCapsule, [](PyObject* held) {
          delete static_cast<Hook*>(PyCapsule_GetPointer(held, kCapsule));
        });
    return py::reinterpret_steal<py::object>(
        PyCFunction_New(&on_gradient_method, capsule.ptr()));
  }

  Watched& operator[](size_t i) {
    return *watched_.at(i);
  }

  void look(const std::vector<at::Tensor>& params) {
    for (size_t i = 0; i < params.size(); ++i) {
      watched_.at(i)->present = is_plain_grad(params[i].grad());
    }
  }

  std::optional<at::Tensor> take(size_t i) {
    at::Tensor taken = std::exchange(watched_.at(i)->taken, at::Tensor());
    return taken.defined() ? std::make_optional(taken) : std::nullopt;
  }

  std::vector<size_t> unfinished() const {
    std::vector<size_t> found;
    for (size_t i = 0; i < watched_.size(); ++i) {
      if (watched_[i]->taken.defined()) {
        found.push_back(i);
      }
    }
    return found;
  }

  void drop_taken() {
    for (const auto& w : watched_) {
      w->taken = at::Tensor();
    }
  }

  void finish() {
    for (const auto& w : watched_) {
      w->used = w->present = false;
      w->taken = at::Tensor();
    }
  }

  void forget(size_t i) {
    *watched_.at(i) = Watched();
  }

  // The gradients taken of all these parameters, if they are as they were when
  // their views were made; otherwise nothing, and nothing has changed.
  std::optional<std::vector<at::Tensor>> take_all(
      const std::vector<size_t>& numbers,
      const std::vector<at::Tensor>& params) {
    for (size_t i = 0; i < numbers.size(); ++i) {
      const Watched& w = *watched_.at(numbers[i]);
      if (!w.taken.defined() || !w.view.defined() || !w.owned ||
          w.view.strides() != params[i].strides()) {
        return std::nullopt;
      }
    }
    std::vector<at::Tensor> found;
    found.reserve(numbers.size());
    for (const size_t number : numbers) {
      found.push_back(std::exchange(watched_[number]->taken, at::Tensor()));
    }
    return found;
  }

  const std::shared_ptr<State> state = std::make_shared<State>();

 private:
  std::vector<std::shared_ptr<Watched>> watched_;
};

bool same_objects(const py::list& a, const py::list& b) {
  if (a.size() != b.size()) {
    return false;
  }
  for (size_t i = 0; i < a.size(); ++i) {
    if (PyList_GET_ITEM(a.ptr(), i) != PyList_GET_ITEM(b.ptr(), i)) {
      return false;
    }
  }
  return true;
}

// Puts gradients, or None, into their places, as `p.grad = g` does but for
// checks that hold by construction.
void set_gradients(
    const py::list& params,
    const std::optional<py::list>& grads) {
  for (size_t i = 0; i < params.size(); ++i) {
    tensor_at(params, i).mutable_grad() =
        grads ? tensor_at(*grads, i) : at::Tensor();
  }
}

// Whether these stand in `p.grad`, in the layout of their parameters.
bool have_gradients(const py::list& params, const py::list& grads) {
  if (params.size() != grads.size()) {
    return false;
  }
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& param = tensor_at(params, i);
    const at::Tensor& grad = tensor_at(grads, i);
    if (!param.grad().is_same(grad) || param.strides() != grad.strides()) {
      return false;
    }
  }
  return true;
}

// The places of the parameters that have none.
std::vector<size_t> without_gradient(const py::list& params) {
  std::vector<size_t> found;
  for (size_t i = 0; i < params.size(); ++i) {
    if (!tensor_at(params, i).grad().defined()) {
      found.push_back(i);
    }
  }
  return found;
}

// Whether nobody has them but this list.
bool only_here(const py::list& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyObject* item = PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i));
    if (Py_REFCNT(item) != 1 || tensor_at(tensors, i).use_count() != 1) {
      return false;
    }
  }
  return true;
}

} // namespace

const at::Tensor& tensor_at(const py::list& list, size_t i) {
  PyObject* item =
      PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i)); // borrowed
  TORCH_CHECK_TYPE(THPVariable_Check(item), "fused: a list of tensors");
  return THPVariable_Unpack(item);
}

void bind_gradients(py::module_& m) {
  py::class_<Watch> watch(m, "GradientWatch");
  watch.def(py::init<>())
      .def("add", &Watch::add)
      .def("look", &Watch::look)
      .def("take", &Watch::take)
      .def("take_all", &Watch::take_all)
      .def("unfinished", &Watch::unfinished)
      .def("drop_taken", &Watch::drop_taken)
      .def("finish", &Watch::finish)
      .def("forget", &Watch::forget)
      .def("used", [](Watch& w, size_t i) { return w[i].used; })
      .def("own", [](Watch& w, size_t i, bool owned) { w[i].owned = owned; })
      .def("set_view", [](Watch& w, size_t i, at::Tensor view) {
        w[i].view = std::move(view);
      });
  const auto state = [&](const char* name, auto member) {
    watch.def_property(
        name,
        [member](const Watch& w) { return w.state.get()->*member; },
        [member](Watch& w, std::decay_t<decltype(State().*member)> value) {
          w.state.get()->*member = std::move(value);
        });
  };
  state("armed", &State::armed);
  state("takes", &State::takes);
  state("as_view", &State::as_view);
  state("before", &State::before);
  m.def("same_objects", &same_objects);
  m.def("set_gradients", &set_gradients, py::arg("params"), py::arg("grads"));
  m.def("have_gradients", &have_gradients);
  m.def("without_gradient", &without_gradient);
  m.def("only_here", &only_here);
}

} // namespace fusedpg
