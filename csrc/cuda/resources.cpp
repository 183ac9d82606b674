// Memory of the CUDA engine that operations share or take turns with.

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "base/round_up.hpp"
#include "cuda/engine.hpp"

namespace fusedpg::cuda {
namespace {

constexpr size_t kSlotAlignment = 1 << 16;
constexpr size_t kMaxLayouts = 256;
constexpr std::chrono::milliseconds kConnectLook{500}; // at the other ranks
constexpr size_t kArenaAlignment = 1 << 21;
constexpr size_t kSignalBytes = kDirectBlocks * sizeof(DirectSignals);

} // namespace

void CudaEngine::allocate_arena() {
  if (settings_.cuda_arena_bytes == 0 || size_ == 1 || !nccl_.is_torchs ||
      cuda_.direct_create == nullptr) {
    return;
  }
  const size_t bytes = (settings_.cuda_arena_bytes + kArenaAlignment - 1) /
      kArenaAlignment * kArenaAlignment;
  if (nccl_.mem_alloc(&arena_, bytes + kSignalBytes) != kNcclSuccess) {
    fail(
        ErrorKind::kOutOfMemory,
        "fused: ncclMemAlloc of FUSEDPG_CUDA_ARENA_BYTES={} failed on rank {}",
        bytes,
        rank_);
  }
  arena_bytes_ = bytes;
  clear_signals();
}

// No operation, captured or not, has to make the communicator then.
void CudaEngine::connect(const Deadline& deadline) {
  if (size_ == 1) {
    return;
  }
  auto next_look = Clock::now() + kConnectLook;
  carrier_->set_watch([&] {
    if (deadline.expired()) {
      fail(
          ErrorKind::kTimeout,
          "fused: the first collective of a group did not end within {} ms; is "
          "every rank of the group alive?",
          deadline.timeout().count());
    }
    if (Clock::now() > next_look) {
      look_at_peers("the first collective of a group");
      next_look = Clock::now() + kConnectLook;
    }
  });
  carrier_->connect();
  if (ring_ || arena_ != nullptr) {
    comm_ = carrier_->nccl_comm();
    ring_ = ring_ && comm_ != nullptr;
  }
}

bool CudaEngine::register_arena(const Deadline& deadline) {
  if (arena_ == nullptr || comm_ == nullptr) {
    return false;
  }
  // Calls that do not return in time may write there later.
  struct Made {
    NcclWindow window = nullptr;
    void* direct = nullptr;
    int usable = 0;
  };
  const auto made = std::make_shared<Made>();
  call_nccl_within(
      "ncclCommWindowRegister",
      deadline,
      [made,
       &nccl = nccl_,
       arena = arena_,
       bytes = arena_bytes_ + kSignalBytes](NcclComm comm) {
        return nccl.comm_window_register(
            comm, arena, bytes, &made->window, kNcclWindowSymmetric);
      });
  window_ = made->window;
  call_nccl_within(
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
  return made->usable != 0;
}

void CudaEngine::give_up_arena(int without) {
  if (direct_ != nullptr) {
    cuda_.direct_destroy(direct_, comm_);
  }
  if (window_ != nullptr) {
    call_nccl("ncclCommWindowDeregister", [&](NcclComm comm) {
      return nccl_.comm_window_deregister(comm, window_);
    });
  }
  direct_ = nullptr;
  window_ = nullptr;
  if (arena_ != nullptr) {
    nccl_.mem_free(arena_);
  }
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
        without,
        nccl_.version));
  }
}

DirectSignals* CudaEngine::signals() const {
  return reinterpret_cast<DirectSignals*>(
      static_cast<char*>(arena_) + arena_bytes_);
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

DeviceMemory CudaEngine::allocate(size_t bytes) {
  DeviceMemory memory = allocate_(bytes, memory_stream_.get());
  // An allocator may hand it out in the order of that stream.
  check(
      cuda_,
      "cudaStreamSynchronize",
      cuda_.stream_synchronize(memory_stream_.get()));
  return memory;
}

std::shared_ptr<Slot> CudaEngine::make_slot(size_t bytes) {
  bytes = round_up(bytes, kSlotAlignment);
  auto slot = std::make_shared<Slot>();
  slot->host = allocate_host(cuda_, bytes);
  slot->device = allocate(bytes);
  slot->bytes = bytes;
  return slot;
}

std::shared_ptr<Slot> CudaEngine::take_slot(size_t bytes) {
  for (const auto& slot : slots_) {
    // Only the pool knows it: its operation has ended.
    if (slot.use_count() == 1 && slot->bytes >= bytes) {
      return slot;
    }
  }
  slots_.push_back(make_slot(bytes));
  return slots_.back();
}

CudaEngine::DeviceLayout& CudaEngine::layout_of(
    const std::vector<size_t>& counts,
    size_t max_block,
    size_t whole_from,
    size_t header) {
  std::vector<size_t> key = counts;
  key.insert(key.end(), {max_block, whole_from, header});
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
  }
  auto made = std::make_unique<DeviceLayout>();
  made->layout = make_layout(counts, size_, max_block, whole_from, header);
  return *(layouts_[key] = std::move(made));
}

void CudaEngine::upload(DeviceLayout& made) {
  if (made.memory) {
    return;
  }
  const Layout& l = made.layout;
  size_t bytes = 0;
  const auto each_array = [&](const auto& call) {
    bytes = 0;
    const auto one = [&](const auto& from, auto& to) {
      call(from, to);
      bytes += round_up(from.size() * sizeof(from[0]), 16);
    };
    one(l.pieces, made.pieces);
    one(l.tiles, made.tiles);
    one(l.tile_list, made.tile_list);
    one(l.tile_begin, made.tile_begin);
    one(l.piece_list, made.piece_list);
    one(l.piece_begin, made.piece_begin);
  };
  each_array([](const auto&, auto&) {}); // counts the bytes
  const HostMemory host = allocate_host(cuda_, bytes);
  auto* h = static_cast<char*>(host.get());
  DeviceMemory memory = allocate(bytes);
  auto* d = static_cast<char*>(memory.get());
  each_array([&](const auto& from, auto& to) {
    std::copy_n(
        reinterpret_cast<const char*>(from.data()),
        from.size() * sizeof(from[0]),
        h + bytes);
    to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(d + bytes);
  });
  // The call may be inside a graph's capture, of which this is no part.
  const Stream stream = memory_stream_.get();
  check(cuda_, "cudaMemcpyAsync", cuda_.copy(d, h, bytes, stream));
  check(cuda_, "cudaStreamSynchronize", cuda_.stream_synchronize(stream));
  made.memory = std::move(memory);
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
      has = 0;
      memory[0] = memory[1] = nullptr;
    }
    DeviceMemory larger[2] = {allocate(bytes), allocate(bytes)};
    for (size_t i = 0; i < 2; ++i) {
      if (memory[i]) {
        retired_.push_back(std::move(memory[i]));
      }
      memory[i] = std::move(larger[i]);
    }
    has = bytes;
  };
  grow(wire_.grads, wire_.grad_bytes, grad_bytes);
  grow(wire_.params, wire_.param_bytes, param_bytes);
}

} // namespace fusedpg::cuda
