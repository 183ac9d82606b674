#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/error.hpp"

namespace fusedpg {

// The failure of a group that spans hosts, and whose it was. A rank often knows only that a
// connection has ended, by whichever rank gave up before it. So ranks say through the store
// why they have failed, in that order, and who says nothing is the one that was lost.
class HostFailures {
 public:
  HostFailures(c10::intrusive_ptr<c10d::Store> store, int rank, int size);

  // Throws what the group has failed with.
  void check() const;
  std::optional<ErrorKind> kind() const;

  // To be called where an operation has thrown. Returns if the group can go on; else throws
  // what it has failed with, after `close` has ended this rank's connections, by which the
  // others hear of it.
  void handle(
      const char* title,
      uint64_t ticket,
      const std::function<void()>& close);

  // Where this rank leaves as its interpreter exits: `how`, for peers that wait
  // for it. Before its connections end.
  void say_exit(const std::string& how) noexcept;

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int size_;
  mutable std::mutex mutex_;
  std::optional<Error> failed_;
};

} // namespace fusedpg
