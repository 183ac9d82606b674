#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

namespace fusedpg {

// What optimizers do with the gradients of many parameters: `GradientWatch`
// and functions on lists.
void bind_gradients(pybind11::module_& m);

// What their steps do for many parameters (step_lists.cpp).
void bind_step_lists(pybind11::module_& m);

// An element of the list, borrowed; throws TypeError if it is no tensor.
const at::Tensor& tensor_at(const pybind11::list& list, size_t i);

} // namespace fusedpg
