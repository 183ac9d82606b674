#include "c10d/delegate_carrier.hpp"

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/utils/pybind.h>

#include "c10d/delegate.hpp"
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
    const cuda::CudaApi& cuda,
    std::string group_name)
    : delegate_(std::move(delegate)),
      streams_(streams),
      cuda_(cuda),
      group_name_(std::move(group_name)),
      size_(static_cast<size_t>(delegate_->getSize())) {
  // Before other ranks wait for this one: there may be no memory.
  const cuda::RelaxedCapture relaxed(cuda_);
  std::optional<CudaStreams::Scope> scope;
  if (!streams_.pretend()) {
    first_stream_ = streams_.from_pool(); // lives longer than this engine
    scope.emplace(streams_, *first_stream_);
  }
  first_byte_ = at::empty(
      {1}, at::TensorOptions().dtype(at::kByte).device(streams_.device()));
}

at::Tensor DelegateCarrier::view(
    const void* data,
    size_t count,
    at::ScalarType type) const {
  return at::for_blob(const_cast<void*>(data), {static_cast<int64_t>(count)})
      .options(at::TensorOptions().dtype(type).device(streams_.device()))
      .target_device(streams_.device())
      .make_tensor();
}

void DelegateCarrier::guarded(
    const char* what,
    c10::function_ref<void()> call) {
  try {
    call();
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

void DelegateCarrier::enqueue(
    const char* what,
    at::Tensor from,
    at::Tensor to,
    cuda::Stream stream,
    Call call) {
  guarded(what, [&] {
    if (streams_.pretend()) {
      call_on_host(from, to, stream, call);
      return;
    }
    const CudaStreams::Scope scope(streams_, streams_.external(stream));
    if (const auto work = call(from, to)) {
      work->wait();
    }
  });
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
  cuda::call_watched<void>(
      [work = call(source, target), source, target] { work->wait(); },
      kDelegatePause,
      watch_);
  to.copy_(target);
}

// ProcessGroupNCCL makes its communicator in its first collective, on the host,
// and waits there without a deadline for ranks that have died. If it has one, all
// ranks have called that collective, which may be under way on another stream.
void DelegateCarrier::connect() {
  if (nccl_comm() != nullptr) {
    return;
  }
  const auto call = [stream = first_stream_,
                     byte = first_byte_,
                     delegate = delegate_,
                     streams = streams_,
                     &cuda = cuda_] {
    cuda::check(cuda, "cudaSetDevice", cuda.set_device(streams.index()));
    const cuda::RelaxedCapture relaxed(cuda);
    std::optional<CudaStreams::Scope> scope;
    if (stream) {
      scope.emplace(streams, *stream);
    }
    std::vector<at::Tensor> any{byte};
    auto options = in_order<c10d::AllreduceOptions>();
    options.reduceOp = c10d::ReduceOp::MAX;
    if (const auto work = delegate->allreduce(any, options)) {
      work->wait();
    }
    if (stream) {
      cuda::check(
          cuda,
          "cudaStreamSynchronize",
          cuda.stream_synchronize(streams.handle(*stream)));
    }
  };
  guarded("the first all_reduce", [&] {
    cuda::call_watched<void>(call, kDelegatePause, watch_);
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

std::shared_ptr<void> DelegateCarrier::symmetric_memory(size_t bytes) {
  const auto block =
      SymmetricBlock::allocate(streams_.device(), bytes, group_name_);
  symmetric_ = block;
  return block == nullptr ? nullptr
                          : std::shared_ptr<void>(block, block->data());
}

// torch waits there for ranks that have died, without a deadline of ours.
cuda::Carrier::Peers DelegateCarrier::peers(
    const std::shared_ptr<void>& /* memory */) {
  return cuda::call_watched<Peers>(
      [block = symmetric_.lock(), streams = streams_, &cuda = cuda_] {
        cuda::check(cuda, "cudaSetDevice", cuda.set_device(streams.index()));
        try {
          return block->meet();
        } catch (const std::exception& error) {
          log_once(formatted(
              "torch's symmetric memory cannot be shared: {}",
              one_line(error)));
          return Peers();
        }
      },
      kDelegatePause,
      watch_);
}

// ProcessGroupNCCL's C++ header needs CUDA's: Python knows the method, which
// gives that of torch's current device, or null.
cuda::NcclComm DelegateCarrier::nccl_comm() {
  cuda::NcclComm comm = nullptr;
  guarded("_comm_ptr", [&] {
    const c10::DeviceGuard guard(streams_.device());
    const py::gil_scoped_acquire gil;
    const py::object delegate = py::cast(delegate_);
    if (py::hasattr(delegate, "_comm_ptr")) {
      comm = reinterpret_cast<cuda::NcclComm>(
          delegate.attr("_comm_ptr")().cast<int64_t>());
    }
  });
  return comm;
}

} // namespace fusedpg
