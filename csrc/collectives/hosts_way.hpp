#pragma once

#include <vector>

#include "collectives/net_exchange.hpp"
#include "collectives/way.hpp"

namespace fusedpg {

// Between machines: contributions go to their owners and results to everybody
// in messages, with the epilogue in between. Owners get the ranks'
// contributions in rank order, or their left fold in that order, so results
// have the bits of those inside a machine.
class HostsWay : public Way {
 public:
  explicit HostsWay(NetContext& ctx) : ctx_(ctx) {}

  int rank() const override {
    return ctx_.transport.rank();
  }
  int size() const override {
    return ctx_.transport.size();
  }
  const kernels::Table& kernels() const override {
    return ctx_.kernels;
  }
  bool checks_nan() const override {
    return ctx_.nan_check;
  }
  void enter(
      const Plan* plan,
      OpDescriptor& mine,
      const std::vector<uint64_t>& extra) override;
  const OpDescriptor& said(int rank) override {
    return said_[rank];
  }
  const uint64_t* extra(int rank) override {
    return reinterpret_cast<const uint64_t*>(extra_[rank].data());
  }
  void run(const Plan& plan, const OpDescriptor& d) override;
  uint64_t shared_place(const void* data, size_t bytes) override;

 private:
  void run_batch(
      const Plan& plan,
      const std::vector<size_t>& counts,
      const std::vector<size_t>& batch);
  // The sum over all ranks of a tensor whose blocks of zeros stay at home, in
  // the wide type; this rank's shard of it.
  NetBuffer sum_skipping(const Plan& plan, size_t tensor, size_t count);

  NetContext& ctx_;
  std::vector<OpDescriptor> said_;
  std::vector<NetBuffer> extra_;
};

} // namespace fusedpg
