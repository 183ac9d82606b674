#pragma once

#include "collectives/engine.hpp"
#include "collectives/way.hpp"
#include "host/bootstrap.hpp"

namespace fusedpg {

// The engine of a group whose ranks share a machine: a domain, and the threads
// that work in it.
class ShmEngine : public Engine {
 public:
  // Collective over the ranks that `bootstrap` met.
  ShmEngine(GroupBase& group, Bootstrap& bootstrap, const Deadline& deadline);
  ~ShmEngine() override;

  void check_failed() override;
  std::optional<ErrorKind> failure() override;
  void monitored_barrier(
      std::chrono::milliseconds timeout,
      bool wait_all_ranks,
      FunctionRef<void()> check_open) override;
  Domain* host() override {
    return &domain_;
  }
  bool spans_hosts() const override {
    return false;
  }
  void check_peers(const std::string& what) override;
  void describe(GroupInfo& info) override;
  void abort() override;
  void interrupt(const std::string& how) override;
  void shutdown() override;

  Domain& domain() {
    return domain_;
  }

 protected:
  Way& open_way(uint64_t ticket, std::chrono::milliseconds timeout) override;
  void close_way() override;
  void begin(Way& way) override;
  void end(Way& way) override;
  void fail_group(const Error& error, const char* title, uint64_t ticket)
      override;
  std::shared_ptr<Messages> open_messages() override;

 private:
  Domain domain_;
  Pool pool_;
  SkipState skip_;
  // The context and the way belong to the turn that is executed.
  std::optional<Context> context_;
  std::optional<ShmWay> way_;
};

} // namespace fusedpg
