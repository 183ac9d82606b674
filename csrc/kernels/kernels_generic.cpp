// Build flags of this file: -O3 -ffp-contract=off -fno-math-errno
// -fno-trapping-math
//
// For every CPU but x86-64, with the compiler's baseline instruction set (NEON
// on aarch64).
#if defined(__aarch64__)
#define FUSEDPG_KERNELS_NAME "neon"
#else
#define FUSEDPG_KERNELS_NAME "scalar"
#endif
#define FUSEDPG_KERNELS_TABLE generic_table
#include "kernels/kernels_impl.hpp"
