#pragma once

#include "base/deadline.hpp"

namespace fusedpg {

// Something that a thread has to do now and then while it waits for other ranks,
// or for a thread that does. csrc/c10d has Python's signal handlers run there.
//
// One is installed for as long as it lives, on the thread that made it; it is
// never called under a lock that look() may need.
class WaitHook {
 public:
  WaitHook();
  virtual ~WaitHook();
  WaitHook(const WaitHook&) = delete;

  // How often it is called at most; a wait sleeps no longer at a time.
  static constexpr std::chrono::milliseconds kInterval{100};

  // An exception from here ends the wait.
  virtual void look() = 0;

 private:
  friend void while_waiting();
  WaitHook* const outer_;
  Clock::time_point next_{}; // the first call only sets it
};

// To be called by every wait once it is slow; cheap beside a system call.
void while_waiting();

// Whether this thread has a hook: then its waits have to end now and then to
// call it.
bool has_wait_hook();

} // namespace fusedpg
