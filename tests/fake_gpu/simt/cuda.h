#pragma once

// The driver's functions that program.cu asks the runtime for (driver.cpp).

#include "cuda_runtime.h"

enum CUresult {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
  CUDA_ERROR_INVALID_PTX = 218,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_NOT_FOUND = 500
};
enum CUjit_option {
  CU_JIT_ERROR_LOG_BUFFER = 5,
  CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES = 6
};
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;
using CUstream = cudaStream_t;

CUresult cuModuleLoadDataEx(
    CUmodule* module,
    const void* image,
    unsigned num_options,
    CUjit_option* options,
    void** values);
CUresult cuModuleGetFunction(
    CUfunction* function,
    CUmodule module,
    const char* name);
CUresult cuModuleUnload(CUmodule module);
CUresult cuFuncGetParamInfo(
    CUfunction function,
    size_t index,
    size_t* offset,
    size_t* size);
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(
    int* blocks,
    CUfunction function,
    int threads,
    size_t shared_bytes);
CUresult cuLaunchKernel(
    CUfunction function,
    unsigned grid_x,
    unsigned grid_y,
    unsigned grid_z,
    unsigned block_x,
    unsigned block_y,
    unsigned block_z,
    unsigned shared_bytes,
    CUstream stream,
    void** parameters,
    void** extra);
