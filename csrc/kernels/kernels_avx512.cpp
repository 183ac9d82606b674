// Build flags of this file: -O3 -ffp-contract=off -fno-math-errno
// -fno-trapping-math -mavx2 -mf16c -mbmi -mbmi2 -mfma -mavx512f
// -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512
#if defined(__x86_64__)
#define FUSEDPG_KERNELS_NAME "avx512"
#define FUSEDPG_KERNELS_TABLE avx512_table
#include "kernels/kernels_impl.hpp"
#endif
