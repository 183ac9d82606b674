#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>
#include <utility>

namespace fusedpg {

// An owned file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() {
    reset();
  }

  int get() const {
    return fd_;
  }
  explicit operator bool() const {
    return fd_ >= 0;
  }
  void reset();

 private:
  int fd_ = -1;
};

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

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
  pid_t owner_ = 0;
};

// An anonymous, sparse file in shared memory; nothing appears in the file
// system and the kernel frees it with its last user.
Fd create_memory_file(const std::string& name, size_t size);

// Allocates the pages of a range, so that touching them later cannot raise
// SIGBUS. Throws Error(kOutOfMemory) when they do not fit the memory cgroup or
// the machine.
void commit_range(int fd, size_t offset, size_t bytes);

// Bytes that can still be committed under the process's memory cgroups and the
// machine's free memory.
size_t available_memory();

} // namespace fusedpg
