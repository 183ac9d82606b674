#pragma once

#include <mutex>
#include <optional>
#include <string>

#include "collectives/net_blocks.hpp"
#include "collectives/selector.hpp"

// Reductions by a group's aggregators: see aggregate/protocol.hpp.
namespace fusedpg {

// What a group chooses by. Of the thread that executes operations, but for
// choice().
struct AggregateState {
  AggregateState(
      Aggregate mode,
      std::optional<AggregateRates> rates,
      size_t message_bytes)
      : mode(mode),
        message_bytes(message_bytes),
        rates(rates) {}

  const Aggregate mode;
  const size_t message_bytes; // of blocks; 0: chosen
  std::optional<AggregateRates> rates; // none: not measured yet
  // Blocks that any rank had, of the sum of what each had, in the last reduction
  // that skipped zeros.
  double overlap = 1;

  // The latest choice, in words; empty: there was none. From any thread.
  std::string choice() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return choice_;
  }
  void set_choice(std::string choice) {
    const std::lock_guard<std::mutex> lock(mutex_);
    choice_ = std::move(choice);
  }

 private:
  mutable std::mutex mutex_;
  std::string choice_;
};

// Whether the group has some, and a plan is one that they can carry out.
bool may_aggregate(const NetContext& ctx, const Plan& plan);

// Collective: whether a plan for which may_aggregate() goes by them, all of
// whose blocks travel. The first one that is large measures the links.
bool choose_aggregators(NetContext& ctx, const Plan& plan);

// All of a plan's tensors.
void aggregate_dense(NetContext& ctx, const Plan& plan);

// The blocks of a plan that skips what nobody has, of one operation.
class AggregatedBlocks {
 public:
  // Collective: agrees on the length of messages.
  AggregatedBlocks(NetContext& ctx, const Plan& plan, OwnBlocks own);

  // Collective: whether they go by aggregators; if not they are shared among
  // the ranks, of which learn() hears.
  bool chosen(NetContext& ctx, const Plan& plan) const;
  const OwnBlocks& own() const {
    return own_;
  }
  void learn(NetContext& ctx, size_t any) const;

  void run(NetContext& ctx, const Plan& plan);
  // The share of blocks that any rank has; before run(), as if no two ranks had
  // the same ones.
  double density() const {
    return density_;
  }

 private:
  const OwnBlocks own_;
  const size_t blocks_; // of the tensors
  size_t mine_ = 0; // present ones of this rank
  size_t present_ = 0; // all ranks' blocks, added up
  double density_ = 1;
};

} // namespace fusedpg
