#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>

#include <ATen/ATen.h>

#include "c10d/cuda_order.hpp"
#include "c10d/forwarding.hpp"
#include "c10d/fused_arguments.hpp"

namespace fusedpg {

// What a group does with CUDA tensors. c10d's collectives go to torch's own
// ProcessGroupNCCL, the delegate; fused operations to the CUDA engine, whose data
// that moves, too.
//
// Everything of a group runs in the order of its calls: see CudaOrder.
//
// No CUDA header: streams are c10's, and the engine takes their handles.
//
// Thread-safe.
class CudaGroup {
 public:
  using Delegated = c10::function_ref<WorkPtr(c10d::Backend&)>;
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using MakeDelegate =
      std::function<BackendPtr(const c10::intrusive_ptr<c10d::Store>&)>;

  // `pretend`: CPU tensors are device memory (tests, with a fake CUDA).
  CudaGroup(
      std::string name, // that torch knows it by
      c10::intrusive_ptr<c10d::Store> store,
      int rank,
      int size,
      const Settings& settings,
      bool spans_hosts,
      cuda::CudaEngine::CheckPeers check_peers,
      MakeDelegate make_delegate,
      bool pretend);
  ~CudaGroup();
  CudaGroup(const CudaGroup&) = delete;

  // `coalescing`: held back until end_coalescing().
  WorkPtr delegated(
      const at::Tensor& tensor,
      std::chrono::milliseconds timeout,
      bool coalescing,
      Delegated call);
  // Launches what this thread has called with `coalescing`; null if there is
  // nothing to wait for.
  WorkPtr end_coalescing();
  // Ends what an exception has left open on this thread, in any group.
  void abandon_coalescing() noexcept;
  // Whether the delegate holds something back on this thread.
  bool holds_back() const;

  WorkPtr fused_step(
      StepArguments arguments,
      const char* title,
      std::chrono::milliseconds timeout,
      bool async_op);
  WorkPtr reduce_shards(
      ShardsArguments arguments,
      const char* title,
      std::chrono::milliseconds timeout,
      bool async_op);

  WorkPtr fused_program(
      ProgramArguments arguments,
      const char* title,
      std::chrono::milliseconds timeout,
      bool async_op);
  // Of generated code for the tensor's device; see CudaApi and LoadedProgram.
  int program_architecture(const at::Tensor& tensor);
  std::shared_ptr<cuda::LoadedProgram> load_program(
      const std::string& image,
      const std::string& entry,
      uint32_t parameters,
      const at::Tensor& tensor);

  // Whether the current stream of the tensor's device is captured into a graph.
  bool capturing(const at::Tensor& tensor);

  // ProcessGroupNCCL, made by the first call that needs it ...
  BackendPtr delegate();
  // ... or null.
  BackendPtr made_delegate();
  // Of collectives from now on.
  void set_timeout(std::chrono::milliseconds timeout);
  // The engine, made by the first fused operation; may be null.
  std::shared_ptr<cuda::CudaEngine> engine();

  // A tensor in the arena that all GPUs of the group see, if there is room.
  std::optional<at::Tensor> allocate(
      at::IntArrayRef sizes,
      const at::TensorOptions& options,
      std::chrono::milliseconds timeout);

  void abort();
  void shutdown(std::chrono::milliseconds timeout);

 private:
  class Arena;

  const cuda::CudaApi& cuda_api() const;
  cuda::Allocate allocator(const CudaStreams& streams) const;
  std::shared_ptr<cuda::CudaEngine> engine_for(
      const at::Tensor& tensor,
      std::chrono::milliseconds timeout);
  BackendPtr delegate_locked();
  void check_left_behind();
  void check_not_ending() const;
  void check_coalescer() const;
  void end_delegate(void (c10d::Backend::*end)());
  using Operations = std::vector<std::shared_ptr<cuda::Operation>>;
  using Enqueue = std::function<
      Operations(cuda::CudaEngine&, const cuda::CudaEngine::Submission&)>;
  WorkPtr submit(
      const at::Tensor& tensor,
      const char* title,
      std::chrono::milliseconds timeout,
      bool async_op,
      std::vector<at::Tensor> outputs,
      std::shared_ptr<void> tensors,
      const Enqueue& body,
      std::function<void()> after_wait);

  const std::string name_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int size_;
  const Settings settings_;
  const bool spans_hosts_;
  const cuda::CudaEngine::CheckPeers check_peers_;
  const MakeDelegate make_delegate_;
  const bool pretend_;

  std::mutex mutex_; // of the order of calls, and of what follows
  std::shared_ptr<Arena> arena_;
  CudaOrder order_;
  // To make the engine. Where one rank fails all do, so they count alike.
  int attempts_ = 0;
  std::weak_ptr<void> held_back_; // lives while a thread coalesces

  std::atomic<bool> ending_{false};

  std::mutex made_mutex_; // of these; taken inside the others
  BackendPtr delegate_;
  std::shared_ptr<cuda::CudaEngine> engine_;
  // How a start has left a call inside NCCL: nobody uses the delegate any more.
  std::string left_behind_;
};

} // namespace fusedpg
