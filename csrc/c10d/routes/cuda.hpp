#pragma once

#include "c10d/cuda_group.hpp"
#include "c10d/routes/route.hpp"

namespace fusedpg {

// Tensors on GPUs. The delegate, torch's ProcessGroupNCCL, does c10d's
// collectives; CudaGroup keeps its operations and ours in order.
class CudaRoute : public Forwarding<Route, CudaRoute> {
 public:
  // `pretend`: CPU tensors are device memory (tests, with a fake CUDA).
  CudaRoute(
      Group& group,
      std::string name,
      bool spans_hosts,
      cuda::CudaEngine::CheckPeers check_peers,
      CudaGroup::MakeDelegate make_delegate,
      bool pretend);

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
  WorkPtr endCoalescing() override;
  // After an exception; or before a new region, in case it went past us.
  void abandon_coalescing() noexcept {
    cuda_.abandon_coalescing();
  }

  WorkPtr fused_step_(StepArguments arguments, bool async_op) override;
  WorkPtr reduce_shards_(ShardsArguments arguments, bool async_op) override;
  WorkPtr fused_program_(ProgramArguments arguments, bool async_op) override;
  int program_architecture(const at::Tensor& tensor) {
    return cuda_.program_architecture(tensor);
  }
  std::shared_ptr<cuda::LoadedProgram> load_program(
      const std::string& image,
      const std::string& entry,
      uint32_t parameters,
      const at::Tensor& tensor) {
    return cuda_.load_program(image, entry, parameters, tensor);
  }
  WorkPtr sparse_all_reduce(
      const at::Tensor& tensor,
      const SkipArguments& arguments,
      bool async_op) override;
  c10::intrusive_ptr<c10d::Backend> delegate() {
    return cuda_.delegate();
  }
  c10::intrusive_ptr<c10d::Backend> made_delegate() {
    return cuda_.made_delegate();
  }
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

  void setTimeout(std::chrono::milliseconds timeout) override {
    cuda_.set_timeout(timeout);
  }
  void describe(GroupInfo& info) override;
  std::optional<ErrorKind> failure() override;
  void abort() override {
    cuda_.abort();
  }
  void interrupt(const std::string& /* how */) override {}
  void shutdown() override;

 private:
  friend Forwarding;
  template <typename Method, typename... Arguments>
  WorkPtr forward(
      const at::Tensor* tensor,
      Method method,
      Arguments&... arguments) {
    return delegate(*tensor, [&](c10d::Backend& nccl) {
      return (nccl.*method)(arguments...);
    });
  }
  WorkPtr delegate(const at::Tensor& tensor, CudaGroup::Delegated operation);
  // For what runs on the GPU but is not NCCL's alone: it would wait for
  // collectives that a group of calls still holds back.
  void check_not_coalescing(const char* title) const;

  CudaGroup cuda_; // makes what it needs when needed
};

} // namespace fusedpg
