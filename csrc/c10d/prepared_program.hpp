#pragma once

#include <pybind11/pybind11.h>

namespace fusedpg {

// Calls of generated code without Python between their parts.
void bind_prepared_programs(pybind11::module_& m);

} // namespace fusedpg
