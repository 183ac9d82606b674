#include "host/memory.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>
#include <random>
#include <thread>

#include "base/deadline.hpp"
#include "base/error.hpp"

namespace fusedpg {
namespace {

constexpr size_t kUnlimited = std::numeric_limits<size_t>::max();
#ifndef MADV_POPULATE_WRITE
constexpr int MADV_POPULATE_WRITE = 23;
#endif

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

Mapping::Mapping(int fd, size_t size) : size_(size) {
  void* p = mmap(
      nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (p == MAP_FAILED) {
    fail_errno(formatted(
        "fused: cannot map {} MiB of shared memory; raise the limit of address "
        "space (ulimit -v), or have fewer groups",
        size >> 20));
  }
  data_ = static_cast<char*>(p);
  madvise(p, size, MADV_DONTFORK);
  madvise(p, size, MADV_HUGEPAGE); // a hint; ignored where shmem has none
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(other.size_),
      origin_(other.origin_) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(origin_, other.origin_);
  return *this;
}

Mapping::~Mapping() {
  if (data_ != nullptr && !origin_.forked()) {
    munmap(data_, size_);
  }
}

// Two steps, because a refused mmap(MAP_FIXED) leaves a hole on older kernels.
// (Nor does TSan take mremap for a write to the range.)
//
// No write to the old pages is lost. mremap keeps faults out until the new
// pages stand, and returns after every core has forgotten the old ones: a store
// by another thread either reached the file before that, and is seen through
// the new view, or faults and goes to a private copy. So do the kernel's own
// writes for a system call (read(2) into a tensor), but not transfers that have
// pinned the old pages before (O_DIRECT): those may go to the file only.
bool Mapping::replace(size_t offset, size_t end, int fd) {
  if (offset >= end || origin_.forked()) {
    return !origin_.forked();
  }
  const size_t bytes = end - offset;
  const int flags = MAP_PRIVATE | MAP_NORESERVE | (fd < 0 ? MAP_ANONYMOUS : 0);
  void* fresh = mmap(
      nullptr,
      bytes,
      PROT_READ | PROT_WRITE,
      flags,
      fd,
      fd < 0 ? 0 : static_cast<off_t>(offset));
  if (fresh == MAP_FAILED) {
    return false;
  }
  madvise(fresh, bytes, MADV_DONTFORK);
  if (mremap(
          fresh, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, data_ + offset) ==
      MAP_FAILED) {
    munmap(fresh, bytes);
    return false;
  }
  return true;
}

void Mapping::shrink(size_t size) {
  if (size < size_ && !origin_.forked()) {
    munmap(data_ + size, size_ - size);
    size_ = size;
  }
}

MemoryLimits memory_limits() {
  const auto limit = [](auto resource) {
    rlimit found{};
    return getrlimit(resource, &found) != 0 || found.rlim_cur == RLIM_INFINITY
        ? kUnlimited
        : static_cast<size_t>(found.rlim_cur);
  };
  MemoryLimits limits{limit(RLIMIT_FSIZE), limit(RLIMIT_AS)};
  if (limits.address_space != kUnlimited) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t used = read_number("/proc/self/statm") * page;
    limits.address_space -= std::min(used, limits.address_space);
  }
  return limits;
}

namespace {

// Advice for systems that lack a call: under a seccomp profile, an old kernel
// or an emulated one.
std::string advice() {
  const bool missing = errno == ENOSYS || errno == EPERM || errno == EOPNOTSUPP;
  return missing
      ? " (this kernel, or a seccomp profile, does not allow it: allow it, or "
        "give each rank a FUSEDPG_HOST_ID of its own, and ranks send messages "
        "instead of sharing memory)"
      : "";
}

} // namespace

Fd create_memory_file(const std::string& name, size_t size) {
  Fd fd = Fd::opened([&] { return memfd_create(name.c_str(), MFD_CLOEXEC); });
  if (!fd) {
    fail_errno("fused: memfd_create" + advice());
  }
  if (ftruncate(fd.get(), static_cast<off_t>(size)) != 0) {
    fail_errno(
        formatted("fused: cannot reserve {} MiB for the arena", size >> 20));
  }
  return fd;
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

bool own_pages(char* at, size_t bytes) {
  while (madvise(at, bytes, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINVAL) {
      touch_pages(at, bytes);
      return true;
    }
    if (errno != EINTR && errno != EAGAIN) {
      return false;
    }
  }
  return true;
}

#if defined(__SANITIZE_THREAD__)
__attribute__((no_sanitize("thread")))
#endif
void touch_pages(char* at, size_t bytes) {
  // Compilers make a mere load of "or with 0"; this they leave alone.
  for (size_t i = 0; i < bytes; i += kPage) {
    char value = __atomic_load_n(at + i, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(
        at + i, &value, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }
}

namespace {

constexpr off_t kEndless = std::numeric_limits<off_t>::max();

struct flock whole_range(short type, off_t begin) {
  struct flock range{};
  range.l_type = type;
  range.l_whence = SEEK_SET;
  range.l_start = begin;
  return range;
}

off_t random_place() {
  std::random_device random;
  const uint64_t drawn = uint64_t(random()) << 32 | random();
  return static_cast<off_t>(drawn >> 3 | uint64_t(1) << 60);
}

// Bytes that others hold in a range. The kernel names one of them, and not
// always the first; `last` becomes the end of the last one.
size_t held_bytes(int file, off_t begin, off_t end, off_t& last) {
  if (begin >= end) {
    return 0;
  }
  // In the way of every lock.
  struct flock range = whole_range(F_WRLCK, begin);
  range.l_len = end == kEndless ? 0 : end - begin;
  if (fcntl(file, F_OFD_GETLK, &range) != 0 || range.l_type == F_UNLCK ||
      range.l_len <= 0) {
    return 0;
  }
  const off_t from = range.l_start;
  const off_t to = from + range.l_len;
  last = std::max(last, to);
  return static_cast<size_t>(to - from) + held_bytes(file, begin, from, last) +
      held_bytes(file, to, end, last);
}

} // namespace

// A room is a range of bytes locked in /proc/meminfo, as long as the room: the
// kernel keeps such locks for all processes that have the file open, tells them
// apart, and drops them with their holder. The mutex under which rooms are
// counted and taken is a flock, which does not see those locks.
Room::Room(
    size_t bytes,
    const std::function<size_t()>& available,
    std::chrono::milliseconds patience)
    : file_(Fd::opened([] {
        return ::open("/proc/meminfo", O_RDONLY | O_CLOEXEC);
      })) {
  constexpr auto kPause = std::chrono::milliseconds(1);
  const Deadline deadline(patience);
  size_t held = 0; // by others
  size_t free = 0;
  while (true) {
    bool turn = false;
    while (file_ && !(turn = flock(file_.get(), LOCK_EX | LOCK_NB) == 0) &&
           errno == EWOULDBLOCK && !deadline.expired()) {
      std::this_thread::sleep_for(kPause);
    }
    off_t end = 0;
    // Without a turn (somebody was stopped in the middle of his) another may
    // look at the same time; what is held already counts all the same.
    held = file_ ? held_bytes(file_.get(), 0, kEndless, end) : 0;
    free = available();
    const bool fits = free >= held && bytes <= free - held;
    if (fits && file_ && bytes != 0) {
      // Rooms must not overlap. A process that has no turn draws a random
      // place.
      struct flock range = whole_range(F_RDLCK, turn ? end : random_place());
      range.l_len = static_cast<off_t>(bytes);
      fcntl(file_.get(), F_OFD_SETLK, &range);
    }
    if (turn) {
      flock(file_.get(), LOCK_UN);
    }
    if (fits) {
      return;
    }
    if (held == 0 || bytes > free || deadline.expired()) {
      break;
    }
    std::this_thread::sleep_for(kPause);
  }
  fail(
      ErrorKind::kOutOfMemory,
      "fused: the arena needs {} MiB more shared memory, but only {} MiB are "
      "free under the memory limit of this process{}; raise the limit or use "
      "smaller buckets",
      bytes >> 20,
      free >> 20,
      held != 0
          ? formatted(", of which other ranks are taking {} MiB", held >> 20)
          : std::string());
}

Room::~Room() {
  if (file_) {
    // A child forked meanwhile has the descriptor as well.
    struct flock range = whole_range(F_UNLCK, 0);
    fcntl(file_.get(), F_OFD_SETLK, &range);
  }
}

void commit_range(
    int fd,
    size_t offset,
    size_t bytes,
    const std::function<size_t()>& available) {
  // In a full cgroup, fallocate wakes the OOM killer instead of failing. A few
  // pages, as of any small allocation, are not worth the look.
  constexpr size_t kFew = size_t(16) << 10;
  std::optional<Room> room;
  if (bytes > kFew) {
    room.emplace(bytes, available);
  }
  if (fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) !=
      0) {
    if (errno == ENOSPC || errno == ENOMEM) {
      fail(
          ErrorKind::kOutOfMemory,
          "fused: the system has not {} KiB more of shared memory: {}; free "
          "memory, or use smaller tensors in the arena",
          bytes >> 10,
          std::strerror(errno));
    }
    fail_errno(formatted(
        "fused: cannot allocate {} KiB of shared memory by fallocate{}",
        bytes >> 10,
        advice()));
  }
}

} // namespace fusedpg
