#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda/device.hpp"
#include "cuda/kernels/elements.hpp"
#include "hooks.hpp"
#include "ranks.hpp"

// What tests on the fake GPU are made of.
namespace fusedpg::test::fake_gpu {

using namespace cuda; // NOLINT: NCCL's names
using namespace fake; // NOLINT: likewise

// FUSEDPG_FAKE_GPU, as for the tests in Python, or the one of this build.
inline const char* library() {
  const char* other = std::getenv("FUSEDPG_FAKE_GPU");
  return other != nullptr ? other : FUSEDPG_FAKE_GPU_LIB;
}
inline const fake::Hooks& hooks() {
  static const fake::Hooks loaded(library());
  return loaded;
}
inline const CudaApi& gpu() {
  return *hooks().cuda;
}
inline const NcclApi& nccl() {
  return load_nccl_api(library());
}

// Device memory that kernels may still use when a test has done with it.
class Kept {
 public:
  void add(cuda::DeviceMemory memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    memory_.push_back(std::move(memory));
  }
  void clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    memory_.clear();
  }

 private:
  std::mutex mutex_;
  std::vector<cuda::DeviceMemory> memory_;
};
inline Kept& kept() {
  static auto* kept = new Kept;
  return *kept;
}

// A test begins with clean counts and leaves nothing behind. With a setting of
// the fake's for as long.
struct Clean {
  explicit Clean(const char* name = nullptr, const char* value = nullptr)
      : setting(name) {
    if (setting != nullptr) {
      setenv(setting, value, 1);
    }
    hooks().reset();
  }
  Clean(const Clean&) = delete;
  ~Clean() {
    if (setting != nullptr) {
      unsetenv(setting);
    }
    hooks().reset(); // waits for kernels
    kept().clear();
    // A communicator that was aborted goes on a thread of its own.
    const Deadline deadline(std::chrono::seconds(10));
    uint64_t left = hooks().reset();
    while (left != 0 && !deadline.expired()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      left = hooks().reset();
    }
    CHECK_EQ(left, 0u);
  }
  const char* const setting;
};

struct OwnStream {
  OwnStream() {
    CHECK_EQ(gpu().stream_create(&handle), 0);
  }
  OwnStream(const OwnStream&) = delete;
  ~OwnStream() {
    CHECK_EQ(gpu().stream_destroy(handle), 0);
  }
  operator Stream() const { // NOLINT: a stream is one
    return handle;
  }
  void sync() const {
    CHECK_EQ(gpu().stream_synchronize(handle), 0);
  }
  Stream handle = nullptr;
};

struct OwnEvent {
  OwnEvent() {
    CHECK_EQ(gpu().event_create(&handle), 0);
  }
  OwnEvent(const OwnEvent&) = delete;
  ~OwnEvent() {
    CHECK_EQ(gpu().event_destroy(handle), 0);
  }
  operator Event() const { // NOLINT: an event is one
    return handle;
  }
  Event handle = nullptr;
};

struct Memory {
  explicit Memory(size_t size) : bytes(size) {
    CHECK_EQ(gpu().allocate(&data, bytes), 0);
  }
  Memory(const Memory&) = delete;
  ~Memory() {
    CHECK_EQ(gpu().release(data), 0);
  }
  int& value() const {
    return *static_cast<int*>(data);
  }
  void* data = nullptr;
  size_t bytes;
};

inline void copy(const Memory& to, const Memory& from, Stream stream) {
  CHECK_EQ(gpu().copy(to.data, from.data, to.bytes, stream), 0);
}

// A launch on the default stream, and its end.
template <typename Args>
void run(int (*CudaApi::*kernel)(const Args*, Stream), const Args& args) {
  CHECK_EQ((gpu().*kernel)(&args, nullptr), 0);
  CHECK_EQ(gpu().stream_synchronize(nullptr), 0);
}

} // namespace fusedpg::test::fake_gpu
