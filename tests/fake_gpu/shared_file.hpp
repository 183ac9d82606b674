#pragma once

#include <fcntl.h>
#include <sys/types.h>

#include <string>

#include "base/fd.hpp"

namespace fusedpg::fake {

// A file without a name that another process has open under this number.
inline Fd open_shared_file(pid_t owner, int number) {
  const std::string path =
      "/proc/" + std::to_string(owner) + "/fd/" + std::to_string(number);
  return Fd::opened([&] { return open(path.c_str(), O_RDWR | O_CLOEXEC); });
}

} // namespace fusedpg::fake
