#pragma once

#include <torch/csrc/utils/pybind.h>

// The parts of the Python module fusedpg._C, each bound in the file that has it.
namespace fusedpg {

// ops.cpp: a direct call of torch.ops.fusedpg.all_reduce_.
void bind_operators(py::module_& m);

// gradients.cpp: `GradientWatch`, and functions on lists of many parameters'
// gradients.
void bind_gradients(py::module_& m);

// step_lists.cpp: what optimizers' steps do for many parameters.
void bind_step_lists(py::module_& m);

// compress.cpp: fusedpg._C.compress.
namespace compress_bindings {
void bind(py::module_& m);
}

void bind_udp_worker(py::module_& m);

// prepared_program.cpp: calls of generated code without Python between their
// parts.
void bind_prepared_programs(py::module_& m);

void bind_earlier_calls(py::module_& m);

// An element of the list, borrowed; throws TypeError if it is no tensor.
const at::Tensor& tensor_at(const py::list& list, size_t i);

} // namespace fusedpg
