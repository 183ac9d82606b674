#pragma once

#include <torch/csrc/utils/pybind.h>

// fusedpg._C.compress
namespace fusedpg::compress_bindings {
void bind(py::module_& m);
} // namespace fusedpg::compress_bindings
