// Build flags of this file: -O3 -ffp-contract=off -fno-math-errno
// -fno-trapping-math -msse4.2 -mpopcnt
#if defined(__x86_64__)
#define FUSEDPG_KERNELS_NAME "x86-64-v2"
#define FUSEDPG_KERNELS_TABLE x86_64_v2_table
#include "kernels/kernels_impl.hpp"
#endif
