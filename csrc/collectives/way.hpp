#pragma once

#include <optional>
#include <vector>

#include "collectives/context.hpp"
#include "collectives/two_shot.hpp"

namespace fusedpg {

// How the ranks of a group do an operation that is written once for all of
// them: agree on it, and carry out its plan.
class Way {
 public:
  virtual ~Way() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const kernels::Table& kernels() const = 0;
  // Whether inputs are to be looked through for NaNs.
  virtual bool checks_nan() const = 0;

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

  // Of the plan that has been entered. `d` names the operation in errors.
  virtual void run(const Plan& plan, const OpDescriptor& d) = 0;

  // Which memory that all ranks see this is; the same on all ranks. Throws
  // Error(kInvalid) where it is none.
  virtual uint64_t shared_place(const void* data, size_t bytes) = 0;
  // Where the ranks share memory, what works in it; else null.
  virtual Context* shared_memory() {
    return nullptr;
  }
};

// Sets the descriptor's NaN flag if the option asks for the check; enter()
// then throws on every rank.
void check_nan(Way& way, OpDescriptor& mine, const void* data, size_t count);
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
    return ctx_.domain.descriptor(rank, ctx_.domain.half());
  }
  const uint64_t* extra(int rank) override {
    return ctx_.domain.table(rank, ctx_.domain.half()) + before_extra_;
  }
  void run(const Plan& plan, const OpDescriptor& d) override {
    TwoShot(ctx_, plan).run(d);
  }
  uint64_t shared_place(const void* data, size_t bytes) override;
  Context* shared_memory() override {
    return &ctx_;
  }

 private:
  Context& ctx_;
  size_t before_extra_ = 0; // words
};

} // namespace fusedpg
