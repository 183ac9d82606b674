#include "c10d/same_tensors.hpp"

#include <vector>

#include <ATen/ATen.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

namespace fusedpg {
namespace {

namespace py = pybind11;

// Remembers the kind of tensors and, if `places`, where they lie. It keeps none
// of them, so others that have come to the same places equal them.
class SameTensors {
 public:
  SameTensors(const std::vector<at::Tensor>& tensors, bool places)
      : places_(places) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& t = tensors[i];
      all_.push_back(
          {places ? t.const_data_ptr() : nullptr,
           t.sizes().vec(),
           t.strides().vec(),
           t.scalar_type(),
           t.device(),
           t.key_set(),
           t.requires_grad(),
           places ? first(tensors, i) : i});
    }
  }

  bool are(const std::vector<at::Tensor>& tensors) const {
    if (tensors.size() != all_.size()) {
      return false;
    }
    for (size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& t = tensors[i];
      const One& one = all_[i];
      // The keys first: a subclass may have no data to ask for.
      if (!(t.key_set() == one.keys) ||
          t.sizes() != at::IntArrayRef(one.sizes) ||
          t.strides() != at::IntArrayRef(one.strides) ||
          t.scalar_type() != one.type || t.device() != one.device ||
          t.requires_grad() != one.requires_grad) {
        return false;
      }
      if (places_ &&
          (t.const_data_ptr() != one.data || first(tensors, i) != one.first)) {
        return false;
      }
    }
    return true;
  }

 private:
  struct One {
    const void* data;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
    at::ScalarType type;
    at::Device device;
    c10::DispatchKeySet keys;
    bool requires_grad;
    size_t first; // the place of the same tensor before it, or its own
  };

  static size_t first(const std::vector<at::Tensor>& tensors, size_t place) {
    size_t found = 0;
    while (!tensors[found].is_same(tensors[place])) {
      ++found;
    }
    return found;
  }

  bool places_;
  std::vector<One> all_;
};

} // namespace

void bind_same_tensors(py::module_& m) {
  py::class_<SameTensors>(m, "_SameTensors")
      .def(
          py::init<std::vector<at::Tensor>, bool>(),
          py::arg("tensors"),
          py::arg("places"))
      .def("are", &SameTensors::are, py::arg("tensors"));
}

} // namespace fusedpg
