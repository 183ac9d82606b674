#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/host_map.hpp"
#include "c10d/connect_hosts.hpp"
#include "c10d/host_failures.hpp"
#include "c10d/routes/cpu.hpp"
#include "collectives/aggregated.hpp"
#include "collectives/net_exchange.hpp"
#include "host/domain.hpp"
#include "host/pool.hpp"
#include "messages/net_mailbox.hpp"

namespace fusedpg {

// CPU tensors where ranks are on several machines: everything by
// messages, but inside a host.
class HostsRoute : public CpuRoute {
 public:
  // Collective over the ranks that `bootstrap` met.
  HostsRoute(Group& group, Bootstrap& bootstrap, const Deadline& deadline);
  ~HostsRoute() override;

  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks)
      override;

  at::Tensor empty_shared(
      at::IntArrayRef sizes,
      const at::TensorOptions& options) override;

  void describe(GroupInfo& info) override;
  std::optional<ErrorKind> failure() override;
  void abort() override {
    interrupt("aborted");
  }
  void interrupt(const std::string& how) override;
  void shutdown() override;

 protected:
  std::shared_ptr<Arena> arena() override {
    return domain_ ? domain_->arena() : nullptr;
  }
  void execute(
      const Operation& operation,
      uint64_t ticket,
      std::chrono::milliseconds timeout) override;
  void failed(const char* title, uint64_t ticket) override;
  std::shared_ptr<Messages> messages() override {
    return mailbox();
  }

 private:
  // hosts_p2p.cpp
  std::shared_ptr<NetMailbox> mailbox();
  // Ends the group as an operation does that fails; with what all ranks know.
  Error message_failed(const Error& error);
  void check_messages();
  // Throws when a rank of this host has failed or died, which is not so that
  // it may just have been done before this one.
  void check_neighbours(const std::string& what);
  void end_waits(const std::string& how);
  [[noreturn]] void fail_aborted() const;
  void check_aborted();
  // The group has failed, or was aborted.
  void end_messages();
  void connect_aggregators(const Deadline& deadline);
  NetContext net_context(uint64_t ticket, const Deadline& deadline);
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
  std::mutex mailbox_mutex_;
  std::atomic<uint32_t> monitored_barriers_{0}; // that have begun
  // Of the executing thread.
  std::optional<Clock::time_point> in_doubt_since_;
  SkipState skip_;
  AggregateState aggregate_;
  NetBuffers buffers_;
  Pool pool_{1};
  std::shared_ptr<NetMailbox> mailbox_; // made by the first message; ends first
};

} // namespace fusedpg
