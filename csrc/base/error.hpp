#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include <fmt/base.h>

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

// A value as fmt takes it: what only knows how to write itself to a stream does that.
template <typename T>
decltype(auto) printable(const T& value) {
  if constexpr (fmt::is_formattable<T>::value) {
    return (value);
  } else {
    std::ostringstream out;
    out << value;
    return out.str();
  }
}

template <typename... Args>
using Format =
    fmt::format_string<decltype(printable(std::declval<const Args&>()))...>;

std::string vformatted(fmt::string_view format, fmt::format_args args);

template <typename... Args>
std::string formatted_text(fmt::string_view format, const Args&... args) {
  return vformatted(format, fmt::make_format_args(args...));
}

// formatted("{} of {}", 1, 2) is "1 of 2". (A function called str would lose to c10's where an
// argument is of a type of c10.)
template <typename... Args>
std::string formatted(
    std::type_identity_t<Format<Args...>> format,
    const Args&... args) {
  return formatted_text(format, printable(args)...);
}

template <typename... Args>
[[noreturn]] void fail(
    ErrorKind kind,
    std::type_identity_t<Format<Args...>> format,
    const Args&... args) {
  throw Error(kind, formatted_text(format, printable(args)...));
}

// fail(kSystem) with the text of errno, and with the limit where one is
// reached.
[[noreturn]] void fail_errno(const std::string& what);

} // namespace fusedpg
