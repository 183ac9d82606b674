// Memory of the CUDA engine that operations share or take turns with.

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/error.hpp"
#include "base/round_up.hpp"
#include "cuda/run.hpp"

namespace fusedpg::cuda {
namespace {

constexpr size_t kSlotAlignment = 1 << 16;
constexpr size_t kMaxLayouts = 256;
// For the watchdog to see that an operation has ended.
constexpr std::chrono::milliseconds kGivesBack{500};
constexpr size_t kArenaAlignment = 1 << 21;
constexpr size_t kSignalBytes = kDirectBlocks * sizeof(DirectSignals);

} // namespace

bool CudaEngine::make_arena(const Deadline& deadline) {
  if (settings_.cuda_arena_bytes == 0 || !comm_ ||
      cuda_.direct_create == nullptr) {
    return false;
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
            bytes + kSignalBytes,
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
  return made->usable != 0;
}

void CudaEngine::give_up_arena(int without) {
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

std::shared_ptr<Slot> CudaEngine::free_slot(size_t bytes) {
  for (const auto& slot : slots_) {
    // Only the pool knows it: its operation has ended.
    if (slot.use_count() == 1 && slot->bytes >= bytes) {
      return slot;
    }
  }
  return nullptr;
}

std::shared_ptr<Slot> CudaEngine::take_slot(size_t bytes) {
  auto slot = free_slot(bytes);
  if (!slot) {
    slot = make_slot(bytes);
    slots_.push_back(slot);
  }
  return slot;
}

// One that an earlier operation gives back.
std::shared_ptr<Slot> CudaEngine::await_slot(size_t bytes) {
  for (Deadline last(kGivesBack);;) {
    if (auto slot = free_slot(bytes)) {
      return slot;
    }
    check_failed();
    {
      const std::lock_guard<std::mutex> lock(watch_mutex_);
      if (in_flight_.size() > 1) { // beside the one that waits
        last = Deadline(kGivesBack);
      }
    }
    if (last.expired()) {
      fail_allocation(bytes, "nor does an earlier operation give any back");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

CudaEngine::DeviceLayout& CudaEngine::layout_of(
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
  }
  auto made = std::make_unique<DeviceLayout>();
  made->layout = make_layout(counts, size_, max_block, whole_from);
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

// Where other ranks have too little memory.
void CudaEngine::drop_wire() {
  everywhere_.grads = everywhere_.params = 0;
  if (!ever_captured_) {
    check(
        cuda_,
        "cudaStreamSynchronize",
        cuda_.stream_synchronize(compute_.get()));
    wire_ = Wire();
  }
}

void CudaEngine::await(Event event, uint64_t sequence) {
  // The watchdog sees what goes wrong.
  for (int looks = 0;; ++looks) {
    check_failed();
    const int state = cuda_.event_query(event);
    if (state == kSuccess) {
      break;
    }
    if (state != kNotReady) {
      check(cuda_, "cudaEventQuery", state);
    }
    if (looks > 100) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  // Unless ranks disagree, which the operation has said before it ended.
  while (__atomic_load_n(&flags_->mismatch, __ATOMIC_ACQUIRE) == sequence) {
    check_failed();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  check_failed();
}

// --- what an operation needs -------------------------------------------------

// Sizes are the same on all ranks, so all find alike whether it is more than
// they have had so far, and then tell each other, behind earlier operations,
// whether they have it now. Nobody waits for the others otherwise.
void Run::acquire(const CudaEngine::Needs& needs) {
  CudaEngine::Everywhere& everywhere = e_.everywhere_;
  const bool captured = operation_.captured_;
  const bool grows = (needs.layout && !needs.layout->everywhere) ||
      needs.grads > everywhere.grads || needs.params > everywhere.params ||
      needs.slot > everywhere.slot;
  const bool asks = grows && !alone() && !captured;
  std::string refused;
  try {
    if (needs.layout != nullptr) {
      e_.upload(*needs.layout);
    }
    e_.reserve_wire(needs.grads, needs.params);
    if (needs.slot != 0 && captured) {
      e_.captured_slots_.push_back(e_.make_slot(needs.slot));
      operation_.slot_ = e_.captured_slots_.back();
    } else if (needs.slot != 0) {
      operation_.slot_ = e_.take_slot(needs.slot);
    }
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kOutOfMemory) {
      throw;
    }
    refused = error.what();
  }
  if (!refused.empty() && !grows && !alone() && !captured) {
    operation_.slot_ = e_.await_slot(needs.slot);
    return;
  }
  if (asks && !all_have(refused.empty())) {
    if (refused.empty()) {
      refused =
          "fused: another rank's GPU has no memory left for communication "
          "buffers; make FUSEDPG_CUDA_CHUNK_BYTES smaller or free memory there";
    }
    e_.drop_wire();
  }
  if (!refused.empty()) {
    throw Refusal(formatted(
        "{} [{}, sequence {}, rank {}]; nothing was changed, and the group "
        "works on",
        refused,
        operation_.summary,
        operation_.sequence,
        e_.rank_));
  }
  if (asks) {
    everywhere.grads = std::max(everywhere.grads, needs.grads);
    everywhere.params = std::max(everywhere.params, needs.params);
    everywhere.slot = std::max(everywhere.slot, needs.slot);
    if (needs.layout != nullptr) {
      needs.layout->everywhere = true;
    }
  }
}

// The same exchange as before every operation, so that ranks which are in
// another one are found to disagree.
bool Run::all_have(bool has) {
  const Slot& spare = *e_.spare_;
  auto* lacking = static_cast<float*>(spare.host.get());
  *lacking = has ? 0 : 1;
  ProposeArgs propose{};
  propose.agree = static_cast<uint8_t*>(spare.device.get());
  propose.found_inf = lacking;
  propose.hash = ~hash_of(operation_.facts());
  exchange(propose);
  PrepareArgs result{};
  result.agree = propose.agree;
  result.found_inf = lacking;
  result.mismatch = &e_.flags_->mismatch;
  result.sequence = operation_.sequence;
  check("prepare", cuda_.prepare(&result, wire_));
  const Event done = e_.events_.agreed.get();
  check("cudaEventRecord", cuda_.event_record(done, wire_));
  e_.await(done, operation_.sequence);
  return *lacking == 0;
}

} // namespace fusedpg::cuda
