#pragma once

#include <cstdint>
#include <string>

#include "base/call.hpp"
#include "base/deadline.hpp"
#include "base/descriptor.hpp"
#include "base/options.hpp"
#include "base/stats.hpp"
#include "collectives/density.hpp"
#include "host/domain.hpp"
#include "host/pool.hpp"
#include "kernels/kernels.hpp"

namespace fusedpg {

struct Span {
  void* data = nullptr;
  size_t bytes = 0;
};

// Copies shorter than twice this are not worth a second thread.
constexpr size_t kCopyGrain = size_t(32) << 10;

// What a group keeps from one operation to the next, for skipping zero blocks.
struct SkipState {
  BlockSkip mode = BlockSkip::kOff;
  size_t block = kBlockSize; // elements
  DensityEstimates estimates;
};

// What an algorithm works with during one operation, wherever the ranks are.
struct OpContext {
  const kernels::Table& kernels;
  Pool& pool;
  Deadline deadline;
  uint64_t sequence;
  bool nan_check;
  SkipState& skip;
  Stats& stats;
  // Position in, and length of, a list of operations that one call runs.
  uint64_t list_index = 0;
  uint64_t list_length = 1;
  uint64_t async_call = 0; // as in OpDescriptor
  bool entered = false; // peers know of it, or are about to

  void begin_item(uint64_t index, uint64_t length) {
    list_index = index;
    list_length = length;
    entered = false;
  }
  // Says in a descriptor which operation this is.
  void identify(OpDescriptor& d) const {
    d.sequence = sequence;
    d.list_index = list_index;
    d.list_length = list_length;
    d.async_call = async_call;
  }
};

// In shared memory.
struct Context : OpContext {
  Domain& domain;

  int rank() const {
    return domain.rank();
  }
  int size() const {
    return domain.size();
  }

  bool in_arena(const Span& span) const {
    return domain.arena()->locate(span.data, span.bytes).has_value();
  }

  void copy(void* dst, const void* src, size_t bytes, bool stream = false) {
    if (dst == src) {
      return;
    }
    pool.run(bytes, 4096, kCopyGrain, [&](size_t begin, size_t end) {
      kernels.copy(
          static_cast<char*>(dst) + begin,
          static_cast<const char*>(src) + begin,
          end - begin,
          stream);
    });
  }
};

// Every collective begins here: publishes what this rank is about to do, waits
// until all ranks have, and throws Error(kMismatch) on every rank when two of
// them disagree; the group stays usable then. `table` is read by peers through
// Domain::table(rank, half()) until the next barrier.
void enter(
    Context& ctx,
    OpDescriptor& mine,
    const uint64_t* table = nullptr,
    size_t table_entries = 0);

// Sets the descriptor's NaN flag if the option asks for the check; enter()
// then throws on every rank.
void check_nan(
    const OpContext& ctx,
    OpDescriptor& mine,
    const void* data,
    size_t count);
void check_nan(const OpContext& ctx, OpDescriptor& mine, Buffers inputs);

// Whether `bits` are set in the flags of all ranks. Valid between enter() and
// the next barrier.
bool all_ranks(Context& ctx, uint64_t bits);

// Memory of rank 0's arena, as this rank sees it. It is never given back to the
// arena, because peers may use it for longer than any of its tensors lives on
// rank 0. Contents are undefined.
void* share_memory(Context& ctx, size_t bytes);

} // namespace fusedpg
