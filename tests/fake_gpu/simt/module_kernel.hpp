#pragma once

#include <cstdint>

// What a module (module.hpp) and who runs it tell each other.
namespace fusedpg_fake {

struct Place {
  unsigned threadIdx, blockIdx, blockDim, gridDim;
};
// Of a kernel: the sizes of its parameters, and how to call it with a pointer
// to each.
struct Kernel {
  uint64_t parameters;
  const uint64_t* sizes;
  void (*run)(const void* const* parameters, const Place& place);
};

} // namespace fusedpg_fake
