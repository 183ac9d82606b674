#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "base/host_map.hpp"
#include "c10d/connect_hosts.hpp"
#include "c10d/routes/cpu.hpp"
#include "collectives/net_exchange.hpp"
#include "host/domain.hpp"
#include "host/pool.hpp"
#include "net/net_mailbox.hpp"

namespace fusedpg {

// CPU tensors where ranks are on several machines. Reductions that skip zeros
// and the fused operations are ours, over messages; the delegate, torch's Gloo,
// does the rest.
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
  // hosts_p2p.cpp
  WorkPtr send_message(Tensors& tensors, int dst, int tag) override;
  WorkPtr receive_message(Tensors& tensors, int src, int tag) override;

 private:
  friend class HostsTurn;

  c10::intrusive_ptr<c10d::Backend> make_gloo(const char* prefix);
  // Whether sums are ours. Connects the hosts to find out.
  bool carried_by_ucx(std::chrono::milliseconds timeout);
  NetMailbox* mailbox(); // null: messages are the delegate's
  void fail_with(const Error& error);
  // Whether what only moves data is ours. Connects the hosts to find out.
  bool moves_by_ucx(std::chrono::milliseconds timeout);
  // Throws when a rank of this host has failed or died, which is not so that
  // it may just have been done before this one.
  void check_neighbours(const std::string& what);
  Transport& connected(std::chrono::milliseconds timeout);
  // For an operation that is not delegated.
  NetContext net_context(uint64_t ticket, std::chrono::milliseconds timeout);
  const HostMap hosts_;
  const std::unique_ptr<Domain> domain_; // of this host's ranks, if several
  const c10::intrusive_ptr<c10d::Backend> delegate_;
  std::mutex transport_mutex_;
  // Made by the first operation that needs it; connections of its own.
  Connection connection_;
  std::optional<Error> cannot_connect_;
  std::mutex failure_mutex_;
  std::optional<Error> message_failed_;
  std::mutex mailbox_mutex_;
  std::unique_ptr<NetMailbox> mailbox_; // made by the first message
  // Of the executing thread.
  std::optional<Clock::time_point> in_doubt_since_;
  SkipState skip_;
  Pool pool_{1};
};

} // namespace fusedpg
