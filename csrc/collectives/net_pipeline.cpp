#include "collectives/net_pipeline.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "collectives/host_fold.hpp"
#include "collectives/locations.hpp"
#include "collectives/net_parts.hpp"
#include "collectives/selector.hpp"

namespace fusedpg {
namespace {

class Pipeline {
 public:
  Pipeline(
      NetContext& ctx,
      const Plan& plan,
      const OpDescriptor& d,
      const NetBlocks* blocks)
      : ctx_(ctx),
        plan_(plan),
        descriptor_(d),
        blocks_(blocks),
        parts_(blocks, *ctx.hosts, ctx.transport.rank()),
        hosts_(*ctx.hosts),
        fold_(ctx.kernels, hosts_, plan),
        rank_(ctx.transport.rank()),
        size_(ctx.transport.size()),
        here_(hosts_.host(rank_)),
        shares_(hosts_.ranks(here_).size() > 1),
        all_(plan.receiver == Plan::kAll),
        gives_(all_ || plan.receiver >= 0),
        buffers_(ctx.buffers != nullptr ? *ctx.buffers : own_buffers_) {
    const size_t element = std::max(plan.src_size, plan.dst_size);
    segment_bytes_ = select_net_segment(size_, hosts_.shared());
    size_t granule = std::lcm(plan.granule, kCut);
    if (granule * element > segment_bytes_) {
      granule = plan.granule;
    }
    const size_t most =
        std::max<size_t>(segment_bytes_ / element / granule, 1) * granule;
    if (shares_ &&
        (most * element > segment_bytes_ ||
         segment_bytes_ * static_cast<size_t>(size_) >
             ctx.domain->stage_bytes())) {
      fail(
          ErrorKind::kSystem,
          "fused: {}: a piece of {} bytes does not fit the staging buffer",
          describe(d),
          most * element);
    }
    capacity_ =
        most * std::max(element, plan.reads ? fold_.element() : size_t{0});
    block_ = std::max<size_t>(kBlock / element / granule, 1) * granule;
    const bool some = blocks != nullptr && plan.zeros_stay;
    for (const auto& lane : some ? blocks->all.skip(plan.lanes) : plan.lanes) {
      lanes_.push_back(cut_lane(lane, most, granule));
      length_ = std::max(length_, lanes_.back().size());
    }
    ahead_ = std::min(
        select_net_ahead(hosts_.shared()), length_ == 0 ? 0 : length_ - 1);
    widened_.resize(hosts_.num_hosts());
    parts_.set_most(kZeroBytes / std::max(plan.src_size, fold_.element()));
  }

  void run() {
    stages_.resize(length_);
    const size_t last = length_ + (gives_ ? 2 * ahead_ : ahead_);
    if (shares_ && length_ != 0) {
      Domain& domain = *ctx_.domain;
      const uint64_t flags =
          publish(domain, descriptor_, locate(plan_, *domain.arena()));
      own_direct_ = (flags & kReadsDirect) != 0;
    }
    for (size_t s = 0; s < last; ++s) {
      if (shares_) {
        share(s);
      }
      if (s < length_) {
        contribute(s);
      }
      if (s >= ahead_ && s - ahead_ < length_) {
        combine(s - ahead_);
      }
      if (gives_ && s >= 2 * ahead_) {
        finish(s - 2 * ahead_);
      }
    }
    if (shares_ && last != 0 && (gives_ || reads_direct_)) {
      // Neighbours may still read or write this rank's tensors.
      barrier();
      take_from_peers(last - 1);
    }
  }

 private:
  static constexpr size_t kCut = 64; // elements: vectors stay whole
  // Bytes of a lane that are added up here and combined with what came from
  // other hosts while they are in the cache.
  static constexpr size_t kBlock = size_t(32) << 10;

  // The s-th segments of all lanes.
  struct Stage {
    std::vector<NetPending> contributions; // to this rank's, by host
    std::vector<NetPending> results; // of the others', by owner
    std::vector<NetPending> sends;
    std::vector<NetBuffer> scratch; // what the buffers above are parts of
  };

  const NetSegment* segment(int owner, size_t s) const {
    return s < lanes_[owner].size() ? &lanes_[owner][s] : nullptr;
  }

  // Everybody begins with another peer.
  template <typename Call>
  void each_peer(const Call& call) const {
    for (int k = 1; k < size_; ++k) {
      call((rank_ + k) % size_);
    }
  }
  template <typename Call>
  void each_other_host(const Call& call) const {
    for (int k = 1; k < hosts_.num_hosts(); ++k) {
      call((here_ + k) % hosts_.num_hosts());
    }
  }

  // --- who does what ---------------------------------------------------------
  bool is_here(int rank) const {
    return hosts_.host(rank) == here_;
  }
  // Who on this host works for an owner.
  int worker(int owner) const {
    return hosts_.proxy(owner, here_);
  }
  // Who on another host gets an owner's results from it; -1: nobody.
  int taker(int owner, int host) const {
    return all_ ? hosts_.proxy(owner, host)
        : gives_ && hosts_.host(plan_.receiver) == host ? plan_.receiver
                                                        : -1;
  }
  // Whether this rank has the results of an owner on another host by message,
  bool takes(int owner) const {
    return !is_here(owner) && taker(owner, here_) == rank_;
  }
  // and whether it passes what it has on to others on this host.
  bool publishes(int owner) const {
    return shares_ &&
        (all_ ? worker(owner) == rank_
              : owner == rank_ && plan_.receiver != rank_ && gives_ &&
                 is_here(plan_.receiver));
  }

  // --- memory ----------------------------------------------------------------
  // Until its contributions are combined, or else the stage is finished.
  NetBuffer scratch(Stage& stage, size_t bytes) {
    stage.scratch.push_back(buffers_.take(capacity_));
    return stage.scratch.back().part(0, bytes);
  }

  // The next segments get these while they are still in the cache.
  void release(std::vector<NetBuffer>& scratch) {
    for (NetBuffer& one : scratch) {
      buffers_.give(std::move(one));
    }
    scratch.clear();
  }

  static bool in_place(const NetSegment& one) {
    return one.pieces.size() == 1;
  }

  const char* source(const LanePiece& piece) const {
    return plan_.tensors[piece.tensor].src + piece.begin * plan_.src_size;
  }
  char* result(const LanePiece& piece) const {
    return plan_.tensors[piece.tensor].dst + piece.begin * plan_.dst_size;
  }
  void gather(const NetSegment& one, char* to) const {
    for (const LanePiece& piece : one.pieces) {
      std::memcpy(to, source(piece), piece.count * plan_.src_size);
      to += piece.count * plan_.src_size;
    }
  }
  void scatter(const NetSegment& one, const char* from) const {
    for (const LanePiece& piece : one.pieces) {
      std::memcpy(result(piece), from, piece.count * plan_.dst_size);
      from += piece.count * plan_.dst_size;
    }
  }
  char* staged_in(int rank, int half, int owner) const {
    return ctx_.domain->stage_in(hosts_.local(rank), half) +
        static_cast<size_t>(owner) * segment_bytes_;
  }
  char* staged_out(int rank, int half, int owner) const {
    return ctx_.domain->stage_out(hosts_.local(rank), half) +
        static_cast<size_t>(owner) * segment_bytes_;
  }

  void wait(std::vector<NetPending>& all) {
    for (NetPending& one : all) {
      if (one.request) {
        one.request->wait(ctx_.deadline);
      }
    }
    all.clear();
  }

  // --- inside this host ------------------------------------------------------
  void barrier() {
    ctx_.domain->barrier(descriptor_, ctx_.deadline);
  }

  // Tensors of an arena are read and written there by whoever works on them;
  // everything else goes through the staging buffers, rank by rank.
  struct Neighbour {
    int rank;
    std::vector<uint64_t> table; // see Locations
    bool reads_direct = false; // its contributions are read where they lie
    bool writes_direct = false; // its results are written where they belong
  };

  // After the first barrier.
  void load() {
    std::vector<Locations> all = published(*ctx_.domain);
    for (const int p : hosts_.ranks(here_)) {
      Locations& said = all[hosts_.local(p)];
      Neighbour one{p, std::move(said.table)};
      one.reads_direct = (said.flags & kReadsDirect) != 0;
      one.writes_direct = (said.flags & kWritesDirect) != 0;
      reads_direct_ = reads_direct_ || (plan_.reads && one.reads_direct);
      stages_in_ = stages_in_ || (plan_.reads && !one.reads_direct);
      stages_out_ = stages_out_ ||
          (gives_ && (all_ || p == plan_.receiver) && !one.writes_direct);
      neighbours_.push_back(std::move(one));
    }
  }

  const char* source_of(const Neighbour& one, size_t tensor, size_t begin)
      const {
    return ctx_.domain->address(hosts_.local(one.rank), one.table[2 * tensor]) +
        begin * plan_.src_size;
  }
  char* result_of(const Neighbour& one, size_t tensor, size_t begin) const {
    return ctx_.domain->address(
               hosts_.local(one.rank), one.table[2 * tensor + 1]) +
        begin * plan_.dst_size;
  }
  // Whether a neighbour gets results that this rank publishes.
  bool takes_from_here(const Neighbour& one) const {
    return one.rank != rank_ && (all_ || one.rank == plan_.receiver);
  }
  // Whether any of these takes them out of the staging buffer.
  bool publishes_staged(int owner) const {
    return publishes(owner) &&
        std::any_of(
               neighbours_.begin(), neighbours_.end(), [&](const auto& one) {
                 return takes_from_here(one) && !one.writes_direct;
               });
  }
  template <typename Call>
  void each_direct_taker(int owner, const Call& call) const {
    if (!publishes(owner)) {
      return;
    }
    for (const Neighbour& one : neighbours_) {
      if (takes_from_here(one) && one.writes_direct) {
        call(one);
      }
    }
  }

  // In which step neighbours leave their contributions to the first segment of a
  // lane: to that of another host's rank, before it is sent there; to that of
  // this host's, when it is combined with what has come.
  size_t lag(int owner) const {
    return is_here(owner) ? ahead_ : 0;
  }

  // Leaves segments of others' lanes to who works for them here, and takes the
  // results that these have left in the last step. Without anything staged
  // there is nothing to do after the first step.
  void share(size_t s) {
    const bool in = plan_.reads && s < length_ + ahead_;
    const bool staged =
        (in && stages_in_) || (s == 0 ? in || gives_ : stages_out_);
    if (!staged) {
      return;
    }
    if (in && !own_direct_) {
      const int half = ctx_.domain->next_half();
      for (int p = 0; p < size_; ++p) {
        if (worker(p) == rank_ || s < lag(p)) {
          continue;
        }
        if (const NetSegment* one = segment(p, s - lag(p))) {
          gather(parts_.mine(*one), staged_in(rank_, half, p));
        }
      }
    }
    barrier();
    if (s == 0) {
      load();
    } else {
      take_from_peers(s - 1);
    }
  }

  void take_from_peers(size_t step) {
    if (!gives_ || neighbours_[hosts_.local(rank_)].writes_direct) {
      return;
    }
    const int half = ctx_.domain->half();
    for (int p = 0; p < size_; ++p) {
      const bool mine = all_
          ? worker(p) != rank_
          : plan_.receiver == rank_ && is_here(p) && p != rank_;
      const int from = worker(p);
      const size_t lag = from == p ? ahead_ : 2 * ahead_;
      if (!mine || step < lag) {
        continue;
      }
      if (const NetSegment* one = segment(p, step - lag)) {
        scatter(*one, staged_out(from, half, p));
      }
    }
  }

  // The sum of what this host's ranks contribute to a segment of another host's
  // rank; after the barrier.
  NetBuffer local_sum(int owner, const NetSegment& one, Stage& stage) {
    const NetBuffer sum = scratch(stage, one.elements * fold_.element());
    begin_local(owner);
    size_t bytes = 0;
    for (const LanePiece& piece : one.pieces) {
      bytes += add_local(piece, sum.data() + bytes);
    }
    return sum.part(0, bytes);
  }

  void begin_local(int owner) {
    const int half = ctx_.domain->half();
    staged_.clear();
    for (const int p : hosts_.ranks(here_)) {
      staged_.push_back(staged_in(p, half, owner));
    }
  }

  // Adds up the next piece of the segment that began, and returns its bytes.
  size_t add_local(const LanePiece& piece, char* sum) {
    char* out = sum;
    parts_.for_places(
        piece, [&](size_t begin, size_t end, const int* who, size_t num) {
          if (num == 0) {
            return;
          }
          sources_.assign(staged_.size(), kZeros);
          for (size_t k = 0; k < num; ++k) {
            const int place = who[k];
            const Neighbour& one = neighbours_[place];
            if (one.rank == rank_ || one.reads_direct) {
              sources_[place] = one.rank == rank_
                  ? source({piece.tensor, begin, 0})
                  : source_of(one, piece.tensor, begin);
              continue;
            }
            sources_[place] = staged_[place];
            staged_[place] += (end - begin) * plan_.src_size;
          }
          fold_.fold(here_, sources_.data(), end - begin, out);
          out += (end - begin) * fold_.element();
        });
    return static_cast<size_t>(out - sum);
  }

  // --- between hosts ---------------------------------------------------------
  // Bytes of an element of what a host contributes.
  size_t sent_size(int host) const {
    return hosts_.ranks(host).size() == 1 ? plan_.src_size : fold_.element();
  }

  void contribute(size_t s) {
    if (!plan_.reads) {
      return;
    }
    Stage& stage = stages_[s];
    if (const NetSegment* mine = segment(rank_, s)) {
      stage.contributions.resize(hosts_.num_hosts());
      each_other_host([&](int h) {
        const size_t bytes = parts_.elements_of(h, *mine) * sent_size(h);
        if (bytes != 0) {
          stage.contributions[h] = net_receive(
              ctx_,
              hosts_.proxy(rank_, h),
              NetKind::kContribution,
              scratch(stage, bytes));
        }
      });
    }
    each_peer([&](int p) {
      const NetSegment* theirs = segment(p, s);
      if (theirs != nullptr && !is_here(p) && worker(p) == rank_) {
        const NetBuffer message = shares_
            ? local_sum(p, *theirs, stage)
            : gathered(parts_.mine(*theirs), stage);
        if (message.bytes() != 0) {
          stage.sends.push_back(
              net_send(ctx_, p, NetKind::kContribution, message));
        }
      }
    });
  }

  // This rank's contribution as one run of bytes.
  NetBuffer gathered(const NetSegment& one, Stage& stage) {
    const size_t bytes = one.elements * plan_.src_size;
    if (in_place(one)) {
      return NetBuffer::borrowed(
          const_cast<char*>(source(one.pieces[0])), bytes);
    }
    const NetBuffer block = scratch(stage, bytes);
    gather(one, block.data());
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
    std::vector<NetBuffer> contributed;
    contributed.swap(stage.scratch);
    if (const NetSegment* mine = segment(rank_, s)) {
      const NetBuffer block = combined(*mine, stage);
      each_other_host([&](int h) {
        const int to = taker(rank_, h);
        if (to >= 0) {
          stage.sends.push_back(net_send(ctx_, to, NetKind::kResult, block));
        }
      });
    }
    release(contributed);
    stage.results.resize(size_);
    each_peer([&](int p) {
      const NetSegment* theirs = segment(p, s);
      if (theirs != nullptr && takes(p)) {
        const size_t bytes = theirs->elements * plan_.dst_size;
        const NetBuffer into = in_place(*theirs)
            ? NetBuffer::borrowed(result(theirs->pieces[0]), bytes)
            : scratch(stage, bytes);
        stage.results[p] = net_receive(ctx_, p, NetKind::kResult, into);
      }
    });
  }

  // Whether other hosts get this rank's results.
  bool sends_results() const {
    return all_ ? hosts_.num_hosts() > 1 : gives_ && !is_here(plan_.receiver);
  }

  // The results as one run of bytes; empty if they stay on this host.
  NetBuffer combined(const NetSegment& mine, Stage& stage) {
    NetBuffer block;
    const bool sends = sends_results();
    const bool packs = sends && !(all_ && in_place(mine));
    if (packs) {
      block = scratch(stage, mine.elements * plan_.dst_size);
    } else if (sends) {
      block = NetBuffer::borrowed(
          result(mine.pieces[0]), mine.elements * plan_.dst_size);
    }
    const bool keeps =
        all_ || plan_.receiver == Plan::kOwner || plan_.receiver == rank_;
    next_.clear();
    for (int h = 0; plan_.reads && h < hosts_.num_hosts(); ++h) {
      next_.push_back(received_[h]);
    }
    const bool adds = shares_ && plan_.reads;
    if (adds) {
      begin_local(rank_);
      local_.resize(block_ * fold_.element());
    }
    const bool staged = publishes_staged(rank_);
    size_t at = 0; // bytes
    const auto emit = [&](const LanePiece& part, const Sources& srcs) {
      outs_.clear();
      if (keeps) {
        outs_.push_back(result(part));
      }
      if (packs) {
        outs_.push_back(block.data() + at);
      }
      each_direct_taker(rank_, [&](const Neighbour& one) {
        outs_.push_back(result_of(one, part.tensor, part.begin));
      });
      if (staged) {
        outs_.push_back(
            staged_out(rank_, ctx_.domain->next_half(), rank_) + at);
      }
      plan_.epilogue(
          part.tensor,
          part.begin,
          part.count,
          outs_.data(),
          outs_.size(),
          srcs,
          /*stream=*/false);
      at += part.count * plan_.dst_size;
    };
    const auto combine_piece = [&](const LanePiece& piece) {
      if (!plan_.reads) {
        emit(piece, {});
      } else if (blocks_ != nullptr && !plan_.zeros_stay) {
        emit(piece, sum_of(piece));
      } else {
        parts_.for_hosts(
            piece, [&](size_t begin, size_t end, const int* who, size_t num) {
              const LanePiece part{piece.tensor, begin, end - begin};
              emit(part, sources(part, who, num, /*widen=*/false));
            });
      }
    };
    for (const LanePiece& piece : mine.pieces) {
      if (!adds) {
        combine_piece(piece);
        continue;
      }
      for (size_t n = 0; n < piece.count; n += block_) {
        const LanePiece part{
            piece.tensor, piece.begin + n, std::min(block_, piece.count - n)};
        add_local(part, local_.data());
        next_[here_] = local_.data();
        combine_piece(part);
      }
    }
    return block;
  }

  // Of a part of this rank's lane to which these hosts contribute; the next one
  // of the segment.
  Sources sources(
      const LanePiece& part,
      const int* hosts,
      size_t num,
      bool widen) {
    const bool as_it_is = fold_.element() == plan_.src_size &&
        plan_.weights.empty(); // also where it is one of several ranks'
    sources_.clear();
    for (size_t k = 0; k < num; ++k) {
      const int h = hosts[k];
      const bool own = h == here_ && !shares_;
      const void* from = own ? source(part) : next_[h];
      next_[h] += own ? 0 : part.count * sent_size(h);
      if (hosts_.ranks(h).size() == 1 &&
          !(widen ? as_it_is : fold_.is_contribution(h))) {
        widened_[h].resize(capacity_);
        fold_.fold(h, &from, part.count, widened_[h].data());
        from = widened_[h].data();
      }
      sources_.push_back(from);
    }
    if (num < static_cast<size_t>(hosts_.num_hosts())) {
      sources_.push_back(kZeros);
    }
    return {sources_.data(), sources_.size(), widen || !fold_.plain()};
  }

  // What all hosts' contributions to a piece come to, zeros included: an
  // epilogue may need pieces that are longer than blocks.
  Sources sum_of(const LanePiece& piece) {
    kernels::ReduceArgs add;
    add.dtype = wide_type(plan_.src_type, plan_.op);
    sum_.resize(piece.count * fold_.element());
    parts_.for_hosts(
        piece, [&](size_t begin, size_t end, const int* who, size_t num) {
          void* to = sum_.data() + (begin - piece.begin) * fold_.element();
          const LanePiece part{piece.tensor, begin, end - begin};
          const Sources all = sources(part, who, num, /*widen=*/true);
          ctx_.kernels.reduce(
              add, &to, 1, all.data, all.num, part.count, false);
        });
    sources_.assign(1, sum_.data());
    return {sources_.data(), 1, true};
  }

  void finish(size_t s) {
    Stage& stage = stages_[s];
    const std::vector<NetPending> results = std::move(stage.results);
    each_peer([&](int p) {
      if (!results[p].request) {
        return;
      }
      const NetSegment& theirs = *segment(p, s);
      results[p].request->wait(ctx_.deadline);
      const char* from = results[p].buffer.data();
      if (!in_place(theirs)) {
        scatter(theirs, from);
      }
      each_direct_taker(p, [&](const Neighbour& one) {
        const char* next = from;
        for (const LanePiece& piece : theirs.pieces) {
          const size_t bytes = piece.count * plan_.dst_size;
          std::memcpy(result_of(one, piece.tensor, piece.begin), next, bytes);
          next += bytes;
        }
      });
      if (publishes_staged(p)) {
        std::memcpy(
            staged_out(rank_, ctx_.domain->next_half(), p),
            from,
            results[p].buffer.bytes());
      }
    });
    wait(stage.sends);
    release(stage.scratch);
  }

  NetContext& ctx_;
  const Plan& plan_;
  const OpDescriptor& descriptor_;
  const NetBlocks* blocks_;
  NetParts parts_;
  const HostMap& hosts_;
  HostFold fold_;
  const int rank_;
  const int size_;
  const int here_; // host
  const bool shares_; // this host with others
  const bool all_; // get results
  const bool gives_; // results to anybody but their owners
  bool own_direct_ = false; // this rank's contributions lie in its arena
  std::vector<Neighbour> neighbours_; // of this host, itself included; by place
  // Whether any of them has its contributions read where they lie; has them
  // staged; takes staged results.
  bool reads_direct_ = false;
  bool stages_in_ = false;
  bool stages_out_ = false;
  std::vector<std::vector<NetSegment>> lanes_; // by owner
  size_t length_ = 0; // of the longest lane
  // Most segments between a rank's contribution and its being combined, and
  // between that and the arrival of results.
  size_t ahead_ = 0;
  std::vector<Stage> stages_;
  NetBuffers own_buffers_;
  NetBuffers& buffers_;
  size_t capacity_ = 0; // of each of these, in bytes
  size_t segment_bytes_ = 0;
  size_t block_ = 0; // elements that are combined at once
  std::vector<const char*> staged_; // the next contribution, by place
  std::vector<char> local_; // sums of this host's ranks, of one block
  std::vector<const void*> sources_; // of one piece
  std::vector<void*> outs_; // of one piece
  std::vector<const char*> received_; // of one stage, by host
  std::vector<const char*> next_; // of these
  std::vector<char> sum_; // of one piece
  std::vector<std::vector<char>> widened_; // by host
};

} // namespace

void net_together(NetContext& ctx, const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    // Receives into tensors may still be posted, and neighbours wait at a
    // barrier, whatever kind of error it is.
    ctx.transport.abort();
    if (ctx.domain != nullptr) {
      const auto* ours = dynamic_cast<const Error*>(&error);
      ctx.domain->mark_failed(
          ours != nullptr ? *ours : Error(ErrorKind::kSystem, error.what()));
    }
    throw;
  }
}

void net_pipeline(
    NetContext& ctx,
    const Plan& plan,
    const OpDescriptor& d,
    const NetBlocks* blocks) {
  net_together(ctx, [&] { Pipeline(ctx, plan, d, blocks).run(); });
}

} // namespace fusedpg
