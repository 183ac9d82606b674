#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

#include "global.hpp"
#include "hooks.hpp"

namespace fusedpg::fake {

// A file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(other.number_) {
    other.number_ = -1;
  }
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();

  int number() const {
    return number_;
  }
  bool valid() const {
    return number_ >= 0;
  }

 private:
  int number_;
};

// Memory without a name that other processes reach through this process's
// descriptor: it ends with the last process that uses it.
Descriptor make_shared_file(size_t bytes);
Descriptor open_shared_file(pid_t owner, int number);

// A mapping of a file that all its users see.
class Mapping {
 public:
  Mapping(const Descriptor& file, size_t bytes); // data() is null on failure
  Mapping(const Mapping&) = delete;
  ~Mapping();

  char* data() const {
    return data_;
  }
  size_t bytes() const {
    return bytes_;
  }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

// Memory of ncclMemAlloc.
struct SharedMemory {
  Descriptor file;
  Mapping mapping;

  explicit SharedMemory(size_t bytes)
      : file(make_shared_file(bytes)),
        mapping(file, bytes) {}
};

// All memory that the process took from CUDA and NCCL.
class Memory {
 public:
  int allocate(void** memory, size_t bytes);
  int release(void* memory);
  int host_allocate(void** memory, size_t bytes);
  int host_release(void* memory);
  bool share(void** memory, size_t bytes);
  bool unshare(void* memory);
  // The allocation that holds [memory, memory + bytes), or null.
  std::shared_ptr<SharedMemory> shared_holding(
      const void* memory,
      size_t bytes);

  void fill(Stats& stats);

 private:
  struct Deleter {
    void operator()(void* memory) const;
  };
  struct Block {
    std::unique_ptr<void, Deleter> memory;
    size_t bytes = 0;
  };
  static Block make(size_t bytes);
  static bool fits(const std::map<void*, Block>& blocks, size_t bytes);
  void inspect(const Block& freed);

  std::mutex mutex_;
  std::map<void*, Block> device_;
  std::map<void*, Block> host_;
  std::map<void*, std::shared_ptr<SharedMemory>> shared_;
  std::deque<std::shared_ptr<SharedMemory>> unshared_;
  // Released memory is kept for a while, to see whether somebody writes to it.
  std::deque<Block> freed_;
  size_t freed_bytes_ = 0;
};

inline Memory& memory() {
  return global<Memory>();
}

} // namespace fusedpg::fake
