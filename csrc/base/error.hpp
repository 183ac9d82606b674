#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace fusedpg {

enum class ErrorKind {
  kInvalid, // an argument this call cannot work with
  kMismatch, // ranks disagree about the operation
  kTimeout, // a deadline passed
  kPeerDead, // a peer's process ended
  kPeerFailed, // a peer reported a failure of its own
  kAborted, // this rank called abort() or shutdown()
  kOutOfMemory, // the arena, the memory cgroup or the machine is full
  kSystem, // an unexpected answer of the operating system
};

// The only exception the engine throws. csrc/c10d turns it into torch's types.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message)
      : std::runtime_error(message),
        kind_(kind) {}

  ErrorKind kind() const {
    return kind_;
  }

 private:
  ErrorKind kind_;
};

template <typename... Args>
std::string str(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

template <typename... Args>
[[noreturn]] void fail(ErrorKind kind, const Args&... args) {
  throw Error(kind, str(args...));
}

// fail(kSystem) with the text of errno, and with the limit where one is
// reached.
[[noreturn]] void fail_errno(const std::string& what);

} // namespace fusedpg
