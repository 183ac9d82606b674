// What is around the kernels of direct.cu: the device functions of NCCL, and
// checks of their callers.

#include "direct.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <utility>

#include "cuda/cuda_api.hpp"
#include "nccl_device.h"

extern "C" const fusedpg::cuda::CudaApi* fusedpg_kernels_api();

namespace {

// Of the launch that runs on this thread.
thread_local ncclWindow_t multicast_window = nullptr;

} // namespace

void* ncclGetLsaPointer(ncclWindow_t window, size_t offset, int peer) {
  const auto rank = static_cast<size_t>(peer);
  if (rank >= window->bases.size() || offset >= window->bytes) {
    std::abort();
  }
  if (window->unmapped) {
    fusedpg::fake::calls().bad_handle(0, "a kernel uses an unmapped window");
  }
  return window->bases[rank] + offset;
}

void* ncclGetLsaMultimemPointer(
    ncclWindow_t window,
    size_t offset,
    const ncclDevComm& comm) {
  multicast_window = window;
  return static_cast<char*>(comm.lsaMultimem.mcBasePtr) + offset;
}

namespace fusedpg::simt {

std::span<char* const> everywhere(char* multicast, size_t bytes) {
  thread_local std::vector<char*> places;
  places.clear();
  const auto offset = static_cast<size_t>(multicast - fake::kMulticast);
  if (offset + bytes > multicast_window->bytes) {
    std::abort();
  }
  for (char* base : multicast_window->bases) {
    places.push_back(base + offset);
  }
  return places;
}

} // namespace fusedpg::simt

namespace fusedpg::fake {

using namespace cuda; // NOLINT: the launch arguments' names

namespace {

struct Contexts {
  std::mutex mutex;
  std::map<void*, std::shared_ptr<Direct>> alive;

  std::shared_ptr<Direct> find(void* context) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = alive.find(context);
    return found == alive.end() ? nullptr : found->second;
  }
};

int no_such_context() {
  return calls().bad_handle(kInvalidValue, "no such context of direct_create");
}

} // namespace

Direct::Direct(
    std::shared_ptr<Comm> comm,
    std::shared_ptr<Window> window,
    int channel)
    : comm_(std::move(comm)),
      window_(std::move(window)),
      channel_(channel) {
  ++alive().direct_contexts;
}

Direct::~Direct() {
  --alive().direct_contexts;
}

// A launch that runs now has copied what it needs.
void Direct::destroy(void* comm) {
  fusedpg_kernels_api()->direct_destroy(std::exchange(context_, nullptr), comm);
}

int Direct::create(const DirectCreateArgs& args, int* usable) {
  DirectCreateArgs device = args;
  device.window = window_.get();
  return fusedpg_kernels_api()->direct_create(&device, &context_, usable);
}

void Direct::run(
    const Announcement::Common& common,
    const std::function<bool()>& stopped,
    const std::function<int()>& kernel,
    const std::function<std::string()>& params) {
  const std::lock_guard<std::mutex> lock(executing_);
  Announcement mine{};
  mine.common = common;
  Executed executed{0, 0, common.count, common.op, 0};
  comm_->begin(executed, 0, next_sequence_, true);
  mine.common.sequence = executed.sequence;
  {
    // So few blocks that each has several tiles.
    const simt::AtOnce scope(
        static_cast<unsigned>(from_environment("FUSEDPG_FAKE_BLOCKS", 3)));
    // One that begins when it is told to stop ends before it uses the window.
    const int uses = stopped() ? 0 : 1;
    window_->kernels += uses;
    if (kernel() != kSuccess) {
      calls().bad_handle(0, "arguments that the direct path refuses");
    }
    window_->kernels -= uses;
  }
  const std::string ended = params();
  // NCCL's abort does not reach these kernels.
  comm_->exchange(channel_, mine, [] {}, [] {}, stopped);
  // All ranks' kernels have ended, unless they were told to or were late.
  if (!stopped() && params() != ended) {
    std::fputs("a kernel: parameters arrive after its end\n", stderr);
    std::abort();
  }
  comm_->end(true);
}

void Direct::step(const DirectArgs& args) {
  DirectArgs device = args;
  device.context = context_;
  run(
      {0,
       0,
       args.update.chunk.block,
       kDirectStep,
       static_cast<int32_t>(args.update.param_type),
       static_cast<int32_t>(args.update.formula)},
      [&args] {
        return __atomic_load_n(args.stop, __ATOMIC_ACQUIRE) != 0 ||
            __atomic_load_n(args.late, __ATOMIC_ACQUIRE) != 0;
      },
      [&] { return fusedpg_kernels_api()->direct_step(&device, nullptr); },
      [&] {
        std::string bytes;
        for (uint32_t t = 0; t < args.num_tensors; ++t) {
          const TensorInfo& info = args.update.chunk.tensors[t];
          bytes.append(
              static_cast<const char*>(info.param),
              info.count * dtype_size(args.update.param_type));
        }
        return bytes;
      });
}

int direct_create(const DirectCreateArgs* args, void** context, int* usable) {
  *context = nullptr;
  *usable = 0;
  const std::shared_ptr<Comm> comm = comms().find(args->comm);
  const std::shared_ptr<Window> window =
      comm == nullptr ? nullptr : comm->window(args->window);
  if (comm != nullptr &&
      (args->window == nullptr || comm->is_legacy(args->window))) {
    const int result =
        fusedpg_kernels_api()->direct_create(args, context, usable);
    return *usable == 0
        ? result
        : calls().bad_handle(
              kInvalidValue, "a direct path without a symmetric window");
  }
  if (window == nullptr || args->size != comm->size ||
      args->dev_comm_create == nullptr || args->dev_comm_destroy == nullptr ||
      args->team_lsa == nullptr) {
    return calls().bad_handle(
        kInvalidValue, "wrong arguments of direct_create");
  }
  const int channel = comm->claim_direct_channel();
  if (channel < 0) {
    return kUnknownError;
  }
  const auto made = std::make_shared<Direct>(comm, window, channel);
  const int result = made->create(*args, usable);
  if (*usable != 0) {
    *context = nccl_handle();
    Contexts& contexts = global<Contexts>();
    const std::lock_guard<std::mutex> lock(contexts.mutex);
    contexts.alive.emplace(*context, made);
  }
  return result;
}

int direct_destroy(void* context, void* comm) {
  const std::shared_ptr<Direct> ending = global<Contexts>().find(context);
  if (ending == nullptr) {
    return no_such_context();
  }
  {
    const std::lock_guard<std::mutex> lock(global<Contexts>().mutex);
    global<Contexts>().alive.erase(context);
  }
  ending->destroy(comm);
  return kSuccess;
}

int direct_step(const DirectArgs* args, Stream stream) {
  const std::shared_ptr<Direct> direct = global<Contexts>().find(args->context);
  if (direct == nullptr) {
    return no_such_context();
  }
  return streams().enqueue(
      stream,
      [direct, copied = *args] { direct->step(copied); },
      current_device());
}

} // namespace fusedpg::fake
