#include "host/memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>

#include "base/error.hpp"

namespace fusedpg {
namespace {

constexpr size_t kUnlimited = std::numeric_limits<size_t>::max();

// A file holding one number, or "max".
size_t read_number(const std::string& path) {
  std::ifstream in(path);
  size_t value = 0;
  return in >> value ? value : kUnlimited;
}

// The sum of the named fields of a file of "name value" lines.
size_t read_fields(
    const std::string& path,
    std::initializer_list<const char*> names) {
  std::ifstream in(path);
  std::string name;
  size_t total = 0;
  std::string rest;
  size_t value = 0;
  while (in >> name >> value) {
    for (const char* wanted : names) {
      total += name == wanted ? value : 0;
    }
    std::getline(in, rest);
  }
  return total;
}

size_t room(size_t limit, size_t used, size_t reclaimable) {
  if (limit == kUnlimited || used == kUnlimited) {
    return kUnlimited;
  }
  used -= std::min(used, reclaimable);
  return limit > used ? limit - used : 0;
}

// Page cache counts as used but gives way; shared memory does not.
size_t cgroup_room(std::string path, bool unified) {
  const std::string root = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
  size_t least = kUnlimited;
  while (true) {
    const std::string dir = root + path;
    const size_t cache =
        read_fields(dir + "/memory.stat", {"active_file", "inactive_file"});
    least = std::min(
        least,
        unified ? room(
                      read_number(dir + "/memory.max"),
                      read_number(dir + "/memory.current"),
                      cache)
                : room(
                      read_number(dir + "/memory.limit_in_bytes"),
                      read_number(dir + "/memory.usage_in_bytes"),
                      cache));
    const size_t slash = path.rfind('/');
    if (path.empty() || slash == std::string::npos) {
      return least;
    }
    path.resize(slash);
  }
}

} // namespace

void Fd::reset() {
  if (fd_ >= 0) {
    ::close(fd_);
    fd_ = -1;
  }
}

Mapping::Mapping(int fd, size_t size) : size_(size), owner_(getpid()) {
  void* p = mmap(
      nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (p == MAP_FAILED) {
    fail_errno(
        str("fused: cannot map ",
            size >> 20,
            " MiB of shared memory; a smaller FUSEDPG_ARENA_BYTES needs less "
            "address space"));
  }
  data_ = static_cast<char*>(p);
  madvise(p, size, MADV_DONTFORK);
  madvise(p, size, MADV_HUGEPAGE); // a hint; ignored where shmem has none
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(other.size_),
      owner_(other.owner_) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(owner_, other.owner_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr && owner_ == getpid()) {
    munmap(data_, size_);
  }
}

Fd create_memory_file(const std::string& name, size_t size) {
  Fd fd(memfd_create(name.c_str(), MFD_CLOEXEC));
  if (!fd) {
    fail_errno("fused: memfd_create");
  }
  if (ftruncate(fd.get(), static_cast<off_t>(size)) != 0) {
    fail_errno(
        str("fused: cannot reserve ",
            size >> 20,
            " MiB for the arena (ulimit -f applies to it)"));
  }
  return fd;
}

void commit_range(int fd, size_t offset, size_t bytes) {
  // Checked first: where the cgroup is full, fallocate may wake the OOM killer
  // instead of failing.
  const size_t available = available_memory();
  if (bytes > available) {
    fail(
        ErrorKind::kOutOfMemory,
        "fused: the arena needs ",
        bytes >> 20,
        " MiB more shared memory, but only ",
        available >> 20,
        " MiB are free under the memory limit of this process; raise the limit "
        "or use smaller buckets");
  }
  if (fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) !=
      0) {
    fail_errno(
        str("fused: cannot allocate ", bytes >> 20, " MiB of shared memory"));
  }
}

size_t available_memory() {
  size_t least = kUnlimited;
  const size_t kib = read_fields("/proc/meminfo", {"MemAvailable:"});
  if (kib != 0) {
    least = kib << 10;
  }
  std::ifstream in("/proc/self/cgroup");
  std::string line;
  while (std::getline(in, line)) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) {
      continue;
    }
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    if (path == "/") {
      path.clear();
    }
    if (controllers.empty()) {
      least = std::min(least, cgroup_room(path, true));
    } else if (controllers.find("memory") != std::string::npos) {
      least = std::min(least, cgroup_room(path, false));
    }
  }
  return least;
}

} // namespace fusedpg
