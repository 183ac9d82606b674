#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.hpp"
#include "base/descriptor.hpp"
#include "cuda/device.hpp"

namespace fusedpg::cuda {

// Scratch memory of one operation: what it uploads, and what ranks exchange.
struct Slot {
  HostMemory host;
  DeviceMemory device;
  size_t bytes = 0;
};

class CudaEngine;

// One operation that has been enqueued. Complete when the GPU is done with it,
// or when the engine has failed.
//
// Thread-safe.
class Operation {
 public:
  explicit Operation(CudaEngine& engine) : engine_(engine) {}

  uint64_t sequence = 0;
  std::string summary; // "fused_adamw_(float32, 120 elements), lr 0.1"

  // With `op` and `path`; the path comes while it is enqueued.
  OpDescriptor facts() const;
  void set_facts(const OpDescriptor& facts);

  // Looks; until then, or until somebody else has looked, it is not.
  bool is_completed() const;
  // The failure, or null.
  std::exception_ptr exception() const;
  // Blocks until it is complete; false when time is up.
  bool wait_for(std::chrono::milliseconds timeout) const;
  // What keeps the operation's tensors alive may go: whoever calls this has
  // made the streams that own them wait.
  void release_tensors();

 private:
  friend class CudaEngine;
  friend class Run;

  void complete(std::exception_ptr error);

  CudaEngine& engine_; // until it is complete, which engines see to
  Deadline deadline_{std::chrono::milliseconds(0)};
  const Clock::time_point begun_ = Clock::now();
  const std::thread::id caller_ = std::this_thread::get_id(); // enqueues it
  OwnedEvent end_;
  std::shared_ptr<Slot> slot_;
  bool captured_ = false; // into a graph; runs whenever that is launched
  // All of it, or as much as there will be; `end_` is recorded.
  std::atomic<bool> enqueued_{false};
  // Set before that, where something was not: the end of the rest is no
  // success, and `end_` may be null.
  bool broken_ = false;
  std::atomic<bool> done_{false};
  mutable std::mutex mutex_;
  std::exception_ptr error_;
  OpDescriptor facts_;
  std::shared_ptr<void> tensors_;
};

} // namespace fusedpg::cuda
