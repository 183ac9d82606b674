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
constexpr std::chrono::milliseconds kLook{100}; // for the store's answer
// Whether a rank does not reach the memory of all.
const char* const kApartKey = "cuda/apart";

} // namespace

void CudaEngine::allocate_arena() {
  if (settings_.cuda_arena_bytes == 0 || size_ == 1 ||
      size_ > kMaxDirectRanks) {
    return;
  }
  const size_t bytes = round_up(settings_.cuda_arena_bytes, kArenaAlignment);
  arena_ = carrier_->symmetric_memory(bytes + sizeof(DirectRoom));
  if (!arena_) {
    return;
  }
  arena_bytes_ = bytes;
  // Before any other rank reaches it.
  const Stream stream = compute_.get();
  check(
      cuda_,
      "cudaMemsetAsync",
      cuda_.clear(
          static_cast<char*>(arena_.get()) + bytes,
          sizeof(DirectRoom),
          stream));
  check(cuda_, "cudaStreamSynchronize", cuda_.stream_synchronize(stream));
}

void CudaEngine::watch_start(
    const char* what,
    const Deadline& deadline,
    const Carrier::Watch& besides) {
  auto next_look = Clock::now() + kConnectLook;
  carrier_->set_watch([this, what, &deadline, besides, next_look]() mutable {
    if (deadline.expired()) {
      fail(
          ErrorKind::kTimeout,
          "fused: {} of a group did not end within {} ms; is "
          "every rank of the group alive?",
          what,
          deadline.timeout().count());
    }
    if (Clock::now() > next_look) {
      look_at_peers(formatted("{} of a group", what));
      besides();
      next_look = Clock::now() + kConnectLook;
    }
  });
}

// No operation, captured or not, has to make the communicator then.
void CudaEngine::connect(const Deadline& deadline) {
  if (size_ == 1) {
    return;
  }
  watch_start("the first collective", deadline, [] {});
  carrier_->connect();
  if (ring_) {
    comm_ = carrier_->nccl_comm();
    ring_ = comm_ != nullptr;
  }
}

bool CudaEngine::reach_peers(const Deadline& deadline) {
  if (!arena_) {
    return false;
  }
  struct Apart {};
  watch_start("the rendezvous of symmetric memory", deadline, [this] {
    const auto told = ask_within(kLook, [](Rendezvous& store) {
      return std::string(store.has(kApartKey) ? "yes" : "");
    });
    if (told && !told->empty()) {
      throw Apart(); // who said so does not come, or does no more
    }
  });
  Carrier::Peers found;
  try {
    found = carrier_->peers(arena_);
  } catch (const Apart&) {
  }
  if (found.arenas.size() != static_cast<size_t>(size_) ||
      std::count(found.arenas.begin(), found.arenas.end(), nullptr) != 0) {
    store_->set(kApartKey, "yes");
    return false;
  }
  PeerAccess& peers = peers_.emplace();
  peers.rank = rank_;
  peers.size = size_;
  std::copy(found.arenas.begin(), found.arenas.end(), peers.arenas);
  peers.multicast = found.multicast;
  peers.room = arena_bytes_;
  peers.stop = &flags_->stop;
  peers.late = &flags_->late;
  return true;
}

void CudaEngine::give_up_arena(int without) {
  peers_.reset();
  arena_.reset();
  arena_bytes_ = 0;
  static std::atomic<bool> told{false};
  if (rank_ == 0 && !told.exchange(true)) {
    log_line(formatted(
        "FUSEDPG_CUDA_ARENA_BYTES is set, but the GPU of rank {} does not "
        "reach those of all ranks by torch's symmetric memory (one NVLink "
        "domain, peer access, its backend \"CUDA\"); there is no direct path, "
        "all ranks take the stock one",
        without));
  }
}

bool CudaEngine::in_arena(const void* p, size_t bytes) const {
  const auto* begin = static_cast<const char*>(arena());
  const auto* at = static_cast<const char*>(p);
  return begin != nullptr && at >= begin && at + bytes <= begin + arena_bytes_;
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
