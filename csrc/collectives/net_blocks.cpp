#include "collectives/net_blocks.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

namespace fusedpg {

namespace {

class Sharer {
 public:
  Sharer(NetContext& ctx, const Plan& plan, const OpDescriptor& d)
      : ctx_(ctx),
        plan_(plan),
        descriptor_(d),
        map_(*ctx.hosts),
        rank_(ctx.transport.rank()),
        size_(ctx.transport.size()),
        here_(map_.host(rank_)),
        places_(static_cast<int>(map_.ranks(here_).size())),
        found_{
            BlockMap(plan.counts(), plan.skip->block, places_),
            BlockMap(plan.counts(), plan.skip->block, map_.num_hosts()),
            BlockMap(plan.counts(), plan.skip->block, 1)} {}

  NetBlocks run(const OwnBlocks& own) {
    found_.local.load(map_.local(rank_), own.bits.data());
    share(own.bits, [&](int place, const std::vector<uint64_t>& theirs) {
      found_.local.load(place, theirs.data());
    });
    exchange_contributions();
    exchange_results();
    ctx_.moved.blocks += own.blocks;
    ctx_.moved.blocks_present +=
        found_.local.present_blocks(map_.local(rank_)) - own.unseen;
    ctx_.moved.blocks_union +=
        found_.all.present_blocks(BlockMap::kAny) - own.unseen;
    return std::move(found_);
  }

 private:
  // Who on this host works for a rank of another one.
  bool works_for(int owner) const {
    return map_.host(owner) != here_ && map_.proxy(owner, here_) == rank_;
  }
  // Calls fn(word, mask) for the words in which blocks of a lane are; the mask
  // has their bits. A block of two lanes counts for both.
  template <typename Fn>
  void for_words(int owner, const Fn& fn) const;
  size_t num_words(int owner) const;
  // The words of an owner's lane, one after the other.
  void send(int to, NetKind kind, int owner, const uint64_t* words);
  NetPending receive(int from, NetKind kind, int owner);
  // Sets the lane's bits in `words` that have come.
  void take(NetPending& pending, int owner, std::vector<uint64_t>& words) const;
  void wait_for_sends();
  // Calls fn(place, words) with what each other rank of this host has.
  void share(
      const std::vector<uint64_t>& mine,
      const std::function<void(int, const std::vector<uint64_t>&)>& fn);

  void exchange_contributions();
  void exchange_results();

  NetContext& ctx_;
  const Plan& plan_;
  const OpDescriptor& descriptor_;
  const HostMap& map_;
  const int rank_;
  const int size_;
  const int here_; // host
  const int places_; // on it
  NetBlocks found_;
  std::vector<NetPending> sends_;
};

template <typename Fn>
void Sharer::for_words(int owner, const Fn& fn) const {
  constexpr uint64_t kOnes = ~uint64_t(0);
  for (const LanePiece& piece : plan_.lanes[owner]) {
    const size_t first = piece.begin / found_.all.block();
    const size_t last = (piece.begin + piece.count - 1) / found_.all.block();
    for (size_t w = first / 64; w <= last / 64; ++w) {
      const uint64_t from = w == first / 64 ? kOnes << (first % 64) : kOnes;
      const uint64_t to = w == last / 64 ? kOnes >> (63 - last % 64) : kOnes;
      fn(found_.all.first_word(piece.tensor) + w, from & to);
    }
  }
}

size_t Sharer::num_words(int owner) const {
  size_t n = 0;
  for_words(owner, [&](size_t /* word */, uint64_t /* mask */) { ++n; });
  return n;
}

void Sharer::send(int to, NetKind kind, int owner, const uint64_t* words) {
  const size_t n = num_words(owner);
  if (n == 0) {
    return;
  }
  NetBuffer message(n * sizeof(uint64_t));
  auto* out = reinterpret_cast<uint64_t*>(message.data());
  for_words(
      owner, [&](size_t word, uint64_t mask) { *out++ = words[word] & mask; });
  sends_.push_back(net_send(ctx_, to, kind, message));
}

NetPending Sharer::receive(int from, NetKind kind, int owner) {
  const size_t n = num_words(owner);
  return n == 0
      ? NetPending()
      : net_receive(ctx_, from, kind, NetBuffer(n * sizeof(uint64_t)));
}

void Sharer::take(NetPending& pending, int owner, std::vector<uint64_t>& words)
    const {
  if (!pending.request) {
    return;
  }
  pending.request->wait(ctx_.deadline);
  const auto* in = reinterpret_cast<const uint64_t*>(pending.buffer.data());
  for_words(
      owner, [&](size_t word, uint64_t mask) { words[word] |= *in++ & mask; });
}

void Sharer::wait_for_sends() {
  for (NetPending& one : sends_) {
    one.request->wait(ctx_.deadline);
  }
  sends_.clear();
}

void Sharer::share(
    const std::vector<uint64_t>& mine,
    const std::function<void(int, const std::vector<uint64_t>&)>& fn) {
  if (places_ == 1) {
    return;
  }
  Domain& domain = *ctx_.domain;
  const int me = map_.local(rank_);
  const size_t most = domain.stage_bytes() / sizeof(uint64_t);
  std::vector<std::vector<uint64_t>> theirs(
      places_, std::vector<uint64_t>(mine.size()));
  for (size_t begin = 0; begin < mine.size(); begin += most) {
    const size_t bytes = std::min(most, mine.size() - begin) * sizeof(uint64_t);
    std::memcpy(
        domain.stage_in(me, domain.next_half()), mine.data() + begin, bytes);
    domain.barrier(descriptor_, ctx_.deadline);
    for (size_t p = 0; p < theirs.size(); ++p) {
      std::memcpy(
          theirs[p].data() + begin,
          domain.stage_in(static_cast<int>(p), domain.half()),
          bytes);
    }
  }
  for (int p = 0; p < static_cast<int>(theirs.size()); ++p) {
    if (p != me) {
      fn(p, theirs[p]);
    }
  }
}

// Hosts tell every owner which blocks of its lane they have.
void Sharer::exchange_contributions() {
  const uint64_t* here = found_.local.bits(BlockMap::kAny);
  std::vector<NetPending> arriving(map_.num_hosts());
  for (int h = 0; h < map_.num_hosts(); ++h) {
    if (h != here_) {
      const int from = map_.proxy(rank_, h);
      arriving[h] = receive(from, NetKind::kBitmap, rank_);
    }
  }
  for (int p = 0; p < size_; ++p) {
    if (works_for(p)) {
      send(p, NetKind::kBitmap, p, here);
    }
  }
  found_.hosts.load(here_, here);
  for (int h = 0; h < map_.num_hosts(); ++h) {
    if (h != here_) {
      std::vector<uint64_t> words(found_.hosts.words());
      take(arriving[h], rank_, words);
      found_.hosts.load(h, words.data());
    }
  }
  wait_for_sends();
}

// Owners tell every host which blocks of their lanes anybody has.
void Sharer::exchange_results() {
  std::vector<NetPending> arriving(size_);
  for (int p = 0; p < size_; ++p) {
    if (works_for(p)) {
      arriving[p] = receive(p, NetKind::kUnion, p);
    }
  }
  const uint64_t* any = found_.hosts.bits(BlockMap::kAny);
  for (int h = 0; h < map_.num_hosts(); ++h) {
    if (h != here_) {
      send(map_.proxy(rank_, h), NetKind::kUnion, rank_, any);
    }
  }
  std::vector<uint64_t> words(found_.all.words());
  for_words(rank_, [&](size_t word, uint64_t mask) {
    words[word] |= any[word] & mask;
  });
  for (int p = 0; p < size_; ++p) {
    take(arriving[p], p, words);
  }
  const std::vector<uint64_t> mine = words;
  share(mine, [&](int /* place */, const std::vector<uint64_t>& theirs) {
    for (size_t w = 0; w < words.size(); ++w) {
      words[w] |= theirs[w];
    }
  });
  found_.all.load(0, words.data());
  wait_for_sends();
}

} // namespace

OwnBlocks find_own_blocks(
    OpContext& ctx,
    const Plan& plan,
    const std::function<bool(size_t tensor)>& looks) {
  const std::vector<size_t> counts = plan.counts();
  const BlockMap map(counts, plan.skip->block, 1);
  OwnBlocks own;
  own.bits.resize(map.words());
  for (size_t t = 0; t < counts.size(); ++t) {
    uint64_t* bits = own.bits.data() + map.first_word(t);
    const size_t blocks = (counts[t] + map.block() - 1) / map.block();
    if (looks(t)) {
      // Blocks that are left out become zeros in the tensor itself.
      char* data = const_cast<char*>(plan.tensors[t].src);
      find_blocks(
          ctx.kernels,
          ctx.pool,
          {data, counts[t]},
          plan.src_type,
          *plan.skip,
          bits);
      own.blocks += blocks;
      continue;
    }
    own.unseen += blocks;
    for (size_t b = 0; b < blocks; ++b) {
      bits[b / 64] |= uint64_t(1) << (b % 64);
    }
  }
  return own;
}

NetBlocks share_blocks(
    NetContext& ctx,
    const Plan& plan,
    const OwnBlocks& own,
    const OpDescriptor& d) {
  return Sharer(ctx, plan, d).run(own);
}

} // namespace fusedpg
