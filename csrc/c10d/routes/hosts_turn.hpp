#pragma once

#include "c10d/routes/hosts.hpp"

namespace fusedpg {

class Way;

// One operation between hosts: what reduces is in hosts_reductions.cpp, what
// only moves in hosts_moves.cpp.
class HostsTurn : public Turn {
 public:
  HostsTurn(HostsRoute& route, uint64_t ticket, const Deadline& deadline)
      : route_(route),
        ticket_(ticket),
        deadline_(deadline) {}

  void all_reduce(const std::vector<Flat>& tensors, const Reduction& reduction)
      override;

  void reduce(const Flat& tensor, const Reduction& reduction, int root)
      override;

  void reduce_scatter(
      const Flat& output,
      const Parts& inputs,
      const Reduction& reduction) override;

  void broadcast(const Flat& tensor, int root) override;

  void all_gather(const Parts& outputs, const Flat& input) override;

  void gather(const std::vector<Flat>& outputs, const Flat& input, int root)
      override;

  void scatter(const Flat& output, const std::vector<Flat>& inputs, int root)
      override;

  void all_to_all(const Parts& outputs, const Parts& inputs) override;

  void barrier() override;

  void begin_item(uint64_t index, uint64_t length) override {
    list_index_ = index;
    list_length_ = length;
    entered_ = false;
  }
  // Tells the peers when this rank has thrown before it entered.
  void refuse(const std::string& reason);

  void fused_step(const StepCall& call) override;

  void reduce_shards(const ShardsCall& call) override;

  bool fused_program(const ProgramCall& call) override;

  void sparse_all_reduce(
      const Flat& tensor,
      const kernels::ReduceArgs& args,
      const SkipOptions& options) override;

  at::Tensor coo_all_reduce(const at::Tensor& mine, bool mean) override;

 private:
  template <typename Move>
  void run(const Move& move);

  NetContext context() {
    NetContext ctx = route_.net_context(ticket_, deadline_);
    ctx.entered = &entered_;
    ctx.list_index = list_index_;
    ctx.list_length = list_length_;
    return ctx;
  }

  // The context of what adds.
  NetContext sums();

  HostsRoute& route_;
  const uint64_t ticket_;
  const Deadline deadline_;
  uint64_t list_index_ = 0;
  uint64_t list_length_ = 1;
  bool entered_ = false;
};

} // namespace fusedpg
