#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>

#include "c10d/cuda_order.hpp"
#include "c10d/routes/route.hpp"

namespace fusedpg {

// Tensors on GPUs. c10d's collectives go to torch's own ProcessGroupNCCL, the
// delegate; fused operations to the CUDA engine, whose data that moves, too.
// Everything of a group runs in the order of its calls: see CudaOrder.
//
// No CUDA header: streams are c10's, and the engine takes their handles.
//
// Thread-safe.
class CudaRoute : public Forwarding<Route, CudaRoute> {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using MakeDelegate =
      std::function<BackendPtr(const c10::intrusive_ptr<c10d::Store>&)>;

  // `pretend`: CPU tensors are device memory (tests, with a fake CUDA).
  CudaRoute(
      Group& group,
      std::string name, // that torch knows it by
      bool spans_hosts,
      cuda::CudaEngine::CheckPeers check_peers,
      MakeDelegate make_delegate,
      bool pretend);
  ~CudaRoute() override;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts)
      override;
  WorkPtr allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr reduce_scatter(
      Tensors& to,
      TensorLists& from,
      const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor& to,
      at::Tensor& from,
      const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& to,
      Tensors& from,
      const c10d::ReduceScatterOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  // Of this thread. The delegate is told with the first call of the region,
  // which may have none for GPUs.
  void startCoalescing() override {
    abandon_coalescing();
  }
  // Launches what this thread has called since; null if there is nothing to wait
  // for.
  WorkPtr endCoalescing() override;
  // Ends what an exception has left open on this thread, in any group; or before a
  // new region, in case it went past us.
  void abandon_coalescing() noexcept;

  WorkPtr fused_step_(StepArguments arguments, bool async_op) override;
  WorkPtr reduce_shards_(ShardsArguments arguments, bool async_op) override;
  WorkPtr fused_program_(ProgramArguments arguments, bool async_op) override;
  // Generated code for the tensor's device; see CudaApi and LoadedProgram.
  int program_architecture(const at::Tensor& tensor);
  std::shared_ptr<cuda::LoadedProgram> load_program(
      const std::string& image,
      const std::string& entry,
      uint32_t parameters,
      const at::Tensor& tensor);
  WorkPtr sparse_all_reduce(
      const at::Tensor& tensor,
      const SkipArguments& arguments,
      bool async_op) override;

  // ProcessGroupNCCL, made by the first call that needs it ...
  BackendPtr delegate();
  // ... or null.
  BackendPtr made_delegate();
  std::shared_ptr<c10::Allocator> getMemAllocator() override {
    return delegate()->getMemAllocator();
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex /* device */) override {
    return group_.settings.cuda_arena_bytes > 0;
  }
  at::Tensor empty(
      at::IntArrayRef sizes,
      const at::TensorOptions& options,
      bool lives_long) override;
  at::Tensor empty_shared(
      at::IntArrayRef sizes,
      const at::TensorOptions& options) override;
  bool in_arena(const at::Tensor& t) override;

  void setTimeout(std::chrono::milliseconds timeout) override;
  void describe(GroupInfo& info) override;
  std::optional<ErrorKind> failure() override;
  void abort() override;
  void interrupt(const std::string& /* how */) override {}
  void shutdown() override;

 private:
  friend Forwarding;
  using Delegated = c10::function_ref<WorkPtr(c10d::Backend&)>;
  class Arena;

  template <typename Method, typename... Arguments>
  WorkPtr forward(
      const at::Tensor* tensor,
      Method method,
      Arguments&... arguments) {
    return delegate(*tensor, [&](c10d::Backend& nccl) {
      return (nccl.*method)(arguments...);
    });
  }
  WorkPtr delegate(const at::Tensor& tensor, Delegated operation);
  // True if the delegate holds calls back on this thread.
  bool holds_back() const;

  const cuda::CudaApi& cuda_api() const;
  cuda::Allocate allocator(const CudaStreams& streams) const;
  // The engine, made by the first fused operation; may be null.
  std::shared_ptr<cuda::CudaEngine> engine();
  std::shared_ptr<cuda::CudaEngine> engine_for(const at::Tensor& tensor);
  // A tensor in the arena that all GPUs of the group see, if there is room.
  std::optional<at::Tensor> allocate(
      at::IntArrayRef sizes,
      const at::TensorOptions& options);
  BackendPtr delegate_locked();
  void check_left_behind();
  void check_not_ending() const;
  void check_coalescer() const;
  // For what runs on the GPU but is not NCCL's alone: it would wait for
  // collectives that a group of calls still holds back.
  void check_fused(const char* title) const;
  void end_delegate(void (c10d::Backend::*end)());
  using Operations = std::vector<std::shared_ptr<cuda::Operation>>;
  using Enqueue = std::function<
      Operations(cuda::CudaEngine&, const cuda::CudaEngine::Submission&)>;
  WorkPtr submit(
      const at::Tensor& tensor,
      const char* title,
      bool async_op,
      std::vector<at::Tensor> outputs,
      std::shared_ptr<void> tensors,
      const Enqueue& body,
      std::function<void()> after_wait);

  const std::string name_;
  const bool spans_hosts_;
  const cuda::CudaEngine::CheckPeers check_peers_;
  const MakeDelegate make_delegate_;
  const bool pretend_;

  std::mutex mutex_; // of the order of calls, and of what follows
  std::shared_ptr<Arena> arena_;
  CudaOrder order_;
  // Attempts to make the engine. If one rank fails, all do, so all count alike.
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
