#include "memory.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "calls.hpp"
#include "streams.hpp"

namespace fusedpg::fake {

namespace {

// NaN in every floating-point type.
constexpr int kPoison = 0xff;
constexpr size_t kAlignment = 512;

// A sanitizer sees the use of freed memory itself.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr size_t kKeptFreed = 0;
#else
constexpr size_t kKeptFreed = size_t(64) << 20;
#endif

} // namespace

void Memory::Deleter::operator()(void* memory) const {
  std::free(memory);
}

Memory::Block Memory::make(size_t bytes) {
  Block block;
  void* data = nullptr;
  if (posix_memalign(&data, kAlignment, std::max<size_t>(bytes, 1)) == 0) {
    std::memset(data, kPoison, bytes);
    block.memory.reset(data);
    block.bytes = bytes;
  }
  return block;
}

void Memory::inspect(const Block& freed) {
  const auto* bytes = static_cast<const unsigned char*>(freed.memory.get());
  if (!std::all_of(bytes, bytes + freed.bytes, [](unsigned char byte) {
        return byte == kPoison;
      })) {
    calls().mistake(
        calls().freed_written, "device memory was written after its release");
  }
}

// FUSEDPG_FAKE_MEMORY: bytes of the device, and of what it sees of the host's.
bool Memory::fits(const std::map<void*, Block>& blocks, size_t bytes) {
  for (const auto& [ignored, block] : blocks) {
    bytes += block.bytes;
  }
  return bytes <=
      static_cast<uint64_t>(from_environment("FUSEDPG_FAKE_MEMORY", -1));
}

int Memory::allocate(void** memory, size_t bytes) {
  if (const int error = streams().check_unsafe()) {
    return error;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  Block block = fits(device_, bytes) ? make(bytes) : Block();
  *memory = block.memory.get();
  if (*memory == nullptr) {
    return kOutOfMemory;
  }
  device_.emplace(*memory, std::move(block));
  return cuda::kSuccess;
}

int Memory::release(void* memory) {
  if (memory == nullptr) {
    return cuda::kSuccess;
  }
  if (const int error = streams().check_unsafe()) {
    return error;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = device_.find(memory);
  if (found == device_.end()) {
    return calls().bad_handle(
        kInvalidValue, "no such device memory to release");
  }
  if (found->second.bytes <= kKeptFreed) {
    std::memset(memory, kPoison, found->second.bytes);
    freed_bytes_ += found->second.bytes;
    freed_.push_back(std::move(found->second));
  }
  device_.erase(found);
  while (freed_bytes_ > kKeptFreed) {
    inspect(freed_.front());
    freed_bytes_ -= freed_.front().bytes;
    freed_.pop_front();
  }
  return cuda::kSuccess;
}

int Memory::host_allocate(void** memory, size_t bytes) {
  if (const int error = streams().check_unsafe()) {
    return error;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  Block block = fits(host_, bytes) ? make(bytes) : Block();
  *memory = block.memory.get();
  if (*memory == nullptr) {
    return kOutOfMemory;
  }
  host_.emplace(*memory, std::move(block));
  return cuda::kSuccess;
}

int Memory::host_release(void* memory) {
  if (memory == nullptr) {
    return cuda::kSuccess;
  }
  if (const int error = streams().check_unsafe()) {
    return error;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  return host_.erase(memory) == 1
      ? cuda::kSuccess
      : calls().bad_handle(kInvalidValue, "no such host memory to release");
}

void Memory::fill(Stats& stats) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (; !freed_.empty(); freed_.pop_front()) {
    inspect(freed_.front());
  }
  freed_bytes_ = 0;
  stats.device_allocations = device_.size();
  stats.host_allocations = host_.size();
  for (const auto& [ignored, block] : device_) {
    stats.device_bytes += block.bytes;
  }
  for (const auto& [ignored, block] : host_) {
    stats.host_bytes += block.bytes;
  }
}

} // namespace fusedpg::fake
