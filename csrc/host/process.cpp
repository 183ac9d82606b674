#include "host/process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "base/error.hpp"
#include "base/fork.hpp"
#include "base/options.hpp"

namespace fusedpg {
namespace {

struct Stat {
  char state = '\0';
  uint64_t start = 0;
};

// Nothing when /proc does not say.
std::optional<Stat> read_stat(pid_t pid) {
  const std::string path = formatted("/proc/{}/stat", pid);
  const Fd file =
      Fd::opened([&] { return open(path.c_str(), O_RDONLY | O_CLOEXEC); });
  char text[1024];
  const ssize_t n = file ? read(file.get(), text, sizeof text - 1) : -1;
  if (n <= 0) {
    return std::nullopt;
  }
  text[n] = '\0';
  // "pid (name) state ...": the name may hold anything, also ')'.
  const char* at = std::strrchr(text, ')');
  if (at == nullptr || at[1] != ' ') {
    return std::nullopt;
  }
  at += 2;
  Stat stat;
  stat.state = *at;
  for (int field = 3; field < 22 && at != nullptr; ++field) {
    at = std::strchr(at, ' ');
    at = at == nullptr ? nullptr : at + 1;
  }
  if (at == nullptr) {
    return std::nullopt;
  }
  stat.start = std::strtoull(at, nullptr, 10);
  return stat;
}

struct Processes {
  std::mutex mutex;
  std::map<pid_t, std::weak_ptr<const Process>> known;
};

PerProcess<Processes> processes;

// Empty where there are no pidfds.
Fd open_process(pid_t pid) {
  Fd fd = Fd::opened(
      [&] { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); });
  if (fd) {
    return fd;
  }
  switch (errno) {
    case ESRCH: // ended in this moment: /proc will say so
      return fd;
    case ENOSYS:
    case EPERM: {
      static std::once_flag once;
      std::call_once(once, [reason = errno] {
        log_line(formatted(
            "pidfd_open: {}; peers are looked for in /proc instead",
            std::strerror(reason)));
      });
      return fd;
    }
    default:
      fail_errno(formatted("fused: cannot watch the process {}", pid));
  }
}

} // namespace

uint64_t start_time(pid_t pid) {
  const auto stat = read_stat(pid);
  return stat ? stat->start : 0;
}

Process::Process(pid_t pid, Fd descriptor)
    : pid_(pid),
      descriptor_(std::move(descriptor)),
      start_(descriptor_ ? 0 : start_time(pid)) {}

std::shared_ptr<const Process> Process::watch(pid_t pid) {
  Processes& all = processes.get();
  std::lock_guard<std::mutex> lock(all.mutex);
  auto& known = all.known[pid];
  // While a process lives, nobody else has its pid.
  if (const auto shared = known.lock(); shared && !shared->ended()) {
    return shared;
  }
  if (kill(pid, 0) != 0 && errno == ESRCH) {
    return nullptr;
  }
  auto process = std::make_shared<const Process>(pid, open_process(pid));
  known = process;
  std::erase_if(all.known, [](const auto& p) { return p.second.expired(); });
  return process;
}

bool Process::ended() const {
  if (descriptor_) {
    pollfd p{descriptor_.get(), POLLIN, 0};
    return poll(&p, 1, 0) > 0;
  }
  if (const auto stat = read_stat(pid_)) {
    return stat->state == 'Z' || stat->state == 'X' ||
        (start_ != 0 && stat->start != start_);
  }
  // No such process, no /proc, or no descriptor left to read it.
  return kill(pid_, 0) != 0 && errno == ESRCH;
}

} // namespace fusedpg
