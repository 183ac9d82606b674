#pragma once

#include <optional>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d/cuda_streams.hpp"
#include "c10d/symm_mem.hpp"
#include "cuda/carrier.hpp"

namespace fusedpg {

// Moves the engine's data by the delegate, torch's ProcessGroupNCCL: by its
// communicator, under its watchdog. Ranks reach each other's memory by torch's
// symmetric memory, of the group of that name.
class DelegateCarrier final : public cuda::Carrier {
 public:
  DelegateCarrier(
      c10::intrusive_ptr<c10d::Backend> delegate,
      const CudaStreams& streams,
      const cuda::CudaApi& cuda,
      std::string group_name);

  void connect() override;
  void reduce_scatter(
      const void* from,
      void* to,
      size_t count,
      DType type,
      RedOp op,
      cuda::Stream stream) override;
  void all_gather(const void* from, void* to, size_t bytes, cuda::Stream stream)
      override;
  void all_to_all(const void* from, void* to, size_t bytes, cuda::Stream stream)
      override;
  std::shared_ptr<void> symmetric_memory(size_t bytes) override;
  Peers peers(const std::shared_ptr<void>& memory) override;
  cuda::NcclComm nccl_comm() override;
  std::shared_ptr<void> keep() const override {
    return std::make_shared<c10::intrusive_ptr<c10d::Backend>>(delegate_);
  }
  void abort() override {} // the delegate's end is its group's business

 private:
  // Calls the delegate, and throws its exception as an Error that names the call.
  void guarded(const char* what, c10::function_ref<void()> call);
  at::Tensor view(const void* data, size_t count, at::ScalarType type) const;
  using Call = c10::function_ref<
      c10::intrusive_ptr<c10d::Work>(at::Tensor& from, at::Tensor& to)>;
  void enqueue(
      const char* what,
      at::Tensor from,
      at::Tensor to,
      cuda::Stream stream,
      Call call);
  void call_on_host(
      const at::Tensor& from,
      const at::Tensor& to,
      cuda::Stream stream,
      Call call);

  const c10::intrusive_ptr<c10d::Backend> delegate_;
  const CudaStreams streams_;
  const cuda::CudaApi& cuda_;
  const std::string group_name_;
  const size_t size_;
  std::optional<c10::Stream> first_stream_; // for connect()
  at::Tensor first_byte_;
  std::weak_ptr<SymmetricBlock> symmetric_; // the latest
};

} // namespace fusedpg
