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
#include "nccl_functions.hpp"
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
inline const fake::NcclFunctions& nccl() {
  static const fake::NcclFunctions all(load_nccl_api(library()), hooks());
  return all;
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

// What a rank of a communicator holds.
class Peer {
 public:
  Peer(int rank, int size, Store& store, const std::string& name = "id")
      : rank(rank),
        size(size) {
    NcclUniqueId id;
    if (rank == 0) {
      CHECK_EQ(nccl().get_unique_id(&id), kNcclSuccess);
      store.set(name, std::string(id.internal, sizeof id.internal));
    }
    const std::string text = store.get(name, Deadline(kLong));
    std::memcpy(id.internal, text.data(), sizeof id.internal);
    CHECK_EQ(
        nccl().comm_init_rank_config(&comm, size, id, rank, nullptr),
        kNcclSuccess);
  }
  Peer(const Peer&) = delete;
  ~Peer() {
    if (comm != nullptr) {
      CHECK_EQ(nccl().comm_abort(comm), kNcclSuccess);
    }
  }

  void finish() {
    CHECK_EQ(nccl().comm_destroy(comm), kNcclSuccess);
    comm = nullptr;
  }
  void sum(void* data, size_t count, NcclDataType type, Stream stream) const {
    CHECK_EQ(
        nccl().all_reduce(data, data, count, type, kNcclSum, comm, stream),
        kNcclSuccess);
  }

  const int rank;
  const int size;
  NcclComm comm = nullptr;
};

// Ranks as threads, and without a sanitizer of threads also as processes.
inline void on_ranks(int size, const RankBody& body) {
  on_threads(size, body);
  if (!kOnlyThreads) {
    hooks().reset(); // its threads end: a fork needs that
    on_processes(size, body);
  }
}

// --- values ------------------------------------------------------------------

struct Type {
  NcclDataType type;
  size_t bytes;
};
constexpr Type kTypes[] = {
    {kNcclUint8, 1},
    {kNcclInt32, 4},
    {kNcclInt64, 8},
    {kNcclFloat16, 2},
    {kNcclBfloat16, 2},
    {kNcclFloat32, 4},
    {kNcclFloat64, 8}};

template <typename T>
void put_as(void* data, size_t i, T value) {
  static_cast<T*>(data)[i] = value;
}

// Element i of an array.
inline void put(void* data, size_t i, double value, NcclDataType type) {
  switch (type) {
    case kNcclUint8:
      return put_as(data, i, static_cast<uint8_t>(value));
    case kNcclInt32:
      return put_as(data, i, static_cast<int32_t>(value));
    case kNcclInt64:
      return put_as(data, i, static_cast<int64_t>(value));
    case kNcclFloat16:
      return put_as(data, i, float_to_half(static_cast<float>(value)));
    case kNcclBfloat16:
      return put_as(data, i, float_to_bfloat(static_cast<float>(value)));
    case kNcclFloat32:
      return put_as(data, i, static_cast<float>(value));
    default:
      return put_as(data, i, value);
  }
}

// Small integers, which every type holds exactly.
inline double input(int rank, size_t i) {
  return static_cast<double>((static_cast<size_t>(rank) * 5 + i * 3) % 13);
}

// Of all ranks' inputs: sum, maximum or minimum.
inline double combined(NcclRedOp op, int size, size_t i) {
  double result = input(0, i);
  for (int r = 1; r < size; ++r) {
    const double next = input(r, i);
    result = op == kNcclSum ? result + next
        : op == kNcclMax    ? std::max(result, next)
                            : std::min(result, next);
  }
  return result;
}

} // namespace fusedpg::test::fake_gpu
