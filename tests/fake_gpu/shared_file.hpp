#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <string>
#include <utility>

// Memory that processes share.
namespace fusedpg::fake {

// A file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept
      : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() {
    if (valid()) {
      close(number_);
    }
  }

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
inline Descriptor make_shared_file(size_t bytes) {
  Descriptor file(memfd_create("fusedpg_fake", MFD_CLOEXEC));
  if (file.valid() &&
      ftruncate(file.number(), static_cast<off_t>(bytes)) != 0) {
    return Descriptor();
  }
  return file;
}

inline Descriptor open_shared_file(pid_t owner, int number) {
  const std::string path =
      "/proc/" + std::to_string(owner) + "/fd/" + std::to_string(number);
  return Descriptor(open(path.c_str(), O_RDWR | O_CLOEXEC));
}

// A mapping of a file that all its users see.
class Mapping {
 public:
  // data() is null on failure.
  Mapping(const Descriptor& file, size_t bytes) : bytes_(bytes) {
    void* data = mmap(
        nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.number(), 0);
    data_ = data == MAP_FAILED ? nullptr : static_cast<char*>(data);
  }
  Mapping(const Mapping&) = delete;
  ~Mapping() {
    if (data_ != nullptr) {
      munmap(data_, bytes_);
    }
  }

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

} // namespace fusedpg::fake
