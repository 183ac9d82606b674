#pragma once

#include <memory>
#include <optional>
#include <string>

#include <c10/core/Device.h>

#include "cuda/carrier.hpp"

namespace fusedpg {

// The one place that knows torch's symmetric memory.
//
// This rank's part of an allocation that all ranks of a group make. Other ranks
// reach it from meet() on; it must not go before the kernels of this rank that
// use what that gave.
class SymmetricBlock {
 public:
  // Null where torch has no such memory for the device, or another kind than the
  // one whose pointers kernels may follow, "CUDA". Throws Error(kOutOfMemory).
  static std::shared_ptr<SymmetricBlock> allocate(
      const c10::Device& device,
      size_t bytes,
      const std::string& group_name);
  virtual ~SymmetricBlock() = default;

  virtual void* data() const = 0;
  // Collective; once. Waits for the other ranks, maybe for ever. Throws what
  // torch does, for example where a GPU cannot reach another one.
  virtual cuda::Carrier::Peers meet() = 0;
};

} // namespace fusedpg
