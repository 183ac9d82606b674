#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <utility>

#include "base/fd.hpp"
#include "base/fork.hpp"

namespace fusedpg {

inline constexpr size_t kPage = 4096; // or a divisor of it

// An owned shared mapping of a memfd. A forked child does not inherit it
// (MADV_DONTFORK), and its destructor does nothing there.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, size_t size);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  ~Mapping();

  char* data() const {
    return data_;
  }
  size_t size() const {
    return size_;
  }
  // Replaces [offset, end) by a copy-on-write view of the same file, or by
  // zeros where fd is -1. From then on no thread of this process writes to the
  // file through it; what another thread writes meanwhile is kept by the former
  // and lost with the latter. False, and nothing has changed, where the system
  // refuses.
  bool replace(size_t offset, size_t end, int fd);
  // Unmaps what is beyond `size`.
  void shrink(size_t size);

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
  Origin origin_{};
};

// Room that this process's limits leave for shared files and their mappings.
struct MemoryLimits {
  size_t file; // bytes of one file (ulimit -f)
  size_t address_space; // bytes of all mappings together (ulimit -v)
};
MemoryLimits memory_limits();

// An anonymous, sparse file in shared memory; nothing appears in the file
// system and the kernel frees it with its last user.
Fd create_memory_file(const std::string& name, size_t size);

// Gives each page of a copy-on-write view its own copy, after which no other
// process changes it. Loses no write of other threads: the kernel copies a page
// while none of them can write to it. False when memory is short.
bool own_pages(char* at, size_t bytes);
// The same by writing; what own_pages does before Linux 5.14.
void touch_pages(char* at, size_t bytes);

// Bytes that can still be committed under the process's memory cgroups and the
// machine's free memory.
size_t available_memory();

// Holds room for memory that is about to be taken. Processes that look at once
// at the memory that is free would all find enough, take it together, and be
// killed at the limit. So the rooms that are held count as taken, in all
// processes that see this one's /proc.
class Room {
 public:
  // Throws Error(kOutOfMemory) when there is none. A process that holds some
  // may have taken its memory already, so that it counts twice: waits for that
  // to end, for at most `patience`.
  explicit Room(
      size_t bytes,
      const std::function<size_t()>& available = available_memory,
      std::chrono::milliseconds patience = std::chrono::seconds(10));
  Room(const Room&) = delete;
  ~Room();

 private:
  Fd file_;
};

// Allocates the pages of a range, so that touching them later cannot raise
// SIGBUS. Throws Error(kOutOfMemory) when they do not fit the memory cgroup or
// the machine.
void commit_range(
    int fd,
    size_t offset,
    size_t bytes,
    const std::function<size_t()>& available = available_memory);

} // namespace fusedpg
