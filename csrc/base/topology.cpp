#include "base/topology.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

namespace fusedpg {
namespace {

std::string link_target(const char* path) {
  char buffer[256];
  const ssize_t n = readlink(path, buffer, sizeof buffer);
  return n > 0 ? std::string(buffer, static_cast<size_t>(n)) : std::string();
}

} // namespace

std::string host_identity(const std::string& override_id) {
  if (!override_id.empty()) {
    return override_id;
  }
  std::string boot_id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot_id;
  if (boot_id.empty()) {
    char name[256] = {};
    gethostname(name, sizeof name - 1);
    boot_id = name;
  }
  // Abstract sockets are per network namespace, pids per pid namespace, and
  // credentials are compared within one user namespace.
  return boot_id + "/" + link_target("/proc/self/ns/net") + "/" +
      link_target("/proc/self/ns/pid") + "/" +
      link_target("/proc/self/ns/user");
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
