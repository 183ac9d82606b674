// torch's symmetric memory on the host, between processes of one machine, for CPU
// tensors and those of the fake's CUDA device. Loading the library registers it.
//
// FUSEDPG_FAKE_SYMM_MEM: "apart": the last rank does not see rank 0's memory;
// "fails": rank 0's rendezvous throws, and the others wait for it; "multicast";
// "full": there is no memory; "other": CUDA's is of another kind.

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include "host/memory.hpp"
#include "shared_file.hpp"

namespace fusedpg::fake {
namespace {

namespace symm_mem = c10d::symmetric_memory;

// The buffers begin so far behind what get_buffer_ptrs() gives.
constexpr size_t kOffset = 4096;

bool is(const char* what) {
  const char* set = std::getenv("FUSEDPG_FAKE_SYMM_MEM");
  return set != nullptr && std::strcmp(set, what) == 0;
}

class Memory final : public symm_mem::SymmetricMemory {
 public:
  Memory(int rank, std::vector<Mapping> all)
      : rank_(rank),
        all_(std::move(all)) {
    for (const Mapping& one : all_) {
      buffers_.push_back(one.data());
    }
    if (is("apart") && rank_ + 1 == get_world_size()) {
      buffers_[0] = nullptr;
    }
  }

  std::vector<void*> get_buffer_ptrs() override {
    return buffers_;
  }
  size_t get_buffer_size() override {
    return all_[0].size() - kOffset;
  }
  size_t get_offset() override {
    return kOffset;
  }
  bool has_multicast_support() override {
    return is("multicast");
  }
  void* get_multicast_ptr() override {
    return buffers_[0]; // the fake's kernels look only whether it is there
  }
  int get_rank() override {
    return rank_;
  }
  int get_world_size() override {
    return static_cast<int>(all_.size());
  }
  c10::Device get_device() override {
    return c10::kCPU;
  }
  // What fusedpg does not use.
  std::vector<void*> get_signal_pad_ptrs() override {
    TORCH_CHECK(false, "no signal pads");
  }
  void** get_buffer_ptrs_dev() override {
    TORCH_CHECK(false, "no pointers on a device");
  }
  void** get_signal_pad_ptrs_dev() override {
    TORCH_CHECK(false, "no signal pads");
  }
  void barrier(int, size_t) override {
    TORCH_CHECK(false, "no barrier");
  }
  void put_signal(int, int, size_t) override {
    TORCH_CHECK(false, "no signals");
  }
  void wait_signal(int, int, size_t) override {
    TORCH_CHECK(false, "no signals");
  }

 private:
  const int rank_;
  const std::vector<Mapping> all_;
  std::vector<void*> buffers_;
};

class Allocator final : public symm_mem::SymmetricMemoryAllocator {
 public:
  explicit Allocator(c10::DeviceType device) : device_(device) {}

  void* alloc(size_t bytes, int, const std::optional<std::string>&) override {
    auto made = std::make_shared<SharedFile>(bytes + kOffset);
    TORCH_CHECK(!is("full"), "no memory");
    char* data = made->mapping.data() + kOffset;
    // NaN, and no word of a signal; all of it would cost more than tests use.
    const size_t some = std::min(bytes, size_t(1) << 20);
    std::memset(data, 0xff, some);
    std::memset(data + bytes - some, 0xff, some);
    const std::lock_guard<std::mutex> lock(mutex_);
    all_[data] = made;
    return data;
  }
  void free(void* data) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(all_.erase(data) == 1, "no such memory to free");
  }
  size_t get_alloc_size(void* data) override {
    return find(data)->mapping.size() - kOffset;
  }
  c10::intrusive_ptr<symm_mem::SymmetricMemory> rendezvous(
      void* data,
      const std::optional<std::string>& group_name) override {
    const auto group = c10d::resolve_process_group(*group_name);
    const auto mine = find(data);
    TORCH_CHECK(!is("fails") || group->getRank() != 0, "no peer access");
    const auto store = group->getStore();
    const std::string name = [&] {
      const std::lock_guard<std::mutex> lock(mutex_);
      return *group_name + "/" + std::to_string(meetings_[*group_name]++);
    }();
    const auto key = [&](const char* what, int rank) {
      return "cpu_symm_mem/" + name + "/" + what + std::to_string(rank);
    };
    const std::string place =
        std::to_string(getpid()) + " " + std::to_string(mine->file.get());
    const auto say = [&](const char* what, const std::string& text) {
      store->set(
          key(what, group->getRank()),
          std::vector<uint8_t>(text.begin(), text.end()));
    };
    const auto hear = [&](const char* what, int rank) {
      const auto text = store->get(key(what, rank));
      return std::string(text.begin(), text.end());
    };
    say("file", place);
    std::vector<Mapping> all;
    for (int rank = 0; rank < group->getSize(); ++rank) {
      const std::string there = hear("file", rank);
      const size_t space = there.find(' ');
      const Fd file = open_shared_file(
          std::stoi(there), std::stoi(there.substr(space + 1)));
      all.emplace_back(file.get(), mine->mapping.size());
    }
    // Nobody lets go of a file that others have yet to open.
    say("mapped", "");
    for (int rank = 0; rank < group->getSize(); ++rank) {
      hear("mapped", rank);
    }
    return c10::make_intrusive<Memory>(group->getRank(), std::move(all));
  }
  bool has_multicast_support(int) override {
    return is("multicast");
  }
  c10::DeviceType supported_device_type() override {
    return device_;
  }
  std::string name() override {
    return device_ == c10::kCUDA && !is("other") ? "CUDA" : "FUSEDPG_TESTS";
  }

 private:
  struct SharedFile {
    Fd file;
    Mapping mapping;

    explicit SharedFile(size_t bytes)
        : file(create_memory_file("fusedpg_fake", bytes)),
          mapping(file.get(), bytes) {}
  };

  std::shared_ptr<SharedFile> find(void* data) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = all_.find(data);
    TORCH_CHECK(found != all_.end(), "no such memory");
    return found->second;
  }

  const c10::DeviceType device_;
  std::mutex mutex_;
  std::map<void*, std::shared_ptr<SharedFile>> all_;
  std::map<std::string, int> meetings_; // of each group so far
};

const bool registered = [] {
  for (const c10::DeviceType device : {c10::kCPU, c10::kCUDA}) {
    symm_mem::register_allocator(
        device, c10::make_intrusive<Allocator>(device));
  }
  return true;
}();

} // namespace
} // namespace fusedpg::fake
