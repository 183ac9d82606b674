#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "base/call.hpp"
#include "base/error.hpp"
#include "cuda/cuda_api.hpp"
#include "cuda/nccl_api.hpp"

namespace fusedpg::cuda {

// A call was left to its thread. It may use its communicator, and the memory it
// was given, for as long as the process lives; nobody else may use them then.
class CallLeftBehind : public Error {
 public:
  using Error::Error;
};

// Makes a call that may hang on a thread of its own; the call owns what it uses.
// `watch` is called after each `pause`. What it throws ends the wait, and is
// thrown here as a CallLeftBehind.
template <typename Result>
Result call_watched(
    std::function<Result()> call,
    std::chrono::milliseconds pause,
    const std::function<void()>& watch) {
  std::packaged_task<Result()> task(std::move(call));
  std::future<Result> result = task.get_future();
  std::thread(std::move(task)).detach();
  while (result.wait_for(pause) != std::future_status::ready) {
    try {
      watch();
    } catch (const Error& error) {
      throw CallLeftBehind(error.kind(), error.what());
    } catch (const std::exception& error) {
      throw CallLeftBehind(
          ErrorKind::kSystem, formatted("fused: {}", error.what()));
    }
  }
  return result.get();
}

// What moves data between the GPUs of a group: torch's ProcessGroupNCCL, by
// DelegateCarrier (c10d), or what tests put in its place.
//
// A collective is enqueued on a stream: it begins when what that has so far has
// ended, and what it gets later waits. All ranks call the same ones in the same
// order. A call may block where other ranks have yet to connect, and throws if
// it fails. One at a time; abort() may come from any thread at any time.
class Carrier {
 public:
  Carrier() = default;
  Carrier(const Carrier&) = delete;
  virtual ~Carrier() = default;

  // Called now and then by a call that waits on the host for other ranks; what
  // it throws ends that call.
  using Watch = std::function<void()>;
  void set_watch(Watch watch) {
    watch_ = std::move(watch);
  }

  // Collective, and the first call: connects the ranks. Calls the watch
  // meanwhile, and throws a CallLeftBehind where that throws.
  virtual void connect() {}
  // `to` = this rank's block of `count` elements of the reduction of all ranks'
  // `from`, where it may lie.
  virtual void reduce_scatter(
      const void* from,
      void* to,
      size_t count,
      DType type,
      RedOp op,
      Stream stream) = 0;
  // `to` = all ranks' `from` of `bytes`, which may lie in its place there.
  virtual void all_gather(
      const void* from,
      void* to,
      size_t bytes,
      Stream stream) = 0;
  // Block p of `to` = block `rank` of rank p's `from`, `bytes` each.
  virtual void all_to_all(
      const void* from,
      void* to,
      size_t bytes,
      Stream stream) = 0;

  // The addresses at which this rank's GPU sees the memory of all ranks.
  struct Peers {
    std::vector<char*> arenas; // by rank; null: it does not reach that one
    // A store by multicast from this address on goes to all arenas; null: there
    // is none.
    char* multicast = nullptr;
  };
  // `bytes` of this rank's memory, for peers(); null: the carrier has no such
  // memory. Throws Error(kOutOfMemory).
  virtual std::shared_ptr<void> symmetric_memory(size_t /* bytes */) {
    return nullptr;
  }
  // Collective, for as many bytes on all ranks. Calls the watch, and throws, as
  // connect() does. Kernels may use what it gives while `memory` lives.
  virtual Peers peers(const std::shared_ptr<void>& /* memory */) {
    return {};
  }

  // Its communicator on the current device, once a collective has connected it,
  // for what NCCL alone can do; null: it has none.
  virtual NcclComm nccl_comm() = 0;
  // What its communicator lives as long as; may be null.
  virtual std::shared_ptr<void> keep() const {
    return nullptr;
  }
  // Ends what waits for other ranks, as far as nobody else does.
  virtual void abort() = 0;

 protected:
  Watch watch_ = [] {};
};

} // namespace fusedpg::cuda
