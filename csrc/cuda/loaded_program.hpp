#pragma once

#include <string>

#include "cuda/cuda_api.hpp"

namespace fusedpg::cuda {

// A kernel of generated code that the driver has loaded for one GPU. Unloaded
// with the last of its holders: programs, and engines for as long as the GPU or
// a graph may run it.
class LoadedProgram {
 public:
  // Throws Error(kSystem) with what the driver says.
  LoadedProgram(
      const CudaApi& cuda,
      int device,
      const std::string& image,
      const std::string& entry,
      uint32_t parameters);
  ~LoadedProgram();
  LoadedProgram(const LoadedProgram&) = delete;

  int device() const {
    return device_;
  }
  // Of 8 bytes each.
  size_t parameters() const {
    return parameters_;
  }
  // For CudaApi::program_launch().
  void* kernel() const {
    return kernel_;
  }

 private:
  const CudaApi& cuda_;
  const int device_;
  const size_t parameters_;
  void* kernel_ = nullptr;
};

} // namespace fusedpg::cuda
