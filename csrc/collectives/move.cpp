#include "collectives/move.hpp"

#include <algorithm>

#include "base/round_up.hpp"
#include "collectives/selector.hpp"

namespace fusedpg {
namespace {

constexpr size_t kAlignment = 64;

// A rank's row of the operation: what it offers to and expects from each rank.
// It is the operation's table.
class Row {
 public:
  static constexpr size_t kKinds = 3;
  Row(const uint64_t* table, int size) : table_(table), size_(size) {}
  uint64_t sends(int to) const {
    return table_[to];
  }
  uint64_t expects(int from) const {
    return table_[size_ + from];
  }
  uint64_t location(int to) const {
    return table_[2 * size_ + to];
  }

 private:
  const uint64_t* table_;
  int size_;
};

// Where the data for each destination lie in the staging buffer.
struct Packing {
  bool shared;
  size_t offset(const Row& row, int to) const {
    size_t offset = 0;
    for (int p = 0; p < to && !shared; ++p) {
      offset += round_up(row.sends(p), kAlignment);
    }
    return offset;
  }
};

class Mover {
 public:
  Mover(const Move& move, Context& ctx, OpDescriptor& d)
      : move_(move),
        ctx_(ctx),
        d_(d),
        me_(ctx.rank()),
        size_(ctx.size()) {}

  void run() {
    publish();
    validate();
    const Span own = move_.send_to(me_);
    ctx_.copy(move_.recvs[me_].data, own.data, own.bytes);
    if (all_ranks(ctx_, kStaged)) {
      pull_staged();
    } else if (all_ranks(ctx_, kReadsDirect)) {
      pull_direct();
    } else {
      pull_chunks();
    }
  }

 private:
  Row row(int rank) {
    return Row(ctx_.domain.table(rank, ctx_.domain.half()), size_);
  }

  void publish() {
    std::vector<uint64_t> table(Row::kKinds * size_);
    const Arena& arena = *ctx_.domain.arena();
    uint64_t flags = kReadsDirect;
    for (int p = 0; p < size_; ++p) {
      const Span send = move_.send_to(p);
      table[p] = send.bytes;
      table[size_ + p] = move_.recvs[p].bytes;
      if (send.bytes != 0 && p != me_) {
        const auto found = arena.locate(send.data, send.bytes);
        table[2 * size_ + p] = found.value_or(kNotInArena);
        flags &= found ? ~uint64_t(0) : ~kReadsDirect;
      }
    }
    flags |= stage_small(Row(table.data(), size_), (flags & kReadsDirect) != 0);
    d_.flags |= flags;
    enter(ctx_, d_, table.data(), table.size());
  }

  uint64_t stage_small(const Row& mine, bool in_arena) {
    const Packing packing{move_.shared};
    const size_t last = size_ - 1;
    const size_t total = move_.shared
        ? mine.sends(0)
        : packing.offset(mine, static_cast<int>(last)) + mine.sends(last);
    if (!select_one_shot(total, in_arena && total != 0)) {
      return 0;
    }
    char* stage = ctx_.domain.stage_in(me_, ctx_.domain.next_half());
    const int lanes = move_.shared ? 1 : size_;
    for (int p = 0; p < lanes; ++p) {
      if (move_.shared || p != me_) {
        ctx_.kernels.copy(
            stage + packing.offset(mine, p),
            move_.sends[p].data,
            move_.sends[p].bytes,
            false);
      }
    }
    return kStaged;
  }

  // All ranks compare the whole matrix, so all of them throw or none does.
  void validate() {
    for (int from = 0; from < size_; ++from) {
      for (int to = 0; to < size_; ++to) {
        check_sizes(d_, from, to, row(from).sends(to), row(to).expects(from));
      }
    }
  }

  void pull_staged() {
    const Packing packing{move_.shared};
    for (int p = 0; p < size_; ++p) {
      if (p != me_ && move_.recvs[p].bytes != 0) {
        ctx_.copy(
            move_.recvs[p].data,
            ctx_.domain.stage_in(p, ctx_.domain.half()) +
                packing.offset(row(p), me_),
            move_.recvs[p].bytes);
      }
    }
  }

  void pull_direct() {
    for (int p = 0; p < size_; ++p) {
      const Span& recv = move_.recvs[p];
      if (p != me_ && recv.bytes != 0) {
        ctx_.copy(
            recv.data,
            ctx_.domain.address(p, row(p).location(me_)),
            recv.bytes,
            select_stream(recv.bytes));
      }
    }
    // Nobody may change an input that a peer still reads.
    ctx_.domain.barrier(d_, ctx_.deadline);
  }

  void pull_chunks() {
    size_t longest = 0;
    size_t total = 0;
    const int lanes = move_.shared ? 1 : size_;
    for (int from = 0; from < size_; ++from) {
      size_t sent = 0;
      for (int to = 0; to < size_; ++to) {
        longest = std::max<size_t>(longest, row(from).sends(to));
        sent += row(from).sends(to);
      }
      total = std::max(total, sent);
    }
    const size_t chunk = select_chunk(total, lanes, /*rewrites_slowly=*/false);
    const size_t steps = longest / chunk + (longest % chunk != 0);
    const auto part = [&](const Span& span, size_t step) {
      const size_t begin = std::min(step * chunk, span.bytes);
      return Span{
          static_cast<char*>(span.data) + begin,
          std::min(chunk, span.bytes - begin)};
    };
    for (size_t s = 0; s <= steps; ++s) {
      if (s < steps) {
        char* stage = ctx_.domain.stage_in(me_, ctx_.domain.next_half());
        for (int p = 0; p < lanes; ++p) {
          if (move_.shared || p != me_) {
            const Span from = part(move_.sends[p], s);
            ctx_.copy(stage + p * chunk, from.data, from.bytes);
          }
        }
      }
      for (int p = 0; p < size_ && s > 0; ++p) {
        if (p != me_) {
          const Span to = part(move_.recvs[p], s - 1);
          const size_t lane = move_.shared ? 0 : me_ * chunk;
          ctx_.copy(
              to.data,
              ctx_.domain.stage_in(p, ctx_.domain.half()) + lane,
              to.bytes);
        }
      }
      if (s < steps) {
        ctx_.domain.barrier(d_, ctx_.deadline);
      }
    }
  }

  const Move& move_;
  Context& ctx_;
  OpDescriptor& d_;
  const int me_;
  const int size_;
};

} // namespace

void check_sizes(
    const OpDescriptor& d,
    int from,
    int to,
    uint64_t sent,
    uint64_t expected) {
  if (sent != expected) {
    fail(
        ErrorKind::kMismatch,
        "fused: {}, sequence number {}: ranks disagree: rank {} sends {} bytes "
        "to rank {}, which expects {}",
        describe(d),
        d.sequence,
        from,
        sent,
        to,
        expected);
  }
}

void shm_move(Context& ctx, const Move& move, OpDescriptor& d) {
  Mover(move, ctx, d).run();
}

} // namespace fusedpg
