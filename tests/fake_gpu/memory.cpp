#include "memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "calls.hpp"
#include "streams.hpp"

namespace fusedpg::fake {

namespace {

// NaN in every floating-point type.
constexpr int kPoison = 0xff;
// Beyond this an arena would cost more memory than the test uses.
constexpr size_t kPoisonedShared = size_t(32) << 20;
constexpr size_t kPoisonedTail = size_t(1) << 20;
constexpr size_t kAlignment = 512;
constexpr size_t kKeptUnshared = 8;

// A sanitizer sees the use of freed memory itself.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr size_t kKeptFreed = 0;
#else
constexpr size_t kKeptFreed = size_t(64) << 20;
#endif

} // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(number_, other.number_);
  return *this;
}

Descriptor::~Descriptor() {
  if (valid()) {
    close(number_);
  }
}

Descriptor make_shared_file(size_t bytes) {
  Descriptor file(memfd_create("fusedpg_fake", MFD_CLOEXEC));
  if (file.valid() &&
      ftruncate(file.number(), static_cast<off_t>(bytes)) != 0) {
    return Descriptor();
  }
  return file;
}

Descriptor open_shared_file(pid_t owner, int number) {
  const std::string path =
      "/proc/" + std::to_string(owner) + "/fd/" + std::to_string(number);
  return Descriptor(open(path.c_str(), O_RDWR | O_CLOEXEC));
}

Mapping::Mapping(const Descriptor& file, size_t bytes) : bytes_(bytes) {
  void* data = mmap(
      nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.number(), 0);
  data_ = data == MAP_FAILED ? nullptr : static_cast<char*>(data);
}

Mapping::~Mapping() {
  if (data_ != nullptr) {
    munmap(data_, bytes_);
  }
}

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

bool Memory::share(void** memory, size_t bytes) {
  auto made = std::make_shared<SharedMemory>(std::max<size_t>(bytes, 1));
  if (made->mapping.data() == nullptr) {
    return false;
  }
  char* data = made->mapping.data();
  std::memset(data, kPoison, std::min(bytes, kPoisonedShared));
  const size_t tail = std::min(bytes, kPoisonedTail);
  std::memset(data + bytes - tail, kPoison, tail);
  *memory = made->mapping.data();
  const std::lock_guard<std::mutex> lock(mutex_);
  shared_.emplace(*memory, std::move(made));
  return true;
}

bool Memory::unshare(void* memory) {
  std::shared_ptr<SharedMemory> ending;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = shared_.find(memory);
  if (found == shared_.end()) {
    calls().bad_handle(0, "no such memory for ncclMemFree");
    return false;
  }
  ending = std::move(found->second);
  shared_.erase(found);
  if (ending.use_count() > 1) {
    calls().bad_handle(0, "ncclMemFree of memory that is still in a window");
  }
  // Peers have it mapped for themselves, and their kernels may still store to
  // it. Those of this process have only this mapping.
  unshared_.push_back(std::move(ending));
  if (unshared_.size() > kKeptUnshared) {
    unshared_.pop_front();
  }
  return true;
}

std::shared_ptr<SharedMemory> Memory::shared_holding(
    const void* memory,
    size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto* begin = static_cast<const char*>(memory);
  for (const auto& [ignored, block] : shared_) {
    const char* data = block->mapping.data();
    if (begin >= data && begin + bytes <= data + block->mapping.bytes()) {
      return block;
    }
  }
  return nullptr;
}

void Memory::fill(Stats& stats) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (; !freed_.empty(); freed_.pop_front()) {
    inspect(freed_.front());
  }
  freed_bytes_ = 0;
  stats.device_allocations = device_.size();
  stats.host_allocations = host_.size();
  stats.nccl_allocations = shared_.size();
  for (const auto& [ignored, block] : device_) {
    stats.device_bytes += block.bytes;
  }
  for (const auto& [ignored, block] : host_) {
    stats.host_bytes += block.bytes;
  }
  for (const auto& [ignored, block] : shared_) {
    stats.nccl_bytes += block->mapping.bytes();
  }
}

} // namespace fusedpg::fake
