#include "base/topology.hpp"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/error.hpp"

namespace fusedpg {
namespace {

std::string link_target(const char* path) {
  char buffer[256];
  const ssize_t n = readlink(path, buffer, sizeof buffer);
  return n > 0 ? std::string(buffer, static_cast<size_t>(n)) : std::string();
}

// Empty where there is none. Ranks of one machine must not get different
// answers because one of them is short of descriptors.
std::string boot_id() {
  const int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    if (errno == EMFILE || errno == ENFILE) {
      fail_errno("fused: cannot tell this machine from others");
    }
    return {};
  }
  char text[64];
  const ssize_t n = read(fd, text, sizeof text);
  close(fd);
  std::string id(text, static_cast<size_t>(std::max<ssize_t>(n, 0)));
  return id.substr(0, id.find('\n'));
}

} // namespace

std::string host_identity(const std::string& override_id) {
  if (!override_id.empty()) {
    return override_id;
  }
  std::string machine = boot_id();
  if (machine.empty()) {
    machine = host_name();
  }
  // Abstract sockets are per network namespace, pids per pid namespace, and
  // credentials are compared within one user namespace.
  return machine + "/" + link_target("/proc/self/ns/net") + "/" +
      link_target("/proc/self/ns/pid") + "/" +
      link_target("/proc/self/ns/user");
}

std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

std::string cpu_mask() {
  cpu_set_t set;
  std::string mask;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    for (int i = 0; i < CPU_SETSIZE; ++i) {
      mask += CPU_ISSET(i, &set) ? '1' : '0';
    }
    mask.resize(mask.find_last_of('1') + 1);
  } else { // more CPUs than the set holds
    mask.assign(std::max(sysconf(_SC_NPROCESSORS_ONLN), 1L), '1');
  }
  return mask;
}

int available_cpus() {
  const std::string mask = cpu_mask();
  return static_cast<int>(std::count(mask.begin(), mask.end(), '1'));
}

} // namespace fusedpg
