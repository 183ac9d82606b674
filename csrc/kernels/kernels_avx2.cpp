// Build flags of this file: -O3 -ffp-contract=off -fno-math-errno
// -fno-trapping-math -mavx2 -mf16c -mbmi -mbmi2 -mfma
#if defined(__x86_64__)
#define FUSEDPG_KERNELS_NAME "avx2"
#define FUSEDPG_KERNELS_TABLE avx2_table
#include "kernels/kernels_impl.hpp"
#endif
