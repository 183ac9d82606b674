#pragma once

#include <pybind11/pybind11.h>

namespace fusedpg {

void bind_same_tensors(pybind11::module_& m);

} // namespace fusedpg
