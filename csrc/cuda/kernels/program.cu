// Kernels that are compiled while the program runs (fusedpg/fusion/nvrtc.py).
// They belong to the driver's API, whose functions the runtime finds: this
// library links no libcuda.

#include <cuda.h>

#include <cstdio>
#include <memory>
#include <vector>

#include "cuda/kernels/launchers.cuh"

namespace fusedpg::cuda {
namespace {

constexpr uint32_t kWordBytes = 8; // of a parameter

// The versions in which the functions came as they are declared here.
constexpr unsigned kFirstVersion = 12000;
constexpr unsigned kParamInfoVersion = 12040;

template <typename Function>
bool find(Function*& function, const char* name, unsigned version) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      name, &found, version, cudaEnableDefault, &status);
#else
  (void)version;
  const cudaError_t error =
      cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &status);
#endif
  settled(error);
  function = reinterpret_cast<Function*>(found);
  return error == cudaSuccess && status == cudaDriverEntryPointSuccess &&
      function != nullptr;
}

struct Driver {
  decltype(cuModuleLoadDataEx)* load = nullptr;
  decltype(cuModuleGetFunction)* function = nullptr;
  decltype(cuModuleUnload)* unload = nullptr;
  decltype(cuLaunchKernel)* launch = nullptr;
  decltype(cuOccupancyMaxActiveBlocksPerMultiprocessor)* occupancy = nullptr;
  // Drivers before 12.4 have none.
  CUresult (*param_info)(CUfunction, size_t, size_t*, size_t*) = nullptr;
  bool complete = false;

  Driver() {
    complete = find(load, "cuModuleLoadDataEx", kFirstVersion) &&
        find(function, "cuModuleGetFunction", kFirstVersion) &&
        find(unload, "cuModuleUnload", kFirstVersion) &&
        find(launch, "cuLaunchKernel", kFirstVersion) &&
        find(occupancy,
             "cuOccupancyMaxActiveBlocksPerMultiprocessor",
             kFirstVersion);
    if (!find(param_info, "cuFuncGetParamInfo", kParamInfoVersion)) {
      param_info = nullptr;
    }
  }
};

const Driver& driver() {
  static const Driver found;
  return found;
}

struct Program {
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  uint32_t parameters = 0;
  uint64_t blocks = 0; // that the device holds at once
};

// Whether the kernel takes as many words as we shall give it: the driver reads
// as many as the kernel has.
bool takes(CUfunction function, uint32_t parameters) {
  size_t offset = 0;
  size_t bytes = 0;
  for (uint32_t p = 0; p < parameters; ++p) {
    if (driver().param_info(function, p, &offset, &bytes) != CUDA_SUCCESS ||
        offset != size_t(p) * kWordBytes || bytes != kWordBytes) {
      return false;
    }
  }
  return driver().param_info(function, parameters, &offset, &bytes) !=
      CUDA_SUCCESS;
}

int set_up(Program& program, const ProgramLoadArgs& args) {
  CUresult result =
      driver().function(&program.function, program.module, args.entry);
  if (result != CUDA_SUCCESS) {
    return result;
  }
  if (driver().param_info != nullptr &&
      !takes(program.function, args.parameters)) {
    std::snprintf(
        args.log,
        args.log_bytes,
        "%s does not have the %u parameters of %u bytes each that it is to be "
        "called with",
        args.entry,
        args.parameters,
        kWordBytes);
    return cudaErrorInvalidValue;
  }
  int on_each = 0;
  result = driver().occupancy(&on_each, program.function, kThreads, 0);
  if (result != CUDA_SUCCESS) {
    return result;
  }
  int device = 0;
  int sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error =
        cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  }
  program.parameters = args.parameters;
  program.blocks = static_cast<uint64_t>(sms) * static_cast<uint64_t>(on_each);
  return settled(error);
}

// Makes the current device's context, if need be, and the calling thread's.
cudaError_t enter_context() {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error != cudaSuccess ? error : cudaSetDevice(device);
}

} // namespace

int architecture(int* number) {
  int device = 0;
  int major = 0;
  int minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(
        &major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(
        &minor, cudaDevAttrComputeCapabilityMinor, device);
  }
  *number = 10 * major + minor;
  return settled(error);
}

int program_load(const ProgramLoadArgs* args, void** program) {
  const CaptureAside aside;
  *program = nullptr;
  if (!driver().complete) {
    return cudaErrorNotSupported;
  }
  if (const cudaError_t error = enter_context(); error != cudaSuccess) {
    return settled(error);
  }
  CUjit_option options[] = {
      CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
  void* values[] = {
      args->log, reinterpret_cast<void*>(uintptr_t(args->log_bytes))};
  auto made = std::make_unique<Program>();
  const CUresult result =
      driver().load(&made->module, args->image, 2, options, values);
  if (result != CUDA_SUCCESS) {
    return result;
  }
  const int failed = set_up(*made, *args);
  if (failed != kSuccess) {
    driver().unload(made->module);
    return failed;
  }
  *program = made.release();
  return kSuccess;
}

int program_unload(void* program) {
  const CaptureAside aside;
  const std::unique_ptr<Program> ending(static_cast<Program*>(program));
  const cudaError_t error = enter_context();
  return error != cudaSuccess ? settled(error)
                              : driver().unload(ending->module);
}

int program_launch(const ProgramLaunchArgs* args, Stream stream) {
  const auto* program = static_cast<const Program*>(args->program);
  if (args->num_words != program->parameters) {
    return cudaErrorInvalidValue;
  }
  const uint64_t tiles = (args->count + kProgramTile - 1) / kProgramTile;
  if (tiles == 0) {
    return kSuccess;
  }
  std::vector<void*> words(args->num_words);
  for (uint32_t p = 0; p < args->num_words; ++p) {
    words[p] = const_cast<uint64_t*>(args->words + p);
  }
  const auto blocks =
      static_cast<unsigned>(tiles < program->blocks ? tiles : program->blocks);
  return driver().launch(
      program->function,
      blocks,
      1,
      1,
      kThreads,
      1,
      1,
      0,
      static_cast<CUstream>(stream),
      words.data(),
      nullptr);
}

} // namespace fusedpg::cuda
