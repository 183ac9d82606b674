#pragma once

#include <exception>
#include <string>

#include <c10/util/Exception.h>

#include "base/error.hpp"

namespace fusedpg {

// The engine's error as torch's: ValueError for arguments, OutOfMemoryError,
// DistBackendError for the rest.
[[noreturn]] inline void throw_as_torch(const Error& error) {
  switch (error.kind()) {
    case ErrorKind::kInvalid:
      C10_THROW_ERROR(ValueError, error.what());
    case ErrorKind::kOutOfMemory:
      C10_THROW_ERROR(OutOfMemoryError, error.what());
    default:
      C10_THROW_ERROR(DistBackendError, error.what());
  }
}

template <typename Fn>
decltype(auto) translate(Fn&& fn) {
  try {
    return fn();
  } catch (const Error& error) {
    throw_as_torch(error);
  }
}

// What `fn` throws, in torch's types; null when it returns.
template <typename Fn>
std::exception_ptr capture(Fn&& fn) {
  try {
    translate(fn);
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

// An exception in one line, for other ranks: without torch's backtrace.
inline std::string one_line(const std::exception& error) {
  const auto* torch = dynamic_cast<const c10::Error*>(&error);
  const std::string text =
      torch != nullptr ? torch->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

} // namespace fusedpg
