#pragma once

#include <exception>
#include <string>

#include <c10/util/Exception.h>

#include "base/error.hpp"

namespace fusedpg {

// Whose exceptions a group raises: its own, or where it serves "gloo" Gloo's.
enum class Dialect { kFused, kGloo };

// The engine's error as torch's: ValueError for arguments, OutOfMemoryError,
// DistBackendError for the rest. Gloo raises RuntimeError for arguments, and
// programs look for its words in the texts of other errors.
[[noreturn]] inline void throw_as_torch(
    const Error& error,
    Dialect dialect = Dialect::kFused) {
  const bool gloo = dialect == Dialect::kGloo;
  switch (error.kind()) {
    case ErrorKind::kInvalid:
      if (gloo) {
        C10_THROW_ERROR(Error, error.what());
      }
      C10_THROW_ERROR(ValueError, error.what());
    case ErrorKind::kOutOfMemory:
      C10_THROW_ERROR(OutOfMemoryError, error.what());
    case ErrorKind::kTimeout:
      C10_THROW_ERROR(
          DistBackendError,
          std::string(error.what()) +
              (gloo ? " (timed out after the group's timeout)" : ""));
    case ErrorKind::kPeerDead:
    case ErrorKind::kPeerFailed:
      C10_THROW_ERROR(
          DistBackendError,
          std::string(error.what()) +
              (gloo ? " (Connection closed by peer)" : ""));
    default:
      C10_THROW_ERROR(DistBackendError, error.what());
  }
}

template <typename Fn>
decltype(auto) translate(Fn&& fn, Dialect dialect = Dialect::kFused) {
  try {
    return fn();
  } catch (const Error& error) {
    throw_as_torch(error, dialect);
  }
}

// What `fn` throws, in torch's types; null when it returns.
template <typename Fn>
std::exception_ptr capture(Fn&& fn, Dialect dialect = Dialect::kFused) {
  try {
    translate(fn, dialect);
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

// The same as an error of the engine.
inline Error as_error(const std::exception& error) {
  const bool memory =
      dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr;
  const bool of_store = dynamic_cast<const c10::DistError*>(&error) != nullptr;
  const ErrorKind kind = memory ? ErrorKind::kOutOfMemory
      : of_store                ? ErrorKind::kPeerFailed
                                : ErrorKind::kSystem;
  return {kind, one_line(error)};
}

} // namespace fusedpg
