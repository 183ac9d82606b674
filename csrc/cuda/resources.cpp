// Memory of the CUDA engine that operations share or take turns with.

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "cuda/engine.hpp"

namespace fusedpg::cuda {
namespace {

constexpr size_t kSlotAlignment = 1 << 16;
constexpr size_t kMaxLayouts = 256;
constexpr size_t kArenaAlignment = 1 << 21;
constexpr size_t kSignalBytes = kDirectBlocks * sizeof(DirectSignals);
constexpr size_t kBehindTensors = kSignalBytes + kDirectFlags;
const char* const kDirectKey = "cuda/direct/";

size_t round_up(size_t bytes, size_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

} // namespace

void CudaEngine::make_arena(const Deadline& deadline) {
  if (settings_.cuda_arena_bytes == 0 || !comm_ || !nccl_.has_device_api() ||
      cuda_.direct_create == nullptr) {
    return;
  }
  const size_t bytes = (settings_.cuda_arena_bytes + kArenaAlignment - 1) /
      kArenaAlignment * kArenaAlignment;
  if (nccl_.mem_alloc(&arena_, bytes + kBehindTensors) != kNcclSuccess) {
    fail(
        ErrorKind::kOutOfMemory,
        "fused: ncclMemAlloc of FUSEDPG_CUDA_ARENA_BYTES={} failed on rank {}",
        bytes,
        rank_);
  }
  arena_bytes_ = bytes;
  clear_signals();
  // Calls that do not return in time may write there later.
  struct Made {
    NcclWindow window = nullptr;
    void* direct = nullptr;
    int usable = 0;
  };
  const auto made = std::make_shared<Made>();
  comm_->call_within(
      "ncclCommWindowRegister",
      deadline,
      [made, &nccl = nccl_, arena = arena_, bytes](NcclComm comm) {
        return nccl.comm_window_register(
            comm,
            arena,
            bytes + kBehindTensors,
            &made->window,
            kNcclWindowSymmetric);
      });
  window_ = made->window;
  comm_->call_within(
      "ncclDevCommCreate",
      deadline,
      [made,
       &cuda = cuda_,
       args = DirectCreateArgs{
           nullptr,
           window_,
           arena_,
           nccl_.version,
           size_,
           nccl_.dev_comm_create,
           nccl_.dev_comm_destroy,
           nccl_.team_lsa,
           settings_.cuda_multimem}](NcclComm comm) {
        DirectCreateArgs with = args;
        with.comm = comm;
        switch (cuda.direct_create(&with, &made->direct, &made->usable)) {
          case kSuccess:
            return kNcclSuccess;
          case kNotReady:
            return kNcclInProgress;
          default:
            return kNcclUnhandledCudaError;
        }
      });
  direct_ = made->direct;
  const std::vector<std::string> all = tell_all(
      kDirectKey, made->usable != 0 ? "1" : "0", deadline, "its direct path");
  const auto missing = std::find(all.begin(), all.end(), "0");
  if (missing == all.end()) {
    return;
  }
  comm_->call("ncclCommWindowDeregister", [&](NcclComm comm) {
    if (direct_ != nullptr) {
      cuda_.direct_destroy(direct_, comm);
    }
    return window_ == nullptr ? kNcclSuccess
                              : nccl_.comm_window_deregister(comm, window_);
  });
  direct_ = nullptr;
  window_ = nullptr;
  nccl_.mem_free(arena_);
  arena_ = nullptr;
  arena_bytes_ = 0;
  static std::atomic<bool> told{false};
  if (rank_ == 0 && !told.exchange(true)) {
    log_line(formatted(
        "FUSEDPG_CUDA_ARENA_BYTES is set, but the GPU of rank {} does not "
        "reach "
        "those of all ranks by windows of NCCL {} (one NVLink domain, peer "
        "access, NCCL_CUMEM_ENABLE, kernels built with that NCCL's headers); "
        "there is no direct path, all ranks take the stock one",
        missing - all.begin(),
        nccl_.version));
  }
}

DirectSignals* CudaEngine::signals() const {
  return reinterpret_cast<DirectSignals*>(
      static_cast<char*>(arena_) + arena_bytes_);
}

uint8_t* CudaEngine::direct_flags() const {
  return static_cast<uint8_t*>(arena_) + arena_bytes_ + kSignalBytes;
}

bool CudaEngine::in_arena(const void* p, size_t bytes) const {
  const auto* begin = static_cast<const char*>(arena_);
  const auto* at = static_cast<const char*>(p);
  return begin != nullptr && at >= begin && at + bytes <= begin + arena_bytes_;
}

// Before the window is registered, which all ranks wait for.
void CudaEngine::clear_signals() {
  const Stream stream = compute_.get();
  check(cuda_, "cudaMemsetAsync", cuda_.clear(signals(), kSignalBytes, stream));
  check(cuda_, "cudaStreamSynchronize", cuda_.stream_synchronize(stream));
}

std::shared_ptr<Slot> CudaEngine::take_slot(size_t bytes) {
  bytes = round_up(bytes, kSlotAlignment);
  for (const auto& slot : slots_) {
    // Only the pool knows it: its operation has ended.
    if (slot.use_count() == 1 && slot->bytes >= bytes) {
      return slot;
    }
  }
  auto slot = std::make_shared<Slot>();
  slot->host = allocate_host(cuda_, bytes);
  slot->device = allocate_device(cuda_, bytes);
  slot->bytes = bytes;
  slots_.push_back(slot);
  return slot;
}

const CudaEngine::DeviceLayout& CudaEngine::layout_of(
    const std::vector<size_t>& counts,
    size_t max_block,
    size_t whole_from) {
  std::vector<size_t> key = counts;
  key.push_back(max_block);
  key.push_back(whole_from);
  const auto known = layouts_.find(key);
  if (known != layouts_.end()) {
    return *known->second;
  }
  if (layouts_.size() > kMaxLayouts && !ever_captured_) {
    check(
        cuda_,
        "cudaStreamSynchronize",
        cuda_.stream_synchronize(compute_.get()));
    layouts_.clear();
    return layout_of(counts, max_block, whole_from);
  }
  auto made = std::make_unique<DeviceLayout>();
  made->layout = make_layout(counts, size_, max_block, whole_from);
  const Layout& l = made->layout;
  size_t bytes = 0;
  const auto each_array = [&](const auto& call) {
    bytes = 0;
    const auto one = [&](const auto& from, auto& to) {
      call(from, to);
      bytes += round_up(from.size() * sizeof(from[0]), 16);
    };
    one(l.pieces, made->pieces);
    one(l.tiles, made->tiles);
    one(l.tile_list, made->tile_list);
    one(l.tile_begin, made->tile_begin);
    one(l.piece_list, made->piece_list);
    one(l.piece_begin, made->piece_begin);
  };
  each_array([](const auto&, auto&) {}); // counts the bytes
  const HostMemory host = allocate_host(cuda_, bytes);
  auto* h = static_cast<char*>(host.get());
  made->memory = allocate_device(cuda_, bytes);
  auto* d = static_cast<char*>(made->memory.get());
  each_array([&](const auto& from, auto& to) {
    std::copy_n(
        reinterpret_cast<const char*>(from.data()),
        from.size() * sizeof(from[0]),
        h + bytes);
    to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(d + bytes);
  });
  // On a stream of its own: the call may be inside a graph's capture, of which
  // this is no part.
  const OwnedStream stream = make_stream(cuda_);
  check(cuda_, "cudaMemcpyAsync", cuda_.copy(d, h, bytes, stream.get()));
  check(cuda_, "cudaStreamSynchronize", cuda_.stream_synchronize(stream.get()));
  return *(layouts_[key] = std::move(made));
}

void CudaEngine::reserve_wire(size_t grad_bytes, size_t param_bytes) {
  const auto grow = [this](
                        DeviceMemory(&memory)[2], size_t& has, size_t bytes) {
    if (bytes <= has) {
      return;
    }
    bytes = round_up(bytes, kSlotAlignment);
    if (has != 0 && !ever_captured_) {
      // Operations in flight may use what is about to be freed.
      check(
          cuda_,
          "cudaStreamSynchronize",
          cuda_.stream_synchronize(compute_.get()));
    }
    for (DeviceMemory& one : memory) {
      if (ever_captured_) {
        retired_.push_back(std::move(one));
      }
      one = DeviceMemory();
      one = allocate_device(cuda_, bytes);
    }
    has = bytes;
  };
  grow(wire_.grads, wire_.grad_bytes, grad_bytes);
  grow(wire_.params, wire_.param_bytes, param_bytes);
}

} // namespace fusedpg::cuda
