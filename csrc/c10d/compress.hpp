#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fusedpg {

// fusedpg._C.compress
void bind_compress(py::module_& m);

} // namespace fusedpg
