#include "collectives/net_pipeline.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <numeric>

namespace fusedpg {
namespace {

// What travels as one message: enough for a link to be fast, little enough for
// several to be under way.
constexpr size_t kSegmentBytes = size_t(512) << 10;
// Segments between a rank's contribution and its being combined, and between
// that and the arrival of results.
constexpr size_t kAhead = 4;

struct Segment {
  std::vector<LanePiece> pieces;
  size_t elements = 0;
};

// Pieces are cut at multiples of `granule`, counted from their begin.
std::vector<Segment> cut(
    const std::vector<LanePiece>& lane,
    size_t most, // elements; a multiple of granule
    size_t granule) {
  std::vector<Segment> segments;
  size_t room = 0;
  for (LanePiece rest : lane) {
    while (rest.count != 0) {
      const size_t fits =
          rest.count <= room ? rest.count : room / granule * granule;
      if (fits == 0) {
        segments.emplace_back();
        room = most;
        continue;
      }
      segments.back().pieces.push_back({rest.tensor, rest.begin, fits});
      segments.back().elements += fits;
      room -= fits;
      rest.begin += fits;
      rest.count -= fits;
    }
  }
  return segments;
}

class Pipeline {
 public:
  Pipeline(NetContext& ctx, const Plan& plan)
      : ctx_(ctx),
        plan_(plan),
        rank_(ctx.transport.rank()),
        size_(ctx.transport.size()),
        gives_(plan.receiver == Plan::kAll) {
    const size_t element = std::max(plan.src_size, plan.dst_size);
    const size_t granule = std::lcm(plan.granule, kCut);
    const size_t most =
        std::max<size_t>(kSegmentBytes / element / granule, 1) * granule;
    capacity_ = most * element;
    for (const auto& lane : plan.lanes) {
      lanes_.push_back(cut(lane, most, granule));
      length_ = std::max(length_, lanes_.back().size());
    }
  }

  void run() {
    stages_.resize(length_);
    for (size_t s = 0; s < length_ + 2 * kAhead; ++s) {
      if (s < length_) {
        contribute(s);
      }
      if (s >= kAhead && s - kAhead < length_) {
        combine(s - kAhead);
      }
      if (s >= 2 * kAhead) {
        finish(s - 2 * kAhead);
      }
    }
  }

 private:
  static constexpr size_t kCut = 64; // elements: vectors stay whole

  // The s-th segments of all lanes.
  struct Stage {
    std::vector<NetPending> contributions; // to this rank's, by rank
    std::vector<NetPending> results; // of the others', by rank
    std::vector<NetPending> sends;
    std::vector<NetBuffer> scratch; // what the buffers above are parts of
  };

  const Segment* segment(int owner, size_t s) const {
    return s < lanes_[owner].size() ? &lanes_[owner][s] : nullptr;
  }

  // Everybody begins with another peer.
  template <typename Call>
  void each_peer(const Call& call) const {
    for (int k = 1; k < size_; ++k) {
      call((rank_ + k) % size_);
    }
  }

  // Memory until the stage is finished.
  NetBuffer scratch(Stage& stage, size_t bytes) {
    if (free_.empty()) {
      free_.emplace_back(capacity_);
    }
    stage.scratch.push_back(std::move(free_.back()));
    free_.pop_back();
    return stage.scratch.back().part(0, bytes);
  }

  bool in_place(const Segment& one) const {
    return one.pieces.size() == 1 && ctx_.transport.ends_at_once();
  }

  const char* source(const LanePiece& piece) const {
    return plan_.tensors[piece.tensor].src + piece.begin * plan_.src_size;
  }
  char* result(const LanePiece& piece) const {
    return plan_.tensors[piece.tensor].dst + piece.begin * plan_.dst_size;
  }

  void wait(std::vector<NetPending>& all) {
    for (NetPending& one : all) {
      if (one.request) {
        one.request->wait(ctx_.deadline);
      }
    }
    all.clear();
  }

  void contribute(size_t s) {
    if (!plan_.reads) {
      return;
    }
    Stage& stage = stages_[s];
    stage.contributions.resize(size_);
    each_peer([&](int p) {
      if (const Segment* mine = segment(rank_, s)) {
        const size_t bytes = mine->elements * plan_.src_size;
        stage.contributions[p] =
            net_receive(ctx_, p, NetKind::kContribution, scratch(stage, bytes));
      }
      if (const Segment* theirs = segment(p, s)) {
        stage.sends.push_back(net_send(
            ctx_, p, NetKind::kContribution, gathered(*theirs, stage)));
      }
    });
  }

  // This rank's contribution as one run of bytes.
  NetBuffer gathered(const Segment& one, Stage& stage) {
    const size_t bytes = one.elements * plan_.src_size;
    if (in_place(one)) {
      return NetBuffer::borrowed(
          const_cast<char*>(source(one.pieces[0])), bytes);
    }
    const NetBuffer block = scratch(stage, bytes);
    char* to = block.data();
    for (const LanePiece& piece : one.pieces) {
      std::memcpy(to, source(piece), piece.count * plan_.src_size);
      to += piece.count * plan_.src_size;
    }
    return block;
  }

  void combine(size_t s) {
    Stage& stage = stages_[s];
    received_.clear();
    for (const NetPending& one : stage.contributions) {
      received_.push_back(one.buffer.data());
    }
    wait(stage.contributions);
    // Results may go where contributions came from.
    wait(stage.sends);
    if (const Segment* mine = segment(rank_, s)) {
      const NetBuffer block = combined(*mine, stage);
      if (gives_) {
        each_peer([&](int p) {
          stage.sends.push_back(net_send(ctx_, p, NetKind::kResult, block));
        });
      }
    }
    if (!gives_) {
      return;
    }
    stage.results.resize(size_);
    each_peer([&](int p) {
      if (const Segment* theirs = segment(p, s)) {
        const size_t bytes = theirs->elements * plan_.dst_size;
        const NetBuffer into = in_place(*theirs)
            ? NetBuffer::borrowed(result(theirs->pieces[0]), bytes)
            : scratch(stage, bytes);
        stage.results[p] = net_receive(ctx_, p, NetKind::kResult, into);
      }
    });
  }

  // The results as one run of bytes; empty if they stay here.
  NetBuffer combined(const Segment& mine, Stage& stage) {
    NetBuffer block;
    const bool packs = gives_ && !in_place(mine);
    if (packs) {
      const size_t bytes = mine.elements * plan_.dst_size;
      block = scratch(stage, bytes);
    } else if (gives_) {
      block = NetBuffer::borrowed(
          result(mine.pieces[0]), mine.elements * plan_.dst_size);
    }
    size_t at = 0; // elements
    for (const LanePiece& piece : mine.pieces) {
      sources_.clear();
      for (int p = 0; p < size_ && plan_.reads; ++p) {
        sources_.push_back(
            p == rank_ ? source(piece) : received_[p] + at * plan_.src_size);
      }
      void* outs[2];
      size_t n = 0;
      if (plan_.receiver != Plan::kNobody) {
        outs[n++] = result(piece);
      }
      if (packs) {
        outs[n++] = block.data() + at * plan_.dst_size;
      }
      plan_.epilogue(
          piece.tensor,
          piece.begin,
          piece.count,
          outs,
          n,
          {sources_.data(), sources_.size()},
          /*stream=*/false);
      at += piece.count;
    }
    return block;
  }

  void finish(size_t s) {
    Stage& stage = stages_[s];
    const std::vector<NetPending> results = std::move(stage.results);
    each_peer([&](int p) {
      const Segment* theirs = gives_ ? segment(p, s) : nullptr;
      if (theirs == nullptr) {
        return;
      }
      results[p].request->wait(ctx_.deadline);
      if (in_place(*theirs)) {
        return;
      }
      const char* from = results[p].buffer.data();
      for (const LanePiece& piece : theirs->pieces) {
        std::memcpy(result(piece), from, piece.count * plan_.dst_size);
        from += piece.count * plan_.dst_size;
      }
    });
    wait(stage.sends);
    std::move(
        stage.scratch.begin(), stage.scratch.end(), std::back_inserter(free_));
    stage.scratch.clear();
  }

  NetContext& ctx_;
  const Plan& plan_;
  const int rank_;
  const int size_;
  const bool gives_;
  std::vector<std::vector<Segment>> lanes_; // by owner
  size_t length_ = 0; // of the longest lane
  std::vector<Stage> stages_;
  std::vector<NetBuffer> free_;
  size_t capacity_ = 0; // of each of these, in bytes
  std::vector<const void*> sources_; // of one piece
  std::vector<const char*> received_; // of one stage
};

} // namespace

void net_pipeline(NetContext& ctx, const Plan& plan) {
  try {
    Pipeline(ctx, plan).run();
  } catch (...) {
    // Receives into tensors may still be posted.
    ctx.transport.abort();
    throw;
  }
}

} // namespace fusedpg
