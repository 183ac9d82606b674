#include "collectives/two_shot.hpp"

#include <algorithm>

#include "base/round_up.hpp"
#include "collectives/locations.hpp"

namespace fusedpg {
namespace {

// Pieces start at multiples of this in a lane, which keeps copies aligned.
constexpr size_t kPieceAlignment = 64;

// Around the cache only what is long: the fence behind it costs as much as
// some KiB.
constexpr size_t kStreamBytes = size_t(64) << 10;

// A walk over the pieces of a lane, chunk after chunk.
class LaneCursor {
 public:
  LaneCursor(
      const std::vector<LanePiece>& pieces,
      size_t element_size,
      size_t granule)
      : pieces_(&pieces),
        element_size_(element_size),
        granule_(granule) {}

  bool done() const {
    return index_ == pieces_->size();
  }

  // Calls fn(tensor, begin, count, position) for every part of a piece that
  // lies in the next `bytes` of the lane; `position` is from the chunk's start.
  template <typename Fn>
  void next(size_t bytes, Fn&& fn) {
    size_t position = 0;
    while (index_ < pieces_->size() && position < bytes) {
      const LanePiece& piece = (*pieces_)[index_];
      const size_t room = (bytes - position) / element_size_;
      size_t count = piece.count - done_;
      if (count > room) {
        count = room - room % granule_;
        if (count == 0) {
          return; // the next chunk has room
        }
      }
      if (count != 0) {
        fn(piece.tensor, piece.begin + done_, count, position);
      }
      done_ += count;
      position = round_up(position + count * element_size_, kPieceAlignment);
      if (done_ == piece.count) {
        ++index_;
        done_ = 0;
      }
    }
  }

 private:
  const std::vector<LanePiece>* pieces_;
  size_t element_size_;
  size_t granule_;
  size_t index_ = 0;
  size_t done_ = 0;
};

size_t lane_bytes(const std::vector<LanePiece>& lane, size_t element_size) {
  size_t bytes = 0;
  for (const LanePiece& piece : lane) {
    bytes += round_up(piece.count * element_size, kPieceAlignment);
  }
  return bytes;
}

// Chunks that a lane is cut into.
size_t lane_steps(LaneCursor lane, size_t chunk) {
  size_t steps = 0;
  for (; !lane.done(); ++steps) {
    lane.next(chunk, [](size_t, size_t, size_t, size_t) {});
  }
  return steps;
}

// The state of one run of the pipeline.
class TwoShotPipeline {
 public:
  TwoShotPipeline(
      const Plan& plan,
      Context& ctx,
      const OpDescriptor& d,
      const BlockMap* blocks)
      : plan_(plan),
        ctx_(ctx),
        descriptor_(d),
        blocks_(blocks),
        some_lanes_(
            blocks != nullptr && plan.zeros_stay ? blocks->skip(plan.lanes)
                                                 : Lanes()),
        lanes_(some_lanes_.empty() ? plan.lanes : some_lanes_),
        path_(agreed_path(ctx)),
        ends_(make_ends()) {
    // Both directions cut the lanes alike, whatever their element sizes.
    const size_t element = std::max(plan.src_size, plan.dst_size);
    size_t longest = 0;
    size_t total = 0;
    for (const auto& lane : lanes_) {
      const size_t bytes = lane_bytes(lane, element);
      longest = std::max(longest, bytes);
      total += bytes;
      in_.emplace_back(lane, element, plan.granule);
      out_.emplace_back(lane, element, plan.granule);
    }
    stream_ = select_stream(total);
    copies_in_ = plan.reads && !path_.reads_direct;
    gives_ = plan.receiver == Plan::kAll || plan.receiver >= 0;
    copies_out_ = gives_ && !path_.writes_direct;
    chunk_ = copies_in_ || copies_out_
        ? select_chunk(total, ctx.size(), rewrites_slowly())
        : std::max<size_t>(longest, 1);
    // A chunk holds at least one granule, and stays on line boundaries.
    chunk_ =
        round_up(std::max(chunk_, plan.granule * element), kPieceAlignment);
    for (const LaneCursor& lane : in_) {
      steps_ = std::max(steps_, lane_steps(lane, chunk_));
    }
    // A staging buffer holds the chunks of so many owners; all, if there is room
    // for all but the rank itself.
    owners_ = copies_in_ ? kStageBytes / chunk_ : size();
    if (owners_ + 1 == size()) {
      owners_ = size();
    }
    if (owners_ == 0 || (copies_out_ && chunk_ > kStageBytes)) {
      fail(
          ErrorKind::kSystem,
          "fused: {}: a piece of {} bytes does not fit the staging buffer",
          describe(d),
          chunk_);
    }
    load_locations();
  }

  void run() {
    // Owners for whom there is no room come after the others. A barrier between
    // them is not needed: what peers still read is in the other half.
    for (first_ = 0; first_ < size(); first_ += owners_) {
      run_owners();
    }
    // Peers may still read inputs or write outputs in place. Without that, the
    // double buffers need no closing barrier.
    const bool reads_in_place = plan_.reads && path_.reads_direct;
    const bool writes_in_place = gives_ && path_.writes_direct;
    if (writes_in_place || plan_.shared_results ||
        (reads_in_place && !copies_out_)) {
      ctx_.domain.barrier(descriptor_, ctx_.deadline);
    }
  }

 private:
  size_t size() const {
    return static_cast<size_t>(ctx_.size());
  }
  // Whether a rank's lane is among those that are worked on.
  bool on_turn(int owner) const {
    const auto p = static_cast<size_t>(owner);
    return p >= first_ && p - first_ < owners_;
  }
  // The place at which a rank stages a chunk for an owner.
  char* stage_in(int rank, int half, int owner) const {
    const size_t lane = static_cast<size_t>(owner) - first_ -
        (on_turn(rank) && rank < owner ? 1 : 0);
    return ctx_.domain.stage_in(rank, half) + lane * chunk_;
  }

  void run_owners() {
    LaneCursor own = in_[ctx_.rank()];
    // Steps by which the epilogue, then copying out, run behind.
    const size_t reduce_lag = copies_in_ ? 1 : 0;
    const size_t out_lag = reduce_lag + 1;
    const size_t last = steps_ + (copies_out_ ? out_lag : reduce_lag);
    for (size_t s = 0; s < last; ++s) {
      if (copies_in_ && s < steps_) {
        copy_in();
      }
      if (s >= reduce_lag && s - reduce_lag < steps_ && on_turn(ctx_.rank())) {
        reduce(own);
      }
      if (copies_out_ && s >= out_lag) {
        copy_out();
      }
      if (s + 1 < last) {
        ctx_.domain.barrier(descriptor_, ctx_.deadline);
      }
    }
  }

  // Peers' tables are overwritten two barriers later: keep what is needed.
  void load_locations() {
    if (!path_.reads_direct && !path_.writes_direct) {
      return;
    }
    const int half = ctx_.domain.half();
    locations_.resize(ctx_.size());
    for (int p = 0; p < ctx_.size(); ++p) {
      const uint64_t* table = ctx_.domain.table(p, half);
      locations_[p].assign(table, table + 2 * plan_.tensors.size());
    }
  }

  const char* peer_src(int rank, size_t tensor) const {
    return ctx_.domain.address(rank, locations_[rank][2 * tensor]);
  }
  char* peer_dst(int rank, size_t tensor) const {
    return ctx_.domain.address(rank, locations_[rank][2 * tensor + 1]);
  }

  void copy_in() {
    const int half = ctx_.domain.next_half();
    for (int p = 0; p < ctx_.size(); ++p) {
      if (p == ctx_.rank() || !on_turn(p)) {
        continue; // the owner reads its own contribution in place
      }
      char* stage = stage_in(ctx_.rank(), half, p);
      in_[p].next(
          chunk_, [&](size_t t, size_t begin, size_t count, size_t position) {
            const size_t size = plan_.src_size;
            const char* src = plan_.tensors[t].src;
            const auto copy = [&](size_t from, size_t to) {
              ctx_.copy(
                  stage + position + (from - begin) * size,
                  src + from * size,
                  (to - from) * size);
            };
            if (blocks_ == nullptr) {
              copy(begin, begin + count);
            } else {
              blocks_->for_present(ctx_.rank(), {t, begin, count}, copy);
            }
          });
    }
  }

  // A part of the own lane's chunk.
  struct Part {
    size_t tensor;
    size_t begin;
    size_t count;
    size_t position; // from the chunk's start, in bytes
    size_t into = 0; // elements behind `position`
  };
  // Where the epilogue finds and leaves what it works on.
  struct Ends {
    std::vector<const void*> srcs;
    std::vector<void*> dsts;
  };

  void reduce(LaneCursor& own) {
    parts_.clear();
    own.next(
        chunk_, [&](size_t t, size_t begin, size_t count, size_t position) {
          parts_.push_back({t, begin, count, position});
        });
    Pool& pool = ctx_.pool;
    const auto threads = static_cast<size_t>(pool.threads());
    const size_t element = std::max(plan_.src_size, plan_.dst_size);
    const size_t grain = 65536 / element;
    if (threads > 1 && parts_.size() >= 4 * threads) {
      size_t total = 0;
      for (const Part& part : parts_) {
        total += part.count;
      }
      const size_t few = parts_.size() * grain / std::max<size_t>(total, 1);
      pool.run(parts_.size(), 1, few + 1, [&](size_t first, size_t last) {
        Ends ends = make_ends();
        for (size_t i = first; i < last; ++i) {
          apply(parts_[i], ends);
        }
      });
      return;
    }
    const size_t align = round_up(1024, plan_.granule);
    for (size_t i = 0; i < parts_.size(); ++i) {
      const Part& part = parts_[i];
      if (threads == 1) {
        if (i + 1 < parts_.size()) {
          prefetch(parts_[i + 1]);
        }
        apply(part, ends_);
        continue;
      }
      pool.run(part.count, align, grain, [&](size_t from, size_t to) {
        Ends ends = make_ends();
        apply(
            {part.tensor, part.begin + from, to - from, part.position, from},
            ends);
      });
    }
  }

  // Short parts, scattered over large tensors, would each wait for memory.
  void prefetch(const Part& part) const {
    constexpr size_t kShort = 4096;
    const size_t bytes = part.count * plan_.dst_size;
    if (bytes > kShort || !gives_ || !path_.writes_direct) {
      return;
    }
    for (int p = 0; p < ctx_.size(); ++p) {
      const char* to = p == ctx_.rank() ? plan_.tensors[part.tensor].dst
                                        : peer_dst(p, part.tensor);
      to += part.begin * plan_.dst_size;
      for (size_t i = 0; i < bytes; i += kPieceAlignment) {
        __builtin_prefetch(to + i, 1);
      }
    }
  }

  Ends make_ends() const {
    Ends ends;
    ends.srcs.resize(ctx_.size());
    ends.dsts.resize(ctx_.size() + 1);
    return ends;
  }

  void apply(const Part& part, Ends& ends) {
    const int me = ctx_.rank();
    const size_t t = part.tensor;
    if (plan_.reads) {
      const int half = ctx_.domain.half();
      const size_t offset = part.begin * plan_.src_size;
      for (int p = 0; p < ctx_.size(); ++p) {
        ends.srcs[p] = p == me   ? plan_.tensors[t].src + offset
            : path_.reads_direct ? peer_src(p, t) + offset
                                 : stage_in(p, half, me) + part.position +
                part.into * plan_.src_size;
      }
    }
    const size_t offset = part.begin * plan_.dst_size;
    const bool all = plan_.receiver == Plan::kAll;
    size_t n = 0;
    if (all || plan_.receiver == Plan::kOwner || plan_.receiver == me) {
      ends.dsts[n++] = plan_.tensors[t].dst + offset;
    }
    if (copies_out_) {
      ends.dsts[n++] = ctx_.domain.stage_out(me, ctx_.domain.next_half()) +
          part.position + part.into * plan_.dst_size;
    } else if (gives_) {
      for (int p = 0; p < ctx_.size(); ++p) {
        if (p != me && (all || plan_.receiver == p)) {
          ends.dsts[n++] = peer_dst(p, t) + offset;
        }
      }
    }
    // What a peer is about to copy out should stay in the cache.
    const bool stream = stream_ && !copies_out_;
    if (blocks_ != nullptr) {
      apply_to_blocks({t, part.begin, part.count}, ends, n, stream);
      return;
    }
    plan_.epilogue(
        t,
        part.begin,
        part.count,
        ends.dsts.data(),
        n,
        {ends.srcs.data(), ends.srcs.size()},
        stream);
  }

  // For the parts of a piece that the same ranks contribute. Where some do not,
  // a source of zeros comes last, and parts are at most as long as that.
  void apply_to_blocks(
      const LanePiece& piece,
      const Ends& ends,
      size_t num_dsts,
      bool stream) {
    thread_local std::vector<const void*> srcs;
    thread_local std::vector<void*> dsts;
    dsts.resize(num_dsts);
    blocks_->for_contributors(
        piece, [&](size_t begin, size_t end, const int* ranks, size_t num) {
          const bool all = num == blocks_->size();
          const size_t most = all ? end - begin : kZeroBytes / plan_.src_size;
          srcs.resize(num + 1);
          for (size_t at = begin; at < end; at += most) {
            const size_t count = std::min(most, end - at);
            const size_t offset = at - piece.begin;
            for (size_t k = 0; k < num; ++k) {
              srcs[k] = static_cast<const char*>(ends.srcs[ranks[k]]) +
                  offset * plan_.src_size;
            }
            srcs[num] = kZeros;
            for (size_t k = 0; k < num_dsts; ++k) {
              dsts[k] =
                  static_cast<char*>(ends.dsts[k]) + offset * plan_.dst_size;
            }
            plan_.epilogue(
                piece.tensor,
                at,
                count,
                dsts.data(),
                num_dsts,
                {srcs.data(), all ? num : num + 1},
                stream && count * plan_.dst_size >= kStreamBytes);
          }
        });
  }

  void copy_out() {
    if (plan_.receiver >= 0 && plan_.receiver != ctx_.rank()) {
      return;
    }
    const int half = ctx_.domain.half();
    for (int p = 0; p < ctx_.size(); ++p) {
      if (p == ctx_.rank() || !on_turn(p)) {
        continue;
      }
      const char* stage = ctx_.domain.stage_out(p, half);
      out_[p].next(
          chunk_, [&](size_t t, size_t begin, size_t count, size_t position) {
            ctx_.copy(
                plan_.tensors[t].dst + begin * plan_.dst_size,
                stage + position,
                count * plan_.dst_size);
          });
    }
  }

  const Plan& plan_;
  Context& ctx_;
  const OpDescriptor& descriptor_;
  const BlockMap* const blocks_;
  const Lanes some_lanes_; // of blocks that any rank has
  const Lanes& lanes_;
  const Path path_;
  bool copies_in_;
  bool copies_out_;
  bool gives_; // to another rank than the owner
  bool stream_;
  size_t chunk_; // bytes of one lane
  size_t owners_; // whose lanes are worked on at once
  size_t first_ = 0; // of them
  size_t steps_ = 0;
  std::vector<std::vector<uint64_t>> locations_; // [rank][2 * tensor + is_dst]
  std::vector<LaneCursor> in_;
  std::vector<LaneCursor> out_;
  std::vector<Part> parts_; // of the current chunk
  Ends ends_; // for one thread
};

} // namespace

Path agreed_path(Context& ctx) {
  if (ctx.size() == 1) {
    return {true, true}; // nobody needs a stage
  }
  return {all_ranks(ctx, kReadsDirect), all_ranks(ctx, kWritesDirect)};
}

void TwoShot::begin(OpDescriptor& d, const std::vector<uint64_t>& extra) const {
  auto [flags, table] = locate(plan_, *ctx_.domain.arena());
  d.flags |= flags;
  table.insert(table.end(), extra.begin(), extra.end());
  enter(ctx_, d, table.data(), table.size());
}

void TwoShot::run(const OpDescriptor& d, const BlockMap* blocks) const {
  TwoShotPipeline(plan_, ctx_, d, blocks).run();
}

} // namespace fusedpg
