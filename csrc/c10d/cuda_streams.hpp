#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/headeronly/version.h>

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12
#include <dlfcn.h>
#endif

#include "base/error.hpp"
#include "cuda/cuda_api.hpp"

namespace fusedpg {

// torch's streams of one device, as handles that CUDA understands. When CPU
// tensors pretend to be on a device (tests), there is only the default stream.
class CudaStreams {
 public:
  CudaStreams(c10::Device device, bool pretend)
      : device_(device),
        pretend_(pretend) {}

  bool pretend() const {
    return pretend_;
  }
  c10::Device device() const {
    return device_;
  }
  int index() const {
    return pretend_ ? 0 : static_cast<int>(device_.index());
  }

  cuda::Stream current() const {
    return pretend_ ? nullptr : handle(current_stream());
  }
  c10::Stream current_stream() const {
    return impl().getStream(device_);
  }
  // Whether a graph is made of what the current stream gets.
  bool capturing() const {
    return !pretend_ && is_capturing(current_stream());
  }
  cuda::Stream handle(const c10::Stream& stream) const {
    return impl().getStreamNativeHandle(stream);
  }
  // One that is not torch's: its number there is the handle.
  c10::Stream external(cuda::Stream stream) const {
    return c10::Stream(
        c10::Stream::UNSAFE, device_, reinterpret_cast<int64_t>(stream));
  }
  c10::Stream from_pool() const {
    return impl().getStreamFromGlobalPool(device_, /*isHighPriority=*/true);
  }

  // Makes a stream the current one for a scope.
  class Scope {
   public:
    Scope(const CudaStreams& streams, const c10::Stream& stream)
        : impl_(streams.impl()),
          before_(impl_.exchangeStream(stream)) {}
    ~Scope() {
      impl_.exchangeStream(before_);
    }
    Scope(const Scope&) = delete;

   private:
    const c10::impl::VirtualGuardImpl impl_;
    const c10::Stream before_;
  };

 private:
  c10::impl::VirtualGuardImpl impl() const {
    return c10::impl::VirtualGuardImpl(device_.type());
  }
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12
  // torch 2.11 cannot tell; CUDA's runtime, which it has loaded for everybody, can.
  bool is_capturing(const c10::Stream& stream) const {
    using Query = int (*)(cuda::Stream, int*);
    static const auto query =
        reinterpret_cast<Query>(dlsym(RTLD_DEFAULT, "cudaStreamIsCapturing"));
    int status = 0; // cudaStreamCaptureStatusNone
    if (query == nullptr || query(handle(stream), &status) != 0) {
      throw Error(
          ErrorKind::kSystem,
          "cudaStreamIsCapturing of CUDA's runtime cannot be called: fusedpg "
          "needs it with torch 2.11");
    }
    return status != 0;
  }
#else
  bool is_capturing(const c10::Stream& stream) const {
    return impl().isStreamCapturing(stream);
  }
#endif

  c10::Device device_;
  bool pretend_;
};

} // namespace fusedpg
