#pragma once

#include <functional>
#include <mutex>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "c10d/cuda_streams.hpp"
#include "cuda/engine.hpp"

namespace fusedpg {

// Fused operations on a GPU, with ProcessGroupNCCL's semantics: wait() makes
// the current stream wait, not the host; failures are raised by wait() and by
// the next operation of the group.
class WorkCuda : public c10d::Work {
 public:
  using Operations = std::vector<std::shared_ptr<cuda::Operation>>;

  // `after_wait` runs behind the operations, on the stream that has waited.
  WorkCuda(
      int rank,
      const char* title,
      std::shared_ptr<cuda::CudaEngine> engine,
      CudaStreams streams,
      Operations operations,
      std::vector<at::Tensor> outputs,
      std::function<void()> after_wait);

  bool isCompleted() override;
  bool isSuccess() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;

 private:
  // Makes the current stream wait.
  void follow(std::chrono::milliseconds timeout);

  const std::shared_ptr<cuda::CudaEngine> engine_;
  const CudaStreams streams_;
  const Operations operations_;
  const std::vector<at::Tensor> outputs_;
  std::mutex mutex_;
  std::function<void()> after_wait_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

} // namespace fusedpg
