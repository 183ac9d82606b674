#pragma once

#include <pybind11/pybind11.h>

namespace fusedpg {

void bind_earlier_calls(pybind11::module_& m);

} // namespace fusedpg
