#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/error.hpp"
#include "base/rendezvous.hpp"
#include "collectives/engine.hpp"

namespace fusedpg {

// The failure of a group that spans hosts, and whose it was. A rank often knows only that a
// connection has ended, by whichever rank gave up before it. So ranks say through the store
// why they have failed, in that order, and who says nothing is the one that was lost.
class HostFailures {
 public:
  HostFailures(std::shared_ptr<Rendezvous> store, const GroupBase& group);

  // Throws what the group has failed with.
  void check() const;
  std::optional<ErrorKind> kind() const;

  // Remembers that the group has failed, and returns with what: with the cause, as
  // far as other ranks know it. `close` ends this rank's connections in between, by
  // which the others hear of it. Where it had failed before, what check() throws.
  Error handle(
      const Error& error,
      const char* title,
      uint64_t ticket,
      const std::function<void()>& close);

  // Where this rank leaves as its interpreter exits: `how`, for peers that wait
  // for it. Before its connections end.
  void say_exit(const std::string& how) noexcept;

 private:
  std::optional<Error> known() const;

  const std::shared_ptr<Rendezvous> store_;
  const GroupBase& group_;
  mutable std::mutex mutex_;
  std::optional<Error> failed_;
};

} // namespace fusedpg
