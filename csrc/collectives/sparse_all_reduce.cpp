#include "collectives/sparse_all_reduce.hpp"

#include "collectives/reduction.hpp"
#include "collectives/selector.hpp"
#include "collectives/two_shot.hpp"

namespace fusedpg {

namespace {

// Around the cache only what is long: the fence behind it costs as much as
// some KiB.
constexpr size_t kStreamBytes = size_t(64) << 10;

std::vector<size_t> counts_of(const std::vector<ReduceTensor>& tensors) {
  std::vector<size_t> counts;
  for (const ReduceTensor& t : tensors) {
    counts.push_back(t.count);
  }
  return counts;
}

// Bits of all tensors must fit a staging buffer.
size_t fitting_block(const std::vector<ReduceTensor>& tensors, size_t block) {
  const size_t fits = BlockMap::fitting_block(
      counts_of(tensors), block, kStageBytes / sizeof(uint64_t));
  if (fits == 0) {
    fail(
        ErrorKind::kInvalid,
        "fused: more tensors in one call than supported; split the list");
  }
  return fits;
}

} // namespace

Skipping::Skipping(
    Context& ctx,
    const std::vector<ReduceTensor>& tensors,
    DType dtype,
    const SparseOptions& options)
    : map_(
          counts_of(tensors),
          fitting_block(tensors, options.block),
          ctx.size()) {
  auto* bits = reinterpret_cast<uint64_t*>(
      ctx.domain.stage_in(ctx.rank(), ctx.domain.next_half()));
  SparseOptions fitting = options;
  fitting.block = map_.block();
  for (size_t t = 0; t < tensors.size(); ++t) {
    find_blocks(
        ctx.kernels,
        ctx.pool,
        tensors[t],
        dtype,
        fitting,
        bits + map_.first_word(t));
  }
}

void Skipping::load(Context& ctx) {
  const int half = ctx.domain.half();
  for (int p = 0; p < ctx.size(); ++p) {
    map_.load(
        p, reinterpret_cast<const uint64_t*>(ctx.domain.stage_in(p, half)));
  }
}

double Skipping::density() const {
  return map_.blocks() == 0
      ? 0
      : static_cast<double>(map_.present_blocks(BlockMap::kAny)) /
          static_cast<double>(map_.blocks());
}

OpStats Skipping::stats(
    Context& ctx,
    const Lanes& lanes,
    size_t element,
    bool gathers) const {
  const auto bytes = [&](int rank, int owner) {
    size_t elements = 0;
    for (const Piece& piece : lanes[owner]) {
      elements += map_.present_elements(rank, piece);
    }
    return elements * element;
  };
  OpStats s;
  s.blocks = map_.blocks();
  s.blocks_present = map_.present_blocks(ctx.rank());
  s.blocks_union = map_.present_blocks(BlockMap::kAny);
  const size_t bits = (map_.blocks() + 7) / 8;
  for (int p = 0; p < ctx.size(); ++p) {
    if (p == ctx.rank()) {
      continue;
    }
    s.bytes_sent += bits + bytes(ctx.rank(), p);
    s.bytes_received += bits + bytes(p, ctx.rank());
    if (gathers) {
      s.bytes_sent += bytes(BlockMap::kAny, ctx.rank());
      s.bytes_received += bytes(BlockMap::kAny, p);
    }
  }
  return s;
}

void sparse_all_reduce(
    Context& ctx,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args,
    const SparseOptions& options) {
  OpDescriptor d = reduction_descriptor(OpCode::kSparseAllReduce, args);
  check_can_skip(d.op, args);
  if (options.threshold > 0 && tensors.size() != 1) {
    fail(
        ErrorKind::kInvalid,
        "fused: sparse_all_reduce: a threshold takes one tensor a call");
  }
  describe_tensors(ctx, d, tensors);
  run_skipping(ctx, d, OpCode::kSparseAllReduce, tensors, args, options);
}

void run_skipping(
    Context& ctx,
    OpDescriptor& d,
    OpCode named,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args,
    const SparseOptions& options) {
  d.op = OpCode::kSparseAllReduce;
  d.value_hash = Hash()
                     .add(d.value_hash)
                     .add(static_cast<uint64_t>(options.block))
                     .add(options.threshold)
                     .value();
  const size_t element = dtype_size(args.dtype);
  Skipping skipping(ctx, tensors, args.dtype, options);
  Plan plan = in_place(ctx, tensors, args);
  TwoShot(ctx, plan).begin(d);
  skipping.load(ctx);
  const Path path = select_path(ctx);
  const double limit = select_skip_limit(path);
  if (ctx.skip.mode == BlockSkip::kAuto && named == OpCode::kAllReduce) {
    ctx.skip.estimates.observe(
        d.shape_hash, args.dtype, skipping.density(), limit);
  }
  OpStats stats = skipping.stats(ctx, plan.lanes, element);
  // Whoever asks for skipping gets it.
  if (ctx.skip.mode == BlockSkip::kAuto && named == OpCode::kAllReduce &&
      skipping.density() >= limit) {
    TwoShot(ctx, plan).run(d);
    const OpStats dense = lane_stats(plan, ctx);
    stats.bytes_sent = dense.bytes_sent;
    stats.bytes_received = dense.bytes_received;
    ctx.stats.add(named, data_path(path), stats);
    return;
  }
  plan.lanes = skipping.map().skip(plan.lanes);
  plan.blocks = &skipping.map();
  plan.epilogue = [&](size_t t,
                      size_t begin,
                      size_t count,
                      void* const* dsts,
                      size_t num_dsts,
                      const Sources& srcs,
                      bool stream) {
    skipping.for_sources(
        {t, begin, count},
        {srcs.data, element, dsts, num_dsts, element},
        [&](size_t from,
            size_t to,
            const void* const* some,
            size_t num,
            void* const* outs) {
          ctx.kernels.reduce(
              args,
              outs,
              num_dsts,
              some,
              num,
              to - from,
              stream && (to - from) * element >= kStreamBytes);
        });
  };
  TwoShot(ctx, plan).run(d);
  ctx.stats.add(named, DataPath::kSkipping, stats);
}

} // namespace fusedpg
