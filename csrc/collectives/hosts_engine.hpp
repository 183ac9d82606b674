#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/host_map.hpp"
#include "collectives/aggregated.hpp"
#include "collectives/connect_hosts.hpp"
#include "collectives/engine.hpp"
#include "collectives/host_failures.hpp"
#include "collectives/net_exchange.hpp"
#include "host/domain.hpp"
#include "host/pool.hpp"
#include "messages/net_mailbox.hpp"

namespace fusedpg {

// The engine of a group whose ranks are on several machines: everything by
// messages, but inside a host.
class HostsEngine : public Engine {
 public:
  // Collective over the ranks that `bootstrap` met. `store` is the group's alone.
  HostsEngine(
      GroupBase& group,
      Bootstrap& bootstrap,
      std::shared_ptr<Rendezvous> store,
      const Deadline& deadline);
  ~HostsEngine() override;

  void check_failed() override;
  std::optional<ErrorKind> failure() override;
  void monitored_barrier(
      std::chrono::milliseconds timeout,
      bool wait_all_ranks,
      FunctionRef<void()> check_open) override;
  Domain* host() override {
    return domain_.get();
  }
  bool spans_hosts() const override {
    return true;
  }
  void describe(GroupInfo& info) override;
  void abort() override {
    interrupt("aborted");
  }
  void interrupt(const std::string& how) override;
  void shutdown() override;

 protected:
  Way& open_way(uint64_t ticket, std::chrono::milliseconds timeout) override;
  void close_way() override;
  void begin(Way& way) override;
  void end(Way& way) override;
  void fail_group(const Error& error, const char* title, uint64_t ticket)
      override;
  std::shared_ptr<Messages> open_messages() override;

 private:
  // Ends this rank's part in the group; returns the error with what other ranks
  // know of its cause, or the one that the group has failed with before.
  Error give_up(const Error& error, const char* title, uint64_t ticket);
  // The same where a message has failed.
  Error message_failed(const Error& error);
  // Throws when a rank of this host has failed or died, which is not so that
  // it may just have been done before this one.
  void check_neighbours(const std::string& what);
  void end_waits(const std::string& how);
  Error aborted_error() const;
  void check_aborted();
  // The group has failed, or was aborted.
  void end_messages();
  void connect_aggregators(const Deadline& deadline);

  const std::shared_ptr<Rendezvous> store_;
  const HostMap hosts_;
  // Every rank as a host of its own, if sums are to have the bits of one.
  const std::optional<HostMap> flat_;
  std::unique_ptr<Domain> domain_; // of this host's ranks, if several
  HostFailures failures_;
  std::atomic<bool> aborted_{false};
  std::string how_; // it was aborted; set before that
  std::mutex transport_mutex_;
  Connection connection_; // with aggregators from the first operation on
  mutable std::mutex name_mutex_; // which nobody holds for long
  std::vector<std::string> aggregators_;
  std::atomic<uint32_t> monitored_barriers_{0}; // that have begun
  // Of the executing thread.
  std::optional<Clock::time_point> in_doubt_since_;
  SkipState skip_;
  AggregateState aggregate_;
  NetBuffers buffers_;
  Pool pool_{1};
  class CheckedWay;
  std::optional<NetContext> context_; // with the way, of the turn
  std::unique_ptr<Way> way_;
  NetMailbox* net_mailbox_ = nullptr; // is mailbox_
};

} // namespace fusedpg
