#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fusedpg {

// fusedpg._C.compress
void bind_compress(py::module_& m);

// fusedpg._C.compress.unit
void bind_compress_unit(py::module_& compress);

} // namespace fusedpg
