#pragma once

#include <torch/csrc/utils/pybind.h>

// fusedpg._C.compress
namespace fusedpg::compress_gradient {
void bind(py::module_& m);
} // namespace fusedpg::compress_gradient

// fusedpg._C.compress.unit
namespace fusedpg::compress_unit {
void bind(py::module_& compress);
} // namespace fusedpg::compress_unit
