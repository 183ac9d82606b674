#pragma once

#include <memory>
#include <mutex>

#include "c10d/routes/cpu.hpp"
#include "collectives/engine.hpp"
#include "messages/mailbox.hpp"

namespace fusedpg {

// CPU tensors where all ranks share a machine: the engine over shared memory.
class ShmRoute : public CpuRoute {
 public:
  // Collective over the ranks that `bootstrap` met.
  ShmRoute(Group& group, Bootstrap& bootstrap, const Deadline& deadline);
  ~ShmRoute() override;

  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks)
      override;

  at::Tensor empty_shared(
      at::IntArrayRef sizes,
      const at::TensorOptions& options) override;

  void describe(GroupInfo& info) override;
  std::optional<ErrorKind> failure() override;
  void check_peers(const std::string& what);
  void abort() override;
  void interrupt(const std::string& how) override;
  void shutdown() override;

 protected:
  std::shared_ptr<Arena> arena() override {
    return engine_.domain().arena();
  }
  void execute(
      const Operation& operation,
      uint64_t ticket,
      std::chrono::milliseconds timeout) override;
  std::shared_ptr<Messages> messages() override;

 private:
  Engine engine_;
  std::mutex mailbox_mutex_;
  std::shared_ptr<Mailbox> mailbox_; // made by the first message
};

} // namespace fusedpg
