#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/engine.hpp"
#include "fake_carrier.hpp"
#include "kernels_reference.hpp"
#include "testing.hpp"

// What the tests of the CUDA engine have in common: ranks on the fake GPU.
namespace fusedpg::test {

using cuda::CudaEngine;
using fake_gpu::Clean;
using fake_gpu::gpu;
using fake_gpu::hooks;
using fake_gpu::kept;
using OperationPtr = CudaEngine::OperationPtr;

// For many operations in little time, in microseconds; the fake's own is 200.
constexpr uint32_t kShortDelay = 30;

inline Settings cuda_settings(size_t chunk_bytes = 2048, size_t arena = 0) {
  Settings s = test_settings();
  s.cuda_chunk_bytes = chunk_bytes;
  s.cuda_arena_bytes = arena;
  return s;
}

inline void wait_until(const std::function<bool()>& condition) {
  const Deadline deadline(kLong);
  while (!condition() && CHECK(!deadline.expired())) {
    std::this_thread::sleep_for(milliseconds(1));
  }
}

// A part of the test's store.
class StorePart : public Rendezvous {
 public:
  // While `*stuck` nothing is answered; while `*gone` every request throws, as
  // c10d's stores do, what is not an Error. `*requests` counts them.
  StorePart(
      Store& store,
      std::string name,
      const std::atomic<bool>* stuck = nullptr,
      const std::atomic<bool>* gone = nullptr,
      std::atomic<int>* requests = nullptr)
      : store_(store),
        name_(std::move(name)),
        stuck_(stuck),
        gone_(gone),
        requests_(requests) {}
  void set(const std::string& key, const std::string& value) override {
    answer();
    store_.set(name_ + key, value);
  }
  std::string get(const std::string& key, const Deadline& deadline) override {
    answer();
    return store_.get(name_ + key, deadline);
  }
  bool has(const std::string& key) override {
    answer();
    return store_.has(name_ + key);
  }
  int64_t add(const std::string& key, int64_t amount) override {
    return store_.add(name_ + key, amount);
  }

 private:
  void answer() const {
    if (requests_ != nullptr) {
      ++*requests_;
    }
    while (stuck_ != nullptr && *stuck_) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    if (gone_ != nullptr && *gone_) {
      throw std::runtime_error("the store has gone");
    }
  }

  Store& store_;
  const std::string name_;
  const std::atomic<bool>* const stuck_;
  const std::atomic<bool>* const gone_;
  std::atomic<int>* const requests_;
};

struct EngineWith {
  Settings settings = cuda_settings();
  std::string name; // of the group, in the store
  const std::atomic<bool>* stuck = nullptr; // whether the store is
  const std::atomic<bool>* gone = nullptr; // likewise
  std::atomic<int>* requests = nullptr; // to the store
  Reach reach = Reach::kAll;
  CudaEngine::CheckPeers check_peers = nullptr;
  const cuda::NcclApi* nccl = &fake_gpu::nccl();
  const cuda::CudaApi* cuda = &gpu();
  milliseconds deadline = kLong;
};

// A stream on a device that need not be the current one.
struct StreamOn {
  explicit StreamOn(int device) {
    const cuda::DeviceScope scope(gpu(), device);
    own = cuda::make_stream(gpu());
    stream = own.get();
  }
  cuda::OwnedStream own;
  cuda::Stream stream = nullptr;
};

constexpr size_t kArena = size_t{1} << 20;

inline EngineWith with_arena(size_t chunk_bytes = 2048) {
  EngineWith with;
  with.settings = cuda_settings(chunk_bytes, kArena);
  return with;
}

// One rank of an engine, and the stream of its caller. They are on device
// `rank`, while the current device is 0.
struct GpuRank;

// The calling thread's rank.
inline const GpuRank*& current_rank() {
  thread_local const GpuRank* current = nullptr;
  return current;
}

struct GpuRank {
  GpuRank(int rank, int size, Store& store, const EngineWith& with = {})
      : rank(rank),
        size(size),
        store(store),
        engine(
            *with.cuda,
            *with.nccl,
            rank,
            size,
            rank,
            with.settings,
            /*spans_hosts=*/false,
            std::make_shared<StorePart>(
                store,
                with.name,
                with.stuck,
                with.gone,
                with.requests),
            with.check_peers,
            Deadline(with.deadline),
            size == 1 ? nullptr
                      : std::make_unique<FakeCarrier>(
                            rank,
                            size,
                            store,
                            with.name + "carrier",
                            with.reach)),
        own_stream(rank),
        stream(own_stream.stream),
        wire_sums(!with.settings.wide_half_sums) {
    current_rank() = this;
  }
  ~GpuRank() {
    current_rank() = nullptr;
  }

  void sync() const {
    CHECK_EQ(gpu().stream_synchronize(stream), 0);
  }
  // All ranks are here.
  void meet(const std::string& where) const {
    store.meet(where, size);
  }
  CudaEngine::Submission from(milliseconds timeout = kLong) const {
    return {stream, timeout, nullptr};
  }

  const int rank;
  const int size;
  Store& store;
  CudaEngine engine;
  const StreamOn own_stream;
  const cuda::Stream stream;
  const bool wire_sums; // half_sums="wire"
};

// Ranks on threads, each with an engine that ends well.
inline void with_gpus(
    int size,
    const std::function<void(GpuRank&)>& body,
    const EngineWith& with = {}) {
  on_threads(size, [&](int rank, Store& store) {
    GpuRank r(rank, size, store, with);
    body(r);
    r.engine.shutdown(Deadline(kLong));
    CHECK(!r.engine.failed());
  });
}

// Throws what the operation failed with.
inline void finish(const OperationPtr& op, milliseconds within = kLong) {
  if (CHECK(op->wait_for(within))) {
    if (const auto error = op->exception()) {
      std::rethrow_exception(error);
    }
  }
}

// Device memory: of its own, or a part of somebody's arena; `shift` bytes behind
// an aligned address. With canaries on both sides.
class GpuBuffer {
 public:
  explicit GpuBuffer(size_t bytes, char* place = nullptr, size_t shift = 0)
      : data_(place),
        bytes_(bytes),
        shift_(shift) {
    if (place == nullptr) {
      own_ = cuda::allocate_device(gpu(), room(bytes, shift));
      data_ = static_cast<char*>(own_.get());
    }
    std::memset(data_, kPattern, room(bytes, shift));
    data_ += shift;
  }
  GpuBuffer(GpuBuffer&&) = default;
  ~GpuBuffer() {
    const auto intact = [](const char* begin, size_t bytes) {
      return std::all_of(
          begin, begin + bytes, [](char c) { return c == kPattern; });
    };
    CHECK(
        data_ == nullptr ||
        (intact(data_ - shift_, shift_) && intact(data_ + bytes_, kCanary)));
    // After a failure kernels may still be on their way to it. Whoever calls
    // the engine has it keep tensors until they have ended.
    if (current_rank() != nullptr && current_rank()->engine.failed()) {
      kept().add(std::move(own_));
    }
  }

  // What it takes of its place.
  static size_t room(size_t bytes, size_t shift) {
    return shift + bytes + kCanary;
  }
  char* data() const {
    return data_;
  }
  size_t bytes() const {
    return bytes_;
  }
  template <typename T>
  T& as() const {
    return *reinterpret_cast<T*>(data_);
  }
  void assign(const Bytes& from) const {
    if (!from.empty()) {
      std::memcpy(data_, from.data(), from.size());
    }
  }
  bool holds(const Bytes& wanted) const {
    return wanted.empty() ||
        std::memcmp(data_, wanted.data(), wanted.size()) == 0;
  }

 private:
  static constexpr size_t kCanary = 32;
  static constexpr char kPattern = 0x5a;
  cuda::DeviceMemory own_;
  char* data_;
  size_t bytes_;
  size_t shift_;
};

} // namespace fusedpg::test
