#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "base/while_waiting.hpp"

namespace fusedpg {

// Ends a group's waits, on whatever threads, when a signal handler has raised.
// Works share it with their group, which takes itself out at its end.
class Interrupter {
 public:
  // `interrupt` gets how: "interrupted by KeyboardInterrupt".
  void set(std::function<void(const std::string&)> interrupt);
  void interrupt(const std::string& how);

 private:
  std::mutex mutex_;
  std::function<void(const std::string&)> interrupt_;
};

// While it lives waits of this thread run Python's signal handlers, if it is the
// main thread, with torch's modes as they are when it begins. If one raises, the
// group is interrupted (without a group the wait throws Error(kAborted)), and
// raise() throws what it has raised.
//
// Taking the GIL is left to waits that last: nothing is asked for before.
class Interruptible : public WaitHook {
 public:
  explicit Interruptible(Interrupter* group);
  ~Interruptible() override;

  void look() override;
  void raise();

 private:
  struct Raised;

  Interrupter* const group_;
  const c10::impl::LocalDispatchKeySet keys_ =
      c10::impl::tls_local_dispatch_key_set();
  const bool grad_ = c10::GradMode::is_enabled();
  const bool inference_ = c10::InferenceMode::is_enabled();
  bool never_ = false; // no handler can run on this thread
  std::unique_ptr<Raised> raised_;
};

// Runs `fn` so; what a handler has raised comes before what `fn` throws.
template <typename Fn>
auto interruptible(Interrupter* group, const Fn& fn) -> decltype(fn()) {
  Interruptible scope(group);
  try {
    if constexpr (std::is_void_v<decltype(fn())>) {
      fn();
      scope.raise();
    } else {
      auto result = fn();
      scope.raise();
      return result;
    }
  } catch (...) {
    scope.raise();
    throw;
  }
}

} // namespace fusedpg
