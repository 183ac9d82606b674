#include "c10d/delegate_carrier.hpp"

#include <thread>

#include <torch/csrc/utils/pybind.h>

#include "c10d/errors.hpp"
#include "cuda/device.hpp"

namespace fusedpg {
namespace {

// Between looks at what a delegate on the host is doing.
constexpr std::chrono::microseconds kDelegatePause{20};

// Runs on the stream that it is called from.
template <typename Options>
Options in_order() {
  Options options;
  options.asyncOp = false;
  return options;
}

// What is reduced: gradients, and what a program's operands are widened to.
at::ScalarType scalar_type(DType type) {
  switch (type) {
    case DType::kFloat16:
      return at::kHalf;
    case DType::kBFloat16:
      return at::kBFloat16;
    case DType::kFloat64:
      return at::kDouble;
    case DType::kInt32:
      return at::kInt;
    case DType::kInt64:
      return at::kLong;
    default:
      return at::kFloat;
  }
}

} // namespace

DelegateCarrier::DelegateCarrier(
    c10::intrusive_ptr<c10d::Backend> delegate,
    const CudaStreams& streams,
    const cuda::CudaApi& cuda)
    : delegate_(std::move(delegate)),
      streams_(streams),
      cuda_(cuda),
      size_(static_cast<size_t>(delegate_->getSize())) {}

at::Tensor DelegateCarrier::view(
    const void* data,
    size_t count,
    at::ScalarType type) const {
  return at::for_blob(const_cast<void*>(data), {static_cast<int64_t>(count)})
      .options(at::TensorOptions().dtype(type).device(streams_.device()))
      .target_device(streams_.device())
      .make_tensor();
}

void DelegateCarrier::enqueue(
    const char* what,
    cuda::Stream stream,
    Call call) {
  try {
    if (!streams_.pretend()) {
      const CudaStreams::Scope scope(streams_, streams_.external(stream));
      if (const auto work = call()) {
        work->wait();
      }
      return;
    }
    // Gloo reads the memory now.
    cuda::check(
        cuda_, "cudaStreamSynchronize", cuda_.stream_synchronize(stream));
    call()->wait();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    fail(
        ErrorKind::kSystem,
        "fused: {} of {}: {}",
        what,
        delegate_->getBackendName(),
        one_line(error));
  }
}

void DelegateCarrier::maximum(
    uint8_t* data,
    size_t count,
    cuda::Stream stream) {
  std::vector<at::Tensor> tensors{view(data, count, at::kByte)};
  auto options = in_order<c10d::AllreduceOptions>();
  options.reduceOp = c10d::ReduceOp::MAX;
  enqueue("all_reduce", stream, [&] {
    const auto work = delegate_->allreduce(tensors, options);
    // With this every operation begins: on the host it waits for other ranks.
    while (streams_.pretend() && !work->isCompleted()) {
      if (aborted_) {
        fail(ErrorKind::kAborted, "fused: all_reduce: aborted");
      }
      std::this_thread::sleep_for(kDelegatePause);
    }
    return work;
  });
}

void DelegateCarrier::reduce_scatter(
    const void* from,
    void* to,
    size_t count,
    DType type,
    RedOp op,
    cuda::Stream stream) {
  at::Tensor source = view(from, count * size_, scalar_type(type));
  at::Tensor target = view(to, count, scalar_type(type));
  auto options = in_order<c10d::ReduceScatterOptions>();
  options.reduceOp = op == RedOp::kMin ? c10d::ReduceOp::MIN
      : op == RedOp::kMax              ? c10d::ReduceOp::MAX
                                       : c10d::ReduceOp::SUM;
  enqueue("reduce_scatter", stream, [&] {
    return delegate_->_reduce_scatter_base(target, source, options);
  });
}

void DelegateCarrier::all_gather(
    const void* from,
    void* to,
    size_t bytes,
    cuda::Stream stream) {
  at::Tensor source = view(from, bytes, at::kByte);
  at::Tensor target = view(to, bytes * size_, at::kByte);
  enqueue("all_gather", stream, [&] {
    return delegate_->_allgather_base(
        target, source, in_order<c10d::AllgatherOptions>());
  });
}

void DelegateCarrier::all_to_all(
    const void* from,
    void* to,
    size_t bytes,
    cuda::Stream stream) {
  at::Tensor source = view(from, bytes * size_, at::kByte);
  at::Tensor target = view(to, bytes * size_, at::kByte);
  std::vector<int64_t> equal;
  enqueue("all_to_all", stream, [&] {
    return delegate_->alltoall_base(
        target, source, equal, equal, in_order<c10d::AllToAllOptions>());
  });
}

// ProcessGroupNCCL's C++ header needs CUDA's: Python knows the method.
cuda::NcclComm DelegateCarrier::nccl_comm() {
  const py::gil_scoped_acquire gil;
  const py::object delegate = py::cast(delegate_);
  if (!py::hasattr(delegate, "_comm_ptr")) {
    return nullptr;
  }
  return reinterpret_cast<cuda::NcclComm>(
      delegate.attr("_comm_ptr")().cast<int64_t>());
}

} // namespace fusedpg
