#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fusedpg {

// fusedpg._C.UdpWorker
void bind_udp_worker(py::module_& m);

} // namespace fusedpg
