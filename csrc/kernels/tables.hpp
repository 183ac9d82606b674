#pragma once

#include "kernels/kernels.hpp"

// One table per instruction set. Only dispatch.cpp may name them: a table's
// code faults on a CPU without its instructions.
namespace fusedpg::kernels::detail {

extern const Table x86_64_v2_table;
extern const Table avx2_table;
extern const Table avx512_table;
extern const Table generic_table;

} // namespace fusedpg::kernels::detail
