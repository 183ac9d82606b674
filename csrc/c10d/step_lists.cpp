// What a step does for each of many parameters, without Python between them:
// reading p.grad, the dicts of the optimizer's state, and sums of squares.
// Nothing is kept from one call to the next, so nothing can be out of date.
// Where a parameter is not in the usual case they give None, and Python does it
// one by one and says what is wrong.

#include <algorithm>

#include <pybind11/stl.h>

#include <torch/csrc/autograd/python_variable.h>

#include "base/ownership.hpp"
#include "c10d/bindings.hpp"
#include "c10d/default_kernels.hpp"
#include "c10d/tensor_memory.hpp"
#include "c10d/tensors.hpp"

namespace fusedpg {
namespace {

using Items = std::vector<at::Tensor>;

PyObject* item_of(const py::list& list, size_t i) {
  return PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i)); // borrowed
}

// Borrowed, or null where there is none. Past __missing__ of a subclass.
PyObject* find(const py::dict& dict, PyObject* key) {
  PyObject* found = PyDict_GetItemWithError(dict.ptr(), key);
  if (found == nullptr && PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return found;
}

bool are_strides(PyObject* tuple, at::IntArrayRef strides) {
  if (!PyTuple_Check(tuple) ||
      PyTuple_GET_SIZE(tuple) != static_cast<Py_ssize_t>(strides.size())) {
    return false;
  }
  for (size_t d = 0; d < strides.size(); ++d) {
    const auto stride =
        PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, static_cast<Py_ssize_t>(d)));
    if (stride == -1 && PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
    if (stride != strides[d]) {
      return false;
    }
  }
  return true;
}

bool is_alike(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() &&
      a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

py::object grad_of(const at::Tensor& param) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(param.grad()));
}

// For parameters in their groups and their layouts whose state has all keys:
// the numbers of their groups, and a list for each key. With `one_type` only
// if all have the type of the first.
py::object step_lists(
    const py::list& params,
    const py::dict& numbers,
    const py::dict& layouts,
    const py::dict& state,
    const py::list& keys,
    bool one_type) {
  py::list groups;
  std::vector<py::list> values(keys.size());
  for (size_t i = 0; i < params.size(); ++i) {
    PyObject* object = item_of(params, i);
    const at::Tensor& param = tensor_at(params, i);
    PyObject* number = find(numbers, object);
    PyObject* strides = find(layouts, object);
    PyObject* mine = keys.empty() ? nullptr : find(state, object);
    if (number == nullptr || strides == nullptr ||
        (!keys.empty() && (mine == nullptr || !PyDict_Check(mine))) ||
        !are_strides(strides, param.strides()) ||
        (one_type &&
         param.scalar_type() != tensor_at(params, 0).scalar_type())) {
      return py::none();
    }
    groups.append(py::handle(number));
    for (size_t k = 0; k < keys.size(); ++k) {
      PyObject* value =
          find(py::reinterpret_borrow<py::dict>(mine), item_of(keys, k));
      if (value == nullptr || !THPVariable_Check(value)) {
        return py::none();
      }
      values[k].append(py::handle(value));
    }
  }
  return py::make_tuple(groups, py::cast(values));
}

// What stands in p.grad, where it does, if all of it is exactly of a type.
std::optional<py::list> gradients_of(
    const py::list& params,
    const py::object& type) {
  py::list found;
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& param = tensor_at(params, i);
    if (!param.grad().defined()) {
      continue;
    }
    py::object grad = grad_of(param);
    if (!py::type::handle_of(grad).is(type)) {
      return std::nullopt;
    }
    found.append(std::move(grad));
  }
  return found;
}

// Whether parameters have these strides.
bool have_layouts(const py::list& params, const py::dict& layouts) {
  for (size_t i = 0; i < params.size(); ++i) {
    PyObject* strides = find(layouts, item_of(params, i));
    if (strides == nullptr ||
        !are_strides(strides, tensor_at(params, i).strides())) {
      return false;
    }
  }
  return true;
}

std::vector<at::ScalarType> dtypes_of(const py::list& tensors) {
  std::vector<at::ScalarType> found;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::ScalarType type = tensor_at(tensors, i).scalar_type();
    if (std::find(found.begin(), found.end(), type) == found.end()) {
      found.push_back(type);
    }
  }
  return found;
}

std::vector<int64_t> versions_of(const py::list& tensors) {
  std::vector<int64_t> found;
  found.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    found.push_back(tensor_at(tensors, i)._version());
  }
  return found;
}

PyObject* slice_name() {
  static PyObject* const name = PyUnicode_InternFromString("_slice");
  return name;
}

PyObject* unreduced_name() {
  static PyObject* const name = PyUnicode_InternFromString("_unreduced");
  return name;
}

// The slices of gradients that are exactly of a type, if each is reduced, and
// the contexts that they have.
py::object reduced_slices(const py::list& grads, const py::object& type) {
  static PyObject* const context = PyUnicode_InternFromString("_context");
  py::list slices, contexts;
  for (size_t i = 0; i < grads.size(); ++i) {
    const py::handle grad = item_of(grads, i);
    if (!py::type::handle_of(grad).is(type) ||
        !py::getattr(grad, unreduced_name()).is_none()) {
      return py::none();
    }
    py::object slice = py::getattr(grad, slice_name());
    if (!THPVariable_Check(slice.ptr())) {
      return py::none();
    }
    slices.append(std::move(slice));
    const py::object its = py::getattr(grad, context);
    if (std::none_of(contexts.begin(), contexts.end(), [&](py::handle one) {
          return one.is(its);
        })) {
      contexts.append(its);
    }
  }
  return py::make_tuple(slices, contexts);
}

// A part of a tensor's memory as `t.detach().as_strided(...)` gives it, but
// past autograd, which takes most of the time: the same memory and count of
// versions.
at::Tensor part_of(
    const at::Tensor& t,
    at::IntArrayRef sizes,
    at::IntArrayRef strides,
    int64_t offset) {
  const auto* whole = t.unsafeGetTensorImpl();
  auto part = whole->shallow_copy_and_detach(
      whole->version_counter(), /*allow_tensor_metadata_change=*/true);
  // A mode of torch's may answer for it, with anything.
  TORCH_CHECK(part.get() != whole, "fused: a dispatch mode detaches nothing");
  part->set_sizes_and_strides(sizes, strides, t.storage_offset() + offset);
  return at::Tensor(std::move(part));
}

// What a rank owns of each tensor, in the order of its memory.
Items owned_slices(const Items& tensors, int world_size, int rank) {
  constexpr int64_t kUnit = 1;
  Items slices;
  slices.reserve(tensors.size());
  for (const at::Tensor& t : tensors) {
    const auto own = shard_range(t.numel(), world_size, rank);
    slices.push_back(part_of(t, own.length, kUnit, own.offset));
  }
  return slices;
}

// As `t.unbind()` of a tensor of one dimension.
Items scalars_of(const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.dim() == 1, "fused: a tensor of one dimension");
  Items scalars;
  scalars.reserve(static_cast<size_t>(t.numel()));
  for (int64_t i = 0; i < t.numel(); ++i) {
    scalars.push_back(part_of(t, {}, {}, i * t.stride(0)));
  }
  return scalars;
}

// Manual mode: gradients of this rank alone have been reduced, to these slices.
void set_reduced(const py::list& grads, const py::list& slices) {
  TORCH_CHECK_VALUE(grads.size() == slices.size(), "fused: as many slices");
  for (size_t i = 0; i < grads.size(); ++i) {
    const py::handle grad = item_of(grads, i);
    py::setattr(grad, slice_name(), item_of(slices, i));
    py::setattr(grad, unreduced_name(), py::none());
  }
}

// This rank's gradients in manual mode, if every parameter has one that is
// laid out as the parameter, and nothing was reduced yet.
std::optional<py::list> unreduced_gradients(
    const py::list& params,
    const py::object& type) {
  py::list found;
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& param = tensor_at(params, i);
    if (!param.requires_grad() || !param.grad().defined()) {
      return std::nullopt;
    }
    const py::object grad = grad_of(param);
    if (!py::type::handle_of(grad).is(type) ||
        !py::getattr(grad, slice_name()).is_none()) {
      return std::nullopt;
    }
    py::object local = py::getattr(grad, unreduced_name());
    if (!THPVariable_Check(local.ptr())) {
      return std::nullopt;
    }
    const at::Tensor& t = THPVariable_Unpack(local.ptr());
    if (t.layout() != at::kStrided || !is_alike(t, param)) {
      return std::nullopt;
    }
    found.append(std::move(local));
  }
  return found;
}

// What Python sets and the hooks below read.
struct Flag {
  bool set = false;
};

// Manual mode: what sees each gradient of a parameter. Of small ones it uses
// the ShardedGrad of the pass before again, if nobody has kept it; what that
// refers to until then is not worth giving back.
class LocalWatch {
 public:
  // `owner` is a weak reference to the optimizer. `wrap` makes the ShardedGrad
  // that stands in p.grad from now on. When one gets another value instead,
  // `changed` is called if norms are known.
  LocalWatch(
      py::object type,
      py::object owner,
      py::object wrap,
      std::shared_ptr<Flag> norms_known,
      py::object changed)
      : type_(std::move(type)),
        owner_(std::move(owner)),
        wrap_(std::move(wrap)),
        norms_known_(std::move(norms_known)),
        changed_(std::move(changed)) {}

  void operator()(const py::object& object) {
    TORCH_CHECK_TYPE(THPVariable_Check(object.ptr()), "fused: a parameter");
    const at::Tensor& param = THPVariable_Unpack(object.ptr());
    if (norms_known_->set) {
      changed_();
    }
    if (!is_usable(param) || owner_().is_none() || !is_free()) {
      wrap_(object);
      const py::object now = grad_of(param);
      const bool ours =
          param.numel() <= kSmall && py::type::handle_of(now).is(type_);
      last_ = ours ? now : py::none();
      return;
    }
    static PyObject* const kept = PyUnicode_InternFromString("_kept");
    py::setattr(last_, unreduced_name(), grad_of(param));
    py::setattr(last_, slice_name(), py::none());
    py::setattr(last_, kept, py::bool_(false));
    param.mutable_grad() = THPVariable_Unpack(last_.ptr());
  }

 private:
  static constexpr int64_t kSmall = 4096;

  bool is_usable(const at::Tensor& param) const {
    const at::Tensor& grad = param.grad();
    if (last_.is_none() || !grad.defined() ||
        grad.unsafeGetTensorImpl()->is_python_dispatch() ||
        grad.layout() != at::kStrided || !is_alike(grad, param)) {
      return false;
    }
    return is_alike(THPVariable_Unpack(last_.ptr()), param);
  }

  // Nobody else has it. Known norms do, until changed_ drops them.
  bool is_free() const {
    return Py_REFCNT(last_.ptr()) == 1 &&
        THPVariable_Unpack(last_.ptr()).use_count() == 1;
  }

  py::object type_;
  py::object owner_;
  py::object wrap_;
  std::shared_ptr<Flag> norms_known_;
  py::object changed_;
  py::object last_ = py::none();
};

// overlap=True, after backward: gives the parameters their placeholders. Those
// that have none of their layout are returned.
py::list place_spent(const py::list& params, const py::dict& spent) {
  py::list without;
  for (size_t i = 0; i < params.size(); ++i) {
    PyObject* object = item_of(params, i);
    const at::Tensor& param = tensor_at(params, i);
    PyObject* grad = find(spent, object);
    if (grad == nullptr || !THPVariable_Check(grad) ||
        !is_alike(THPVariable_Unpack(grad), param)) {
      without.append(py::handle(object));
      continue;
    }
    param.mutable_grad() = THPVariable_Unpack(grad);
  }
  return without;
}

// overlap=True, in step(): whether the parameters that backward has updated,
// and no others, have a gradient, and each of these is a placeholder.
bool all_spent(
    const py::list& params,
    const py::set& updated,
    const py::object& type) {
  size_t spent = 0;
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor& param = tensor_at(params, i);
    const bool defined = param.grad().defined();
    if (defined ? !py::type::handle_of(grad_of(param)).is(type)
                : updated.contains(py::handle(item_of(params, i)))) {
      return false;
    }
    spent += defined;
  }
  // None of the updated is without one.
  return spent == updated.size();
}

double sum_squares(const at::Tensor& t) {
  check_tensor("sum_squares", t);
  TORCH_CHECK_VALUE(
      t.is_floating_point() && t.is_contiguous() &&
          to_dtype(t.scalar_type()) != DType::kOpaque,
      formatted(
          "fused: sum_squares: needs a contiguous tensor of float32, float64, "
          "bfloat16 or float16, got {}",
          t.scalar_type()));
  return default_kernels().sum_squares(
      to_dtype(t.scalar_type()),
      t.const_data_ptr(),
      static_cast<size_t>(t.numel()));
}

// One after the other, as a float64 tensor.
at::Tensor sums_of_squares(const Items& tensors) {
  at::Tensor sums =
      at::empty({static_cast<int64_t>(tensors.size())}, at::kDouble);
  auto* out = sums.data_ptr<double>();
  for (const at::Tensor& t : tensors) {
    *out++ = sum_squares(t);
  }
  return sums;
}

// A kernel of ours may multiply it in place, as torch would.
bool is_scalable(const at::Tensor& t) {
  return t.device().is_cpu() && t.layout() == at::kStrided &&
      t.is_contiguous() && !t.is_neg() &&
      // Half types are torch's: it rounds the number to them first.
      (t.scalar_type() == at::kFloat || t.scalar_type() == at::kDouble) &&
      !(t.requires_grad() && at::GradMode::is_enabled()) && !t.is_inference() &&
      !t.unsafeGetTensorImpl()->is_python_dispatch();
}

// The bits of torch._foreach_mul_ by a number, but past its dispatcher, which
// takes most of the time of small tensors. False where it does not apply, and
// then nothing has changed.
bool scale_slices(const Items& slices, double factor) {
  if (!std::all_of(slices.begin(), slices.end(), is_scalable)) {
    return false;
  }
  for (const at::Tensor& t : slices) {
    check_memory("clip_grad_norm_", t);
  }
  kernels::ReduceArgs args{.op = RedOp::kPremulSum, .factor = factor};
  for (const at::Tensor& t : slices) {
    args.dtype = to_dtype(t.scalar_type());
    void* data = t.data_ptr();
    default_kernels().reduce(
        args,
        &data,
        1,
        &data,
        1,
        static_cast<size_t>(t.numel()),
        /*stream=*/false);
    t.unsafeGetTensorImpl()->bump_version();
  }
  return true;
}

} // namespace

void bind_step_lists(py::module_& m) {
  py::class_<Flag, std::shared_ptr<Flag>>(m, "Flag")
      .def(py::init<>())
      .def_readwrite("set", &Flag::set);
  py::class_<LocalWatch>(m, "LocalWatch")
      .def(
          py::init<
              py::object,
              py::object,
              py::object,
              std::shared_ptr<Flag>,
              py::object>())
      .def("__call__", &LocalWatch::operator());
  m.def("step_lists", &step_lists);
  m.def("gradients_of", &gradients_of);
  m.def("have_layouts", &have_layouts);
  m.def("dtypes_of", &dtypes_of);
  m.def("versions_of", &versions_of);
  m.def("reduced_slices", &reduced_slices);
  m.def("owned_slices", &owned_slices);
  m.def("scalars_of", &scalars_of);
  m.def("set_reduced", &set_reduced);
  m.def("unreduced_gradients", &unreduced_gradients);
  m.def("place_spent", &place_spent);
  m.def("all_spent", &all_spent);
  m.def(
      "sum_squares",
      &sum_squares,
      py::arg("tensor"),
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "sums_of_squares",
      &sums_of_squares,
      py::arg("tensors"),
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "scale_slices",
      &scale_slices,
      py::arg("slices"),
      py::arg("factor"),
      py::call_guard<py::gil_scoped_release>());
}

} // namespace fusedpg
