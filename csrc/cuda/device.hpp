#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "base/error.hpp"
#include "cuda/cuda_api.hpp"

// Owners of what CudaApi hands out.
namespace fusedpg::cuda {

inline void check(const CudaApi& api, const char* what, int error) {
  if (error != kSuccess) {
    fail(
        ErrorKind::kSystem,
        "fused: CUDA error in {}: {}",
        what,
        api.error_string(error));
  }
}

// The graph that is made of what the stream gets, as a number; 0: none.
inline uint64_t capture_of(const CudaApi& api, Stream stream) {
  uint64_t id = 0;
  check(api, "cudaStreamGetCaptureInfo", api.stream_capture(stream, &id));
  return id;
}

// The calling thread's device, for a scope.
class DeviceScope {
 public:
  DeviceScope(const CudaApi& api, int device) : api_(api) {
    check(api, "cudaGetDevice", api.get_device(&before_));
    if (before_ != device) {
      check(api, "cudaSetDevice", api.set_device(device));
      changed_ = true;
    }
  }
  ~DeviceScope() {
    if (changed_) {
      api_.set_device(before_);
    }
  }
  DeviceScope(const DeviceScope&) = delete;

 private:
  const CudaApi& api_;
  int before_ = 0;
  bool changed_ = false;
};

template <auto release>
class Handle {
 public:
  Handle() = default;
  Handle(const CudaApi& api, void* value) : api_(&api), value_(value) {}
  Handle(Handle&& other) noexcept
      : api_(other.api_),
        value_(std::exchange(other.value_, nullptr)) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(api_, other.api_);
    std::swap(value_, other.value_);
    return *this;
  }
  ~Handle() {
    if (value_ != nullptr) {
      (api_->*release)(value_);
    }
  }
  void* get() const {
    return value_;
  }
  explicit operator bool() const {
    return value_ != nullptr;
  }

 private:
  const CudaApi* api_ = nullptr;
  void* value_ = nullptr;
};

using OwnedStream = Handle<&CudaApi::stream_destroy>;
using OwnedEvent = Handle<&CudaApi::event_destroy>;
using DeviceMemory = std::shared_ptr<void>;
using HostMemory = Handle<&CudaApi::host_release>;

inline OwnedStream make_stream(const CudaApi& api) {
  Stream stream = nullptr;
  check(api, "cudaStreamCreate", api.stream_create(&stream));
  return {api, stream};
}

inline OwnedEvent make_event(const CudaApi& api) {
  Event event = nullptr;
  check(api, "cudaEventCreate", api.event_create(&event));
  return {api, event};
}

// Takes memory of the current device for work behind that of `stream`. Throws
// Error(kOutOfMemory).
using Allocate = std::function<DeviceMemory(size_t bytes, Stream stream)>;

[[noreturn]] inline void fail_allocation(size_t bytes, const char* says) {
  fail(
      ErrorKind::kOutOfMemory,
      "fused: the GPU has no {} bytes left for communication buffers; make "
      "FUSEDPG_CUDA_CHUNK_BYTES smaller or free memory ({})",
      bytes,
      says);
}

// From CUDA itself.
inline DeviceMemory allocate_device(const CudaApi& api, size_t bytes) {
  void* memory = nullptr;
  if (const int error = api.allocate(&memory, bytes)) {
    fail_allocation(bytes, api.error_string(error));
  }
  return {memory, [&api](void* ending) { api.release(ending); }};
}

inline HostMemory allocate_host(const CudaApi& api, size_t bytes) {
  void* memory = nullptr;
  const int error = api.host_allocate(&memory, bytes);
  if (error == kNoMemory) {
    fail(
        ErrorKind::kOutOfMemory,
        "fused: no {} bytes of pinned memory left for communication buffers",
        bytes);
  }
  check(api, "cudaHostAlloc", error);
  return {api, memory};
}

// While it lives, captures of other streams forbid this thread nothing.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const CudaApi& api) : api_(api) {
    api_.exchange_capture_mode(&mode_);
  }
  ~RelaxedCapture() {
    api_.exchange_capture_mode(&mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;

 private:
  const CudaApi& api_;
  int mode_ = kRelaxedCapture;
};

} // namespace fusedpg::cuda
