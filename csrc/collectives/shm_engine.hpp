#pragma once

#include "collectives/context.hpp"
#include "collectives/engine.hpp"
#include "host/bootstrap.hpp"

namespace fusedpg {

// The engine of a group whose ranks share a machine: a domain, and the threads
// that work in it.
class ShmEngine : public Engine {
 public:
  // Collective over the ranks that `bootstrap` met.
  ShmEngine(GroupBase& group, Bootstrap& bootstrap, const Deadline& deadline);
  ~ShmEngine() override;

  void execute(
      const Operation& op,
      const char* title,
      uint64_t ticket,
      std::chrono::milliseconds timeout) override;
  void check_failed() override;
  std::optional<ErrorKind> failure() override;
  void monitored_barrier(
      std::chrono::milliseconds timeout,
      bool wait_all_ranks,
      const std::function<void()>& check_open) override;
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
  void begin(Way& way) override;
  void end(Way& way) override;
  void fail_group(const Error& error, const char* title, uint64_t ticket)
      override;
  std::shared_ptr<Messages> open_messages() override;

 private:
  Domain domain_;
  Pool pool_;
  SkipState skip_;
};

} // namespace fusedpg
