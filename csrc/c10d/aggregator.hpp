#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fusedpg {

// fusedpg._C.Aggregator
void bind_aggregator(py::module_& m);

} // namespace fusedpg
