#include "c10d/delegate_carrier.hpp"

#include <future>
#include <thread>

#include <torch/csrc/utils/pybind.h>

#include "c10d/errors.hpp"
#include "cuda/device.hpp"

namespace fusedpg {
namespace {

// Between looks at what a delegate on the host is doing.
constexpr std::chrono::milliseconds kDelegatePause{1};

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
    at::Tensor from,
    at::Tensor to,
    cuda::Stream stream,
    Call call) {
  try {
    if (streams_.pretend()) {
      call_on_host(from, to, stream, call);
      return;
    }
    const CudaStreams::Scope scope(streams_, streams_.external(stream));
    if (const auto work = call(from, to)) {
      work->wait();
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    watch_(); // what the engine knows of the cause says more
    fail(
        ErrorKind::kSystem,
        "fused: {} of {}: {}",
        what,
        delegate_->getBackendName(),
        one_line(error));
  }
}

// Gloo, which reads and writes the memory now, and may wait for another rank for
// longer than the engine does: on a thread of its own, which may stay behind, and
// so on copies.
void DelegateCarrier::call_on_host(
    const at::Tensor& from,
    const at::Tensor& to,
    cuda::Stream stream,
    Call call) {
  cuda::check(cuda_, "cudaStreamSynchronize", cuda_.stream_synchronize(stream));
  at::Tensor source = from.clone();
  at::Tensor target = to.clone();
  std::packaged_task<void()> task(
      [work = call(source, target)] { work->wait(); });
  std::future<void> ended = task.get_future();
  std::thread(std::move(task)).detach();
  while (ended.wait_for(kDelegatePause) != std::future_status::ready) {
    watch_();
  }
  ended.get();
  to.copy_(target);
}

void DelegateCarrier::maximum(
    uint8_t* data,
    size_t count,
    cuda::Stream stream) {
  const at::Tensor all = view(data, count, at::kByte);
  auto options = in_order<c10d::AllreduceOptions>();
  options.reduceOp = c10d::ReduceOp::MAX;
  enqueue("all_reduce", all, all, stream, [&](at::Tensor&, at::Tensor& to) {
    std::vector<at::Tensor> tensors{to};
    return delegate_->allreduce(tensors, options);
  });
}

void DelegateCarrier::reduce_scatter(
    const void* from,
    void* to,
    size_t count,
    DType type,
    RedOp op,
    cuda::Stream stream) {
  auto options = in_order<c10d::ReduceScatterOptions>();
  options.reduceOp = op == RedOp::kMin ? c10d::ReduceOp::MIN
      : op == RedOp::kMax              ? c10d::ReduceOp::MAX
                                       : c10d::ReduceOp::SUM;
  enqueue(
      "reduce_scatter",
      view(from, count * size_, scalar_type(type)),
      view(to, count, scalar_type(type)),
      stream,
      [&](at::Tensor& source, at::Tensor& target) {
        return delegate_->_reduce_scatter_base(target, source, options);
      });
}

void DelegateCarrier::all_gather(
    const void* from,
    void* to,
    size_t bytes,
    cuda::Stream stream) {
  enqueue(
      "all_gather",
      view(from, bytes, at::kByte),
      view(to, bytes * size_, at::kByte),
      stream,
      [&](at::Tensor& source, at::Tensor& target) {
        return delegate_->_allgather_base(
            target, source, in_order<c10d::AllgatherOptions>());
      });
}

void DelegateCarrier::all_to_all(
    const void* from,
    void* to,
    size_t bytes,
    cuda::Stream stream) {
  std::vector<int64_t> equal;
  enqueue(
      "all_to_all",
      view(from, bytes * size_, at::kByte),
      view(to, bytes * size_, at::kByte),
      stream,
      [&](at::Tensor& source, at::Tensor& target) {
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
