#pragma once

#include <optional>
#include <vector>

#include "collectives/aggregated.hpp"
#include "collectives/host_fold.hpp"
#include "collectives/net_blocks.hpp"
#include "collectives/net_moves.hpp"
#include "collectives/selector.hpp"
#include "collectives/way.hpp"

namespace fusedpg {

// Between machines: contributions go to their owners and results to everybody
// in messages (net_pipeline.hpp), with the epilogue in between. All sums are
// those of HostFold.
class HostsWay : public Way {
 public:
  // `flat`: every rank as a host of its own, if sums are to have the bits of one
  // host; moves go by the context's hosts all the same.
  explicit HostsWay(NetContext& ctx, const HostMap* flat = nullptr);

  int rank() const override {
    return ctx_.transport.rank();
  }
  int size() const override {
    return ctx_.transport.size();
  }
  OpContext& op() override {
    return ctx_;
  }
  NetContext* net() override {
    return &ctx_;
  }
  void begin_item(uint64_t index, uint64_t length) override;
  void refuse(const std::string& reason) override;
  bool joins_tensors() const override {
    return false;
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
  double density() override;
  SkipLimits skip_limits() override {
    return kNetSkipLimits;
  }
  void run(const Plan& plan, const OpDescriptor& d) override;
  void move(const Move& move, OpDescriptor& d) override;
  void count(OpCode named) override;
  AtOnce at_once(OpDescriptor& mine, const Small& small) override;
  bool takes_at_once(size_t bytes) override {
    return select_net_one_shot(bytes, size());
  }
  uint64_t shared_place(const void* data, size_t bytes) override;

 private:
  void complete(OpDescriptor& mine, size_t table_entries) const;
  // Throws where ranks disagree, on all of them; or where one has found a NaN.
  void check_all(const OpDescriptor& mine);
  // Why a rank has refused; it sends that behind its descriptor.
  std::string reason_of(int rank);
  void find_blocks(const Plan& plan, const OpDescriptor& d);

  NetContext& ctx_; // of sums
  const HostMap* const hosts_; // of moves
  Domain* const domain_;
  // Of the plan that has been entered: all ranks' blocks, or what its reduction
  // by aggregators needs.
  std::optional<NetBlocks> blocks_;
  std::optional<AggregatedBlocks> aggregated_;
  // The memory of at_once()'s sources.
  struct OneShot {
    HostFold fold;
    NetBuffer own;
    std::vector<NetPending> parts;
  };
  std::optional<OneShot> one_shot_;
  std::vector<OpDescriptor> said_;
  std::vector<NetBuffer> extra_;
};

} // namespace fusedpg
