#include "base/error.hpp"

#include <cerrno>
#include <cstring>

namespace fusedpg {

void fail_errno(const std::string& what) {
  const int error = errno;
  const bool memory = error == ENOMEM || error == ENOSPC;
  fail(
      memory ? ErrorKind::kOutOfMemory : ErrorKind::kSystem,
      what,
      ": ",
      std::strerror(error));
}

} // namespace fusedpg
