#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "base/dtype.hpp"
#include "cuda/cuda_api.hpp"
#include "cuda/nccl_api.hpp"

// What tests ask of libfusedpg_fake_gpu.so besides CUDA's functions. Everything
// counts in this process. Functions are named as NCCL does ("ncclAllReduce"), or
// as the members of CudaApi ("event_record"); `rank` is the communicator's, and a
// negative one means any (CUDA has no ranks).
namespace fusedpg::fake {

struct Stats {
  // Alive now.
  uint64_t device_bytes;
  uint64_t device_allocations;
  uint64_t host_bytes;
  uint64_t host_allocations;
  uint64_t streams; // without the default ones
  uint64_t events;
  uint64_t graphs;
  uint64_t communicators;
  uint64_t modules;
  // Since the last reset.
  uint64_t work; // kernels, copies and collectives that ended
  uint64_t collectives_begun;
  // Mistakes of the caller.
  uint64_t mismatches; // collectives that ranks did not agree on
  uint64_t bad_handles; // unknown or ended streams, events, memory, ...
  uint64_t freed_written; // device memory written after its release
  uint64_t notes; // texts about mistakes so far, and the latest
  char note[256];
};

enum Op : int32_t {
  kAllReduce = 0,
  kReduceScatter,
  kAllToAll,
  kAllGather,
  kBroadcast
};

// NCCL's function of a collective.
inline const char* nccl_name(Op op) {
  static constexpr const char* kNames[] = {
      "ncclAllReduce",
      "ncclReduceScatter",
      "ncclAlltoAll",
      "ncclAllGather",
      "ncclBroadcast"};
  return kNames[op];
}

// What NCCL's function takes; in place as there.
struct Collective {
  Op op;
  const void* src;
  void* dst;
  size_t count; // of a rank's part
  DType type;
  RedOp red_op = RedOp::kSum;
  int root = 0;
};

// Of a communicator that ranks are about to make: whose memory they meet in.
struct CommId {
  int32_t pid;
  int32_t file;
  uint64_t nonce;
};

// What a call may fail with: it returns when its communicator is aborted.
constexpr int kHang = -1;

struct Hooks {
  void* library = nullptr;
  const cuda::CudaApi* cuda = nullptr;

  void (*stats)(Stats*) = nullptr;
  uint64_t (*calls)(const char* function) = nullptr;
  // The nth call from now (1: the next) has no effect and returns `code`.
  void (*fail)(const char* function, int nth, int code) = nullptr;
  void (*fail_rank)(const char* function, int rank, int nth, int code) =
      nullptr;
  // The nth operation from now sleeps before it begins, unless aborted.
  void (*stall)(int rank, int nth, int milliseconds) = nullptr;
  // Each piece of work is delayed by up to that.
  void (*set_delay)(uint32_t microseconds) = nullptr;
  // Enqueues work that only takes its time.
  int (*sleep)(cuda::Stream, int milliseconds) = nullptr;
  // Enqueues work that lasts until somebody sets `go`.
  int (*hold)(cuda::Stream, const std::atomic<bool>* go) = nullptr;

  // Enqueues a kernel that fails: from then on every call of CUDA does.
  int (*fault)(cuda::Stream) = nullptr;

  // Waits for all streams, as cudaDeviceSynchronize.
  void (*synchronize)() = nullptr;

  // `mode`: cudaStreamCaptureMode's, 0 is global.
  int (*begin_capture_in)(cuda::Stream, int mode) = nullptr;
  int begin_capture(cuda::Stream stream, int mode = 0) const {
    return begin_capture_in(stream, mode);
  }
  // A call as cudaMalloc, without the leave that ours ask for.
  int (*unsafe)() = nullptr;
  int (*end_capture)(cuda::Stream, void** graph) = nullptr;
  int (*launch)(void* graph, cuda::Stream) = nullptr;
  int (*destroy_graph)(void* graph) = nullptr;

  // Communicators, by NCCL's codes.
  cuda::NcclResult (*make_id)(CommId*) = nullptr;
  cuda::NcclResult (
      *connect)(cuda::NcclComm*, const CommId*, int rank, int size) = nullptr;
  cuda::NcclResult (
      *collective)(cuda::NcclComm, const Collective*, cuda::Stream) = nullptr;
  // Waits for outstanding work, or aborts it.
  cuda::NcclResult (*disconnect)(cuda::NcclComm, bool aborts) = nullptr;
  const char* (*nccl_error)(cuda::NcclResult) = nullptr;

  // Ends the default streams (waits for their work), forgets counts and
  // faults, and reads the environment again. Returns how many streams,
  // events, graphs, communicators and allocations are still alive.
  uint64_t (*reset)() = nullptr;

  explicit Hooks(const char* path)
      : library(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {
    if (library == nullptr) {
      throw std::runtime_error(dlerror());
    }
    cuda::CudaApiFunction api = nullptr;
    find(cuda::kCudaApiSymbol, api);
    cuda = api();
    find("fusedpg_fake_stats", stats);
    find("fusedpg_fake_calls", calls);
    find("fusedpg_fake_fail", fail);
    find("fusedpg_fake_fail_rank", fail_rank);
    find("fusedpg_fake_stall", stall);
    find("fusedpg_fake_set_delay", set_delay);
    find("fusedpg_fake_sleep", sleep);
    find("fusedpg_fake_hold", hold);
    find("fusedpg_fake_synchronize", synchronize);
    find("fusedpg_fake_fault", fault);
    find("fusedpg_fake_begin_capture", begin_capture_in);
    find("fusedpg_fake_unsafe", unsafe);
    find("fusedpg_fake_end_capture", end_capture);
    find("fusedpg_fake_launch", launch);
    find("fusedpg_fake_destroy_graph", destroy_graph);
    find("fusedpg_fake_make_id", make_id);
    find("fusedpg_fake_connect", connect);
    find("fusedpg_fake_collective", collective);
    find("fusedpg_fake_disconnect", disconnect);
    find("ncclGetErrorString", nccl_error);
    find("fusedpg_fake_reset", reset);
  }

  template <typename Function>
  void find(const char* name, Function& function) const {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr) {
      throw std::runtime_error(std::string("no symbol ") + name);
    }
  }

  void check(const char* what, cuda::NcclResult result) const {
    if (result != cuda::kNcclSuccess) {
      throw std::runtime_error(
          std::string(what) + ": NCCL error: " + nccl_error(result));
    }
  }

  Stats now() const {
    Stats s{};
    stats(&s);
    return s;
  }
};

} // namespace fusedpg::fake
