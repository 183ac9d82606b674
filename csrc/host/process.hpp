#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>

#include "host/memory.hpp"

namespace fusedpg {

// A process of a peer, to see when it ends. A zombie has ended. All groups of
// this process share one object, and so one descriptor, for each peer.
class Process {
 public:
  // Null when there is no such process. Throws Error when it cannot be watched.
  static std::shared_ptr<const Process> watch(pid_t pid);

  // With an empty `descriptor` (no pidfds before Linux 5.3, or forbidden) it
  // asks /proc.
  Process(pid_t pid, Fd descriptor);

  bool ended() const;

 private:
  const pid_t pid_;
  const Fd descriptor_;
  const uint64_t start_; // 0: not known
};

// When a process started, in clock ticks since boot: with the pid, it names one
// process. 0 when /proc does not say.
uint64_t start_time(pid_t pid);

} // namespace fusedpg
