#pragma once

#include "cuda_runtime.h"

// NCCL's types, as far as kernels and the fake NCCL need them.
#define NCCL_VERSION_CODE FUSEDPG_NCCL_DEVICE

namespace fusedpg::fake {
struct Window;
}
using ncclComm_t = void*;
using ncclWindow_t = const fusedpg::fake::Window*; // on the device
enum ncclResult_t { ncclSuccess = 0, ncclInvalidUsage = 5, ncclInProgress = 7 };
