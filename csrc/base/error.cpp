// fmt's own code, here alone: it takes seconds to compile.
#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include "base/error.hpp"

#include <sys/resource.h>

#include <cerrno>
#include <cstring>

namespace fusedpg {

std::string vformatted(fmt::string_view format, fmt::format_args args) {
  return fmt::vformat(format, args);
}

void fail_errno(const std::string& what) {
  const int error = errno;
  if (error == EMFILE) {
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    fail(
        ErrorKind::kSystem,
        "{}: this process has as many file descriptors open as its limit "
        "allows (RLIMIT_NOFILE, {} now, at most {}); raise it with ulimit -n "
        "or destroy groups that are not needed",
        what,
        limit.rlim_cur,
        limit.rlim_max);
  }
  if (error == ENFILE) {
    fail(
        ErrorKind::kSystem,
        "{}: all processes of this machine together have as many files open as "
        "it allows (/proc/sys/fs/file-max)",
        what);
  }
  const bool memory = error == ENOMEM || error == ENOSPC;
  fail(
      memory ? ErrorKind::kOutOfMemory : ErrorKind::kSystem,
      "{}: {}",
      what,
      std::strerror(error));
}

} // namespace fusedpg
