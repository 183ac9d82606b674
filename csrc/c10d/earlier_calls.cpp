#include "c10d/bindings.hpp"

#include <algorithm>
#include <bit>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include "base/options.hpp"
#include "c10d/errors.hpp"

namespace fusedpg {
namespace {

// This thread's state that decides which types torch's functions give on CPUs.
struct Ambient {
  std::optional<at::ScalarType> autocast;
  at::ScalarType standard;

  static Ambient here() {
    const bool casts = at::autocast::is_autocast_enabled(at::kCPU);
    return {
        casts ? std::optional(at::autocast::get_autocast_dtype(at::kCPU))
              : std::nullopt,
        c10::get_default_dtype_as_scalartype()};
  }

  bool operator==(const Ambient&) const = default;
};

// The properties of a tensor, without keeping it.
struct Kind {
  explicit Kind(const at::Tensor& t)
      : sizes(t.sizes().vec()),
        strides(t.strides().vec()),
        type(t.scalar_type()),
        device(t.device()),
        keys(t.key_set()),
        requires_grad(t.requires_grad()) {}

  // The keys first: a tensor of another kind may have no sizes to ask for.
  bool is(const at::Tensor& t) const {
    return t.key_set() == keys && t.sizes() == at::IntArrayRef(sizes) &&
        t.strides() == at::IntArrayRef(strides) && t.scalar_type() == type &&
        t.device() == device && t.requires_grad() == requires_grad;
  }

  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::ScalarType type;
  at::Device device;
  c10::DispatchKeySet keys;
  bool requires_grad;
};

// The place of a tensor, if `places`, and its number in the call.
struct Place {
  const void* data;
  size_t first; // the place of the same tensor before it, or its own

  bool operator==(const Place&) const = default;
};

// The parameters of a function, and how a call's arguments belong to them.
class Parameters {
 public:
  // Values in the parameters' order, borrowed but for those that were made.
  struct Bound {
    std::vector<PyObject*> values;
    std::vector<py::object> made;
  };

  // `positional`: how many of them may be passed without a name. `kinds`: float
  // or int for a number, None for what is taken as it is.
  Parameters(
      const std::vector<std::string>& names,
      size_t positional,
      const py::dict& defaults,
      const std::vector<py::object>& kinds)
      : positional_(positional) {
    TORCH_CHECK_VALUE(
        names.size() == kinds.size() && positional <= names.size(),
        "each parameter has a kind");
    for (size_t i = 0; i < names.size(); ++i) {
      auto name = py::reinterpret_steal<py::str>(
          PyUnicode_InternFromString(names[i].c_str()));
      py::object standard;
      if (defaults.contains(name)) {
        standard = defaults[name];
      }
      const PyObject* kind = kinds[i].ptr();
      auto number = Number::kNone;
      if (kind == reinterpret_cast<PyObject*>(&PyFloat_Type)) {
        number = Number::kFloat;
      } else if (kind == reinterpret_cast<PyObject*>(&PyLong_Type)) {
        number = Number::kInt;
      }
      all_.push_back({std::move(name), std::move(standard), number});
    }
  }

  // None where arguments are missing, too many, or no numbers where parameters
  // are: `inspect` says which.
  std::optional<Bound> bind(const py::tuple& args, const py::dict& kwargs)
      const {
    const size_t given = args.size();
    if (given > positional_) {
      return std::nullopt;
    }
    Bound bound;
    bound.values.reserve(all_.size());
    size_t taken = 0;
    for (size_t i = 0; i < all_.size(); ++i) {
      const Parameter& parameter = all_[i];
      PyObject* value = nullptr;
      if (i < given) {
        value = PyTuple_GET_ITEM(args.ptr(), static_cast<Py_ssize_t>(i));
      } else {
        value = PyDict_GetItemWithError(kwargs.ptr(), parameter.name.ptr());
        taken += value != nullptr ? 1 : 0;
        if (value == nullptr) {
          value = parameter.standard.ptr();
        }
      }
      if (value != nullptr && parameter.number != Number::kNone) {
        value = number(value, parameter.number, bound.made);
      }
      if (value == nullptr) {
        PyErr_Clear();
        return std::nullopt;
      }
      bound.values.push_back(value);
    }
    return taken == kwargs.size() ? std::optional(std::move(bound))
                                  : std::nullopt;
  }

  py::object by_name(const py::tuple& args, const py::dict& kwargs) const {
    const std::optional<Bound> bound = bind(args, kwargs);
    if (!bound) {
      return py::none();
    }
    py::dict values;
    for (size_t i = 0; i < all_.size(); ++i) {
      values[all_[i].name] = py::handle(bound->values[i]);
    }
    return values;
  }

 private:
  enum class Number { kNone, kFloat, kInt };

  struct Parameter {
    py::str name;
    py::object standard; // its default; null: it has none
    Number number;
  };

  // What `float` or `int` makes of a number; null if it is none.
  static PyObject* number(
      PyObject* value,
      Number wanted,
      std::vector<py::object>& made) {
    const bool is_float = wanted == Number::kFloat;
    if (is_float ? PyFloat_CheckExact(value) : PyLong_CheckExact(value)) {
      return value;
    }
    if (PyBool_Check(value) ||
        !(PyLong_Check(value) || (is_float && PyFloat_Check(value)))) {
      return nullptr;
    }
    auto result = py::reinterpret_steal<py::object>(
        is_float ? PyNumber_Float(value) : PyNumber_Long(value));
    if (!result) {
      return nullptr;
    }
    made.push_back(std::move(result));
    return made.back().ptr();
  }

  size_t positional_;
  std::vector<Parameter> all_;
};

// Calls of a function on one group, and what each of them was given. A later
// call is like one of them if nothing differs that decides what is computed,
// where, and by which steps; numbers may. If there are targets, tensors also
// lie where they lay, so that results can be computed at the same places.
//
// It keeps no tensor. Its methods hold the GIL, and between two looks at
// `buckets_` run no code of Python's.
class EarlierCalls {
 public:
  explicit EarlierCalls(std::shared_ptr<Parameters> parameters)
      : parameters_(std::move(parameters)) {}

  // The number of the earlier call that a call is like, and its values in the
  // parameters' order; None if there is none, or if its arguments do not fit.
  py::object find(
      const py::tuple& args,
      const py::dict& kwargs,
      const py::object& targets) const {
    if (buckets_.empty() || !translate(fusion_compiles)) {
      return py::none();
    }
    const std::optional<Parameters::Bound> bound =
        parameters_->bind(args, kwargs);
    if (!bound) {
      return py::none();
    }
    const std::optional<Call> call = make(bound->values, targets);
    const size_t* found = call ? look(*call) : nullptr;
    if (found == nullptr) {
      return py::none();
    }
    py::list values(bound->values.size());
    for (size_t i = 0; i < bound->values.size(); ++i) {
      values[i] = py::handle(bound->values[i]);
    }
    return py::make_tuple(*found, std::move(values));
  }

  // Remembers a call by a number; that of the call that it is like and whose
  // place it takes.
  std::optional<size_t> add(
      const py::list& values,
      const py::object& targets,
      size_t number) {
    const std::vector<PyObject*> borrowed = pointers(values);
    const std::optional<Call> call = make(borrowed, targets);
    TORCH_CHECK_VALUE(call, "a call of ordinary tensors");
    if (size_t* found = look(*call)) {
      return std::exchange(*found, number);
    }
    buckets_[call->key].emplace_back(*call, number);
    ++noted_;
    return std::nullopt;
  }

  size_t size() const {
    return noted_;
  }

  void clear() {
    buckets_.clear();
    noted_ = 0;
  }

 private:
  // A call as it comes: its tensors behind its values' own.
  struct Call {
    const std::vector<PyObject*>& values;
    std::vector<at::Tensor> tensors;
    bool places;
    uint64_t key;
  };

  struct Record {
    Record(const Call& call, size_t its_number)
        : number(its_number),
          places(call.places),
          ambient(Ambient::here()) {
      for (PyObject* value : call.values) {
        types.push_back(
            py::reinterpret_borrow<py::object>(
                reinterpret_cast<PyObject*>(Py_TYPE(value))));
        flags.push_back(
            is_flag(value) ? py::reinterpret_borrow<py::object>(value)
                           : py::object());
      }
      for (size_t i = 0; i < call.tensors.size(); ++i) {
        kinds.emplace_back(call.tensors[i]);
        requires_grad |= kinds.back().requires_grad;
        where.push_back(place(call, i));
      }
    }

    bool is(const Call& call) const {
      if (call.tensors.size() != kinds.size() || call.places != places ||
          (requires_grad && at::GradMode::is_enabled()) ||
          Ambient::here() != ambient) {
        return false;
      }
      for (size_t i = 0; i < types.size(); ++i) {
        PyObject* value = call.values[i];
        if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != types[i].ptr() ||
            (flags[i] && !same_flag(value, flags[i].ptr()))) {
          return false;
        }
      }
      for (size_t i = 0; i < kinds.size(); ++i) {
        if (!kinds[i].is(call.tensors[i]) ||
            (places && place(call, i) != where[i])) {
          return false;
        }
      }
      return true;
    }

    size_t number;
    bool places;
    bool requires_grad = false;
    Ambient ambient;
    std::vector<py::object> types;
    std::vector<py::object> flags; // null: there is no program of each value
    std::vector<Kind> kinds;
    std::vector<Place> where;
  };

  // Each value of these has a program of its own.
  static bool is_flag(PyObject* value) {
    return value == Py_None || PyBool_Check(value) || PyUnicode_Check(value);
  }

  // Both are of one type.
  static bool same_flag(PyObject* value, PyObject* flag) {
    return value == flag ||
        (PyUnicode_Check(value) && PyUnicode_Compare(value, flag) == 0);
  }

  static Place place(const Call& call, size_t i) {
    size_t first = 0;
    while (!call.tensors[first].is_same(call.tensors[i])) {
      ++first;
    }
    return {call.places ? call.tensors[i].const_data_ptr() : nullptr, first};
  }

  static std::vector<PyObject*> pointers(const py::list& values) {
    std::vector<PyObject*> found;
    for (const py::handle value : values) {
      found.push_back(value.ptr());
    }
    return found;
  }

  // None where a value is of a class that is not torch's or Python's own, or a
  // tensor has no memory on a CPU.
  static std::optional<Call> make(
      const std::vector<PyObject*>& values,
      const py::object& targets) {
    Call call{values, {}, false, 0};
    for (PyObject* value : values) {
      if (THPVariable_CheckExact(value)) {
        call.tensors.push_back(THPVariable_Unpack(value));
      } else if (
          THPVariable_Check(value) ||
          (PyUnicode_Check(value) && !PyUnicode_CheckExact(value))) {
        return std::nullopt; // it may be anything
      }
    }
    const size_t arguments = call.tensors.size();
    for (const py::handle target : targets) {
      if (!THPVariable_CheckExact(target.ptr())) {
        return std::nullopt;
      }
      call.tensors.push_back(THPVariable_Unpack(target.ptr()));
      call.places = true;
    }
    const auto has_memory = [](const at::Tensor& t) {
      return t.layout() == at::kStrided && t.device().is_cpu() &&
          t.has_storage() && !t.is_neg() && !t.is_nested();
    };
    if (call.tensors.empty() ||
        !std::all_of(call.tensors.begin(), call.tensors.end(), has_memory)) {
      return std::nullopt;
    }
    const auto mix = [&](uint64_t value) {
      constexpr uint64_t kOdd = 0x9E3779B97F4A7C15;
      call.key = std::rotl((call.key ^ value) * kOdd, 31);
    };
    if (call.places) {
      // A tensor of another kind may have nothing there, which it may not be
      // asked for.
      const at::TensorImpl* impl =
          call.tensors[arguments].unsafeGetTensorImpl();
      const void* memory = impl->unsafe_storage()
                               .unsafeGetStorageImpl()
                               ->_mutable_data_ptr_no_checks()
                               .get();
      mix(reinterpret_cast<uint64_t>(memory));
      mix(static_cast<uint64_t>(impl->storage_offset()));
      return call;
    }
    const at::Tensor& first = call.tensors.front();
    for (const int64_t size : first.sizes()) {
      mix(static_cast<uint64_t>(size));
    }
    mix(static_cast<uint64_t>(first.scalar_type()));
    return call;
  }

  const size_t* look(const Call& call) const {
    const auto bucket = buckets_.find(call.key);
    if (bucket == buckets_.end()) {
      return nullptr;
    }
    for (const Record& record : bucket->second) {
      if (record.is(call)) {
        return &record.number;
      }
    }
    return nullptr;
  }

  size_t* look(const Call& call) {
    return const_cast<size_t*>(std::as_const(*this).look(call));
  }

  std::shared_ptr<Parameters> parameters_;
  std::unordered_map<uint64_t, std::vector<Record>> buckets_;
  size_t noted_ = 0; // calls
};

} // namespace

void bind_earlier_calls(py::module_& m) {
  py::class_<Parameters, std::shared_ptr<Parameters>>(m, "_Parameters")
      .def(
          py::init<
              const std::vector<std::string>&,
              size_t,
              const py::dict&,
              const std::vector<py::object>&>(),
          py::arg("names"),
          py::arg("positional"),
          py::arg("defaults"),
          py::arg("kinds"))
      .def("bind", &Parameters::by_name, py::arg("args"), py::arg("kwargs"));
  py::class_<EarlierCalls>(m, "_EarlierCalls")
      .def(py::init<std::shared_ptr<Parameters>>(), py::arg("parameters"))
      .def(
          "find",
          &EarlierCalls::find,
          py::arg("args"),
          py::arg("kwargs"),
          py::arg("targets"))
      .def(
          "add",
          &EarlierCalls::add,
          py::arg("values"),
          py::arg("targets"),
          py::arg("number"))
      .def("__len__", &EarlierCalls::size)
      .def("clear", &EarlierCalls::clear);
}

} // namespace fusedpg
