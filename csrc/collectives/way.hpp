#pragma once

#include <optional>
#include <vector>

#include "collectives/block_map.hpp"
#include "collectives/context.hpp"
#include "collectives/selector.hpp"
#include "collectives/two_shot.hpp"

namespace fusedpg {

struct Move;
struct NetContext;

// How the ranks of a group do an operation that is written once for all of
// them: agree on it, and carry out its plan. One object for what is done in one
// turn of the group's queue.
class Way {
 public:
  virtual ~Way() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual OpContext& op() = 0;
  const kernels::Table& kernels() {
    return op().kernels;
  }

  // Before each of several operations of one turn, and before what this rank does
  // for it alone: until it has entered, it can refuse, and stays in step.
  virtual void begin_item(uint64_t index, uint64_t length) = 0;
  // Enters in place of an operation that this rank cannot execute, so that its
  // peers, which wait for it, raise with this reason and stay in step.
  virtual void refuse(const std::string& reason) = 0;
  // True if one operation can reduce several tensors.
  virtual bool joins_tensors() const = 0;
  // The context that sends messages; nullptr in shared memory.
  virtual NetContext* net() {
    return nullptr;
  }

  // Every operation begins here: tells all ranks what this one is about to do,
  // and throws Error(kMismatch) on every rank where two disagree. `extra` has
  // the same length everywhere. `plan` is what run() is called with, if it is.
  virtual void enter(
      const Plan* plan,
      OpDescriptor& mine,
      const std::vector<uint64_t>& extra) = 0;
  // What they said, until run() or the next enter().
  virtual const OpDescriptor& said(int rank) = 0;
  virtual const uint64_t* extra(int rank) = 0;
  // Of the entered plan, which skips because zeros stay: the share of blocks
  // that any rank has, and from which share on skipping is worth nothing.
  virtual double density() = 0;
  virtual SkipLimits skip_limits() = 0;

  // Of the plan that has been entered; it may have been told not to skip after
  // all. `d` names the operation in errors.
  virtual void run(const Plan& plan, const OpDescriptor& d) = 0;
  // An operation that only moves data, from agreeing on it to its end. Throws
  // Error(kMismatch) on all ranks when one offers a size that another does not
  // expect.
  virtual void move(const Move& move, OpDescriptor& d) = 0;
  // Adds what this way has moved so far to the group's statistics.
  virtual void count(OpCode named) = 0;

  // A small reduction of one tensor may be done otherwise, and at once: every
  // rank combines all ranks' inputs.
  struct Small {
    kernels::ReduceArgs args;
    Span input;
    // The elements that this rank combines.
    size_t begin;
    size_t count;
  };
  struct AtOnce {
    bool entered = false; // run() is to do it where there are no sources
    // This rank combines them before it enters anything else.
    std::optional<Sources> sources{};
  };
  virtual AtOnce at_once(OpDescriptor& mine, const Small& small) = 0;
  // Of an input that is ordinary memory.
  virtual bool takes_at_once(size_t bytes) = 0;

  // Which memory that all ranks see this is; the same on all ranks. Throws
  // Error(kInvalid) where it is none.
  virtual uint64_t shared_place(const void* data, size_t bytes) = 0;
};

// Whether `bits` are set in the flags of any rank, after enter().
bool any_rank(Way& way, uint64_t bits);

// In shared memory.
class ShmWay : public Way {
 public:
  explicit ShmWay(Context& ctx) : ctx_(ctx) {}

  int rank() const override {
    return ctx_.rank();
  }
  int size() const override {
    return ctx_.size();
  }
  OpContext& op() override {
    return ctx_;
  }
  void begin_item(uint64_t index, uint64_t length) override;
  void refuse(const std::string& reason) override;
  bool joins_tensors() const override {
    return true;
  }
  void enter(
      const Plan* plan,
      OpDescriptor& mine,
      const std::vector<uint64_t>& extra) override;
  const OpDescriptor& said(int rank) override {
    return ctx_.domain.descriptor(rank, ctx_.domain.half());
  }
  const uint64_t* extra(int rank) override {
    return ctx_.domain.table(rank, ctx_.domain.half()) + before_extra_;
  }
  double density() override;
  SkipLimits skip_limits() override;
  void run(const Plan& plan, const OpDescriptor& d) override;
  void move(const Move& move, OpDescriptor& d) override;
  void count(OpCode named) override;
  AtOnce at_once(OpDescriptor& mine, const Small& small) override;
  bool takes_at_once(size_t bytes) override {
    return select_one_shot(bytes, false);
  }
  uint64_t shared_place(const void* data, size_t bytes) override;
  Context& context() {
    return ctx_;
  }

 private:
  // Before and after all ranks have come.
  void find_blocks(const Plan& plan);
  void load_blocks();

  Context& ctx_;
  size_t before_extra_ = 0; // words
  std::optional<BlockMap> blocks_; // of the plan that has been entered
  DataPath path_ = DataPath::kStaged;
  OpStats moved_;
};

} // namespace fusedpg
