#include "collectives/way.hpp"

#include "base/hash.hpp"
#include "collectives/move.hpp"

namespace fusedpg {
namespace {

// Adds what a run of the plan moves between ranks.
void add_moved(
    OpStats& moved,
    const Plan& plan,
    const BlockMap* blocks,
    const Context& ctx) {
  const int me = ctx.rank();
  const bool gives = plan.receiver == Plan::kAll;
  const auto elements = [&](int owner, int rank, bool all) {
    size_t sum = 0;
    for (const LanePiece& piece : plan.lanes[owner]) {
      sum += all ? piece.count : blocks->present_elements(rank, piece);
    }
    return sum;
  };
  const size_t bits = blocks != nullptr ? (blocks->blocks() + 7) / 8 : 0;
  const bool whole = blocks == nullptr;
  const bool whole_results = whole || !plan.zeros_stay;
  for (int p = 0; p < ctx.size(); ++p) {
    if (p == me) {
      continue;
    }
    if (plan.reads) {
      moved.bytes_sent += bits + elements(p, me, whole) * plan.src_size;
      moved.bytes_received += bits + elements(me, p, whole) * plan.src_size;
    }
    if (gives) {
      moved.bytes_sent +=
          elements(me, BlockMap::kAny, whole_results) * plan.dst_size;
      moved.bytes_received +=
          elements(p, BlockMap::kAny, whole_results) * plan.dst_size;
    }
  }
}

} // namespace

bool any_rank(Way& way, uint64_t bits) {
  for (int p = 0; p < way.size(); ++p) {
    if ((way.said(p).flags & bits) != 0) {
      return true;
    }
  }
  return false;
}

void ShmWay::begin_item(uint64_t index, uint64_t length) {
  ctx_.begin_item(index, length);
  path_ = DataPath::kStaged;
  moved_ = {};
}

void ShmWay::refuse(const std::string& reason) {
  OpDescriptor d;
  d.flags = kRefused;
  ctx_.domain.set_reason(reason);
  fusedpg::enter(ctx_, d);
}

void ShmWay::find_blocks(const Plan& plan) {
  // Bits of all tensors must fit a staging buffer.
  const std::vector<size_t> counts = plan.counts();
  SkipOptions options = *plan.skip;
  options.block = BlockMap::fitting_block(
      counts, options.block, kStageBytes / sizeof(uint64_t));
  if (options.block == 0) {
    fail(
        ErrorKind::kInvalid,
        "fused: more tensors in one call than supported; split the list");
  }
  blocks_.emplace(counts, options.block, size());
  auto* bits = reinterpret_cast<uint64_t*>(
      ctx_.domain.stage_in(rank(), ctx_.domain.next_half()));
  for (size_t t = 0; t < counts.size(); ++t) {
    fusedpg::find_blocks(
        ctx_.kernels,
        ctx_.pool,
        {const_cast<char*>(plan.tensors[t].src), counts[t]},
        plan.src_type,
        options,
        bits + blocks_->first_word(t));
  }
}

void ShmWay::load_blocks() {
  const int half = ctx_.domain.half();
  for (int p = 0; p < size(); ++p) {
    blocks_->load(
        p, reinterpret_cast<const uint64_t*>(ctx_.domain.stage_in(p, half)));
  }
  moved_.blocks += blocks_->blocks();
  moved_.blocks_present += blocks_->present_blocks(rank());
  moved_.blocks_union += blocks_->present_blocks(BlockMap::kAny);
}

void ShmWay::enter(
    const Plan* plan,
    OpDescriptor& mine,
    const std::vector<uint64_t>& extra) {
  blocks_.reset();
  if (plan == nullptr) {
    before_extra_ = 0;
    fusedpg::enter(ctx_, mine, extra.data(), extra.size());
    return;
  }
  if (plan->skip &&
      select_plan_skip({size(), plan->needs_all, plan->zeros_stay})) {
    find_blocks(*plan);
  }
  before_extra_ = 2 * plan->tensors.size();
  TwoShot(ctx_, *plan).begin(mine, extra);
  if (blocks_) {
    load_blocks();
  }
}

double ShmWay::density() {
  return blocks_->density();
}

SkipLimits ShmWay::skip_limits() {
  const double limit = select_skip_limit(agreed_path(ctx_));
  return {limit, limit};
}

void ShmWay::run(const Plan& plan, const OpDescriptor& d) {
  const BlockMap* blocks = plan.skip && blocks_ ? &*blocks_ : nullptr;
  const Path path = agreed_path(ctx_);
  path_ = blocks != nullptr                     ? DataPath::kSkipping
      : path.reads_direct && path.writes_direct ? DataPath::kDirect
                                                : DataPath::kStaged;
  add_moved(moved_, plan, blocks, ctx_);
  TwoShot(ctx_, plan).run(d, blocks);
}

void ShmWay::move(const Move& move, OpDescriptor& d) {
  shm_move(ctx_, move, d);
}

void ShmWay::count(OpCode named) {
  ctx_.stats.add(named, path_, moved_);
}

Way::AtOnce ShmWay::at_once(OpDescriptor& mine, const Small& small) {
  const Span& input = small.input;
  if (!select_one_shot(input.bytes, ctx_.in_arena(input))) {
    return {};
  }
  Domain& domain = ctx_.domain;
  ctx_.kernels.copy(
      domain.stage_in(rank(), domain.next_half()),
      input.data,
      input.bytes,
      false);
  mine.flags |= kStaged;
  fusedpg::enter(ctx_, mine);
  if (!all_ranks(ctx_, kStaged)) {
    return {.entered = true};
  }
  thread_local std::vector<const void*> srcs; // keeps its memory
  srcs.resize(size());
  for (int p = 0; p < size(); ++p) {
    srcs[p] = domain.stage_in(p, domain.half()) +
        small.begin * dtype_size(small.args.dtype);
  }
  const uint64_t all = input.bytes * static_cast<size_t>(size() - 1);
  moved_.bytes_sent += all;
  moved_.bytes_received += all;
  path_ = DataPath::kOneShot;
  return {.entered = true, .sources = Sources{srcs.data(), srcs.size()}};
}

uint64_t ShmWay::shared_place(const void* data, size_t bytes) {
  const auto found = ctx_.domain.locate_any(data, bytes);
  if (!found) {
    fail(
        ErrorKind::kInvalid,
        "fused: a parameter is said to be shared between the ranks of a "
        "machine, but does not lie in an arena of this group");
  }
  return Hash()
      .add(static_cast<uint64_t>(found->rank))
      .add(found->offset)
      .value();
}

} // namespace fusedpg
