#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/options.hpp"
#include "collectives/context.hpp"
#include "host/executor.hpp"

namespace fusedpg {

// The kernel table that the settings name, or the best. Throws Error(kInvalid).
const kernels::Table& select_kernels(const Settings& settings);

// The native engine of one group whose ranks share a machine: a domain, the
// threads that work in it, and the rule for what happens when an operation
// fails. Thread-safe.
class Engine {
 public:
  // Collective over the ranks that `bootstrap` met.
  Engine(
      int rank,
      Bootstrap& bootstrap,
      const Settings& settings,
      Stats& stats, // lives as long
      const Deadline& deadline);

  using Operation = std::function<void(Context&)>;

  // How peers are told of an exception that is not this engine's. Before the
  // first operation.
  using Describe = std::function<std::string(const std::exception&)>;
  void set_describe(Describe describe) {
    describe_ = std::move(describe);
  }

  // Runs `op` on this thread. Called from inside the executor, which gives the
  // sequence number. Throws what it throws; the group has then failed unless it
  // is an Error of kind kInvalid or kMismatch, or came before `op` entered:
  // then peers have raised, too, and all ranks are in step.
  void execute(
      const Operation& op,
      uint64_t sequence,
      std::chrono::milliseconds timeout);

  // Stops whatever runs and makes every later operation throw.
  void abort(Executor& executor);

  // Throws the failure of the group, if it has failed.
  void check_failed();

  Domain& domain() {
    return domain_;
  }
  int threads() const {
    return pool_.threads();
  }

 private:
  const kernels::Table& kernels_;
  Domain domain_;
  Pool pool_;
  const bool nan_check_;
  SkipState skip_;
  Stats& stats_;
  Describe describe_ = [](const std::exception& error) {
    return std::string(error.what());
  };
};

} // namespace fusedpg
