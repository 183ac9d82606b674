#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "base/host_map.hpp"
#include "c10d/connect_hosts.hpp"
#include "c10d/host_failures.hpp"
#include "c10d/routes/cpu.hpp"
#include "collectives/net_exchange.hpp"
#include "host/domain.hpp"
#include "host/pool.hpp"
#include "net/net_mailbox.hpp"

namespace fusedpg {

// CPU tensors where ranks are on several machines. What reduces is ours, over
// messages, and so is what moves data, unless the transport is Gloo: then the
// delegate, torch's Gloo, does it. Messages of users are ours over UCX alone.
class HostsRoute : public CpuRoute {
 public:
  // Collective over the ranks that `bootstrap` met.
  HostsRoute(Group& group, Bootstrap& bootstrap, const Deadline& deadline);

  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks)
      override {
    delegate_->monitoredBarrier(opts, wait_all_ranks);
  }

  // There is no arena.
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return at::empty({size}, options);
  }
  bool supportsTensorAlloc(c10::DeviceIndex /* device */) override {
    return false;
  }
  at::Tensor empty(
      at::IntArrayRef sizes,
      const at::TensorOptions& options,
      bool /* lives_long */) override {
    return at::empty(sizes, options);
  }
  at::Tensor empty_shared(
      at::IntArrayRef sizes,
      const at::TensorOptions& options) override;
  bool in_arena(const at::Tensor& /* t */) override {
    return false;
  }

  void setTimeout(std::chrono::milliseconds timeout) override {
    delegate_->setTimeout(timeout);
  }
  void describe(GroupInfo& info) override;
  std::optional<ErrorKind> failure() override;
  void abort() override;
  void interrupt() override {
    abort();
  }
  void shutdown() override;

 protected:
  void execute(
      const Operation& operation,
      uint64_t ticket,
      std::chrono::milliseconds timeout) override;
  void failed(const char* title, uint64_t ticket) override;
  // hosts_p2p.cpp
  WorkPtr send_message(Tensors& tensors, int dst, int tag) override;
  WorkPtr receive_message(Tensors& tensors, int src, int tag) override;

 private:
  friend class HostsTurn;

  c10::intrusive_ptr<c10d::Backend> make_gloo(
      const char* prefix,
      const Deadline& deadline);
  // Whether all sums and moves are ours.
  bool all_ours() const {
    return group_.settings.transport != TransportChoice::kGloo;
  }
  NetMailbox* mailbox(); // null: messages are the delegate's
  // Ends the group as an operation does that fails; with what all ranks know.
  Error message_failed(const Error& error);
  void check_messages();
  // Throws when a rank of this host has failed or died, which is not so that
  // it may just have been done before this one.
  void check_neighbours(const std::string& what);
  void end_waits();
  void wake_mailbox();
  Transport& connected(const Deadline& deadline);
  // For an operation that is not delegated.
  NetContext net_context(uint64_t ticket, const Deadline& deadline);
  const HostMap hosts_;
  // Every rank as a host of its own, if sums are to have the bits of one.
  const std::optional<HostMap> flat_;
  const std::unique_ptr<Domain> domain_; // of this host's ranks, if several
  const c10::intrusive_ptr<c10d::Backend> delegate_;
  HostFailures failures_;
  std::mutex transport_mutex_;
  // Made by the first operation that needs it; connections of its own.
  Connection connection_;
  std::exception_ptr cannot_connect_;
  std::mutex name_mutex_; // which nobody holds for long
  std::string transport_name_;
  std::mutex mailbox_mutex_;
  // Of the executing thread.
  std::optional<Clock::time_point> in_doubt_since_;
  SkipState skip_;
  NetBuffers buffers_;
  Pool pool_{1};
  std::unique_ptr<NetMailbox> mailbox_; // made by the first message; ends first
};

} // namespace fusedpg
