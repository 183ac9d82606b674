#include "collectives/net_moves.hpp"

#include <algorithm>
#include <cstring>
#include <deque>
#include <optional>

#include "collectives/locations.hpp"
#include "collectives/net_pipeline.hpp"
#include "collectives/selector.hpp"

namespace fusedpg {
namespace {

constexpr size_t kWord = sizeof(uint64_t);

// What else a rank says: a table, and maybe data. Of reductions that comes
// later.
bool says_more(const OpDescriptor& d) {
  return d.table_entries != 0 && (moves(d.op) || (d.flags & kRefused) != 0);
}

// In two messages, as every operation begins with a descriptor, so that those
// who are in another one hear of it.
void tell(
    NetContext& ctx,
    int to,
    OpDescriptor d,
    const NetBuffer& more,
    std::vector<NetPending>& sends) {
  d.table_entries = more.bytes() / kWord;
  const NetBuffer said(sizeof d);
  std::memcpy(said.data(), &d, sizeof d);
  sends.push_back(net_send(ctx, to, NetKind::kBlock, said));
  if (more.bytes() != 0) {
    sends.push_back(net_send(ctx, to, NetKind::kTable, more));
  }
}

class NetMover {
 public:
  NetMover(NetContext& ctx, const Move& move, OpDescriptor& d)
      : ctx_(ctx),
        move_(move),
        d_(d),
        me_(ctx.transport.rank()),
        size_(ctx.transport.size()),
        apart_(HostMap::apart(ctx.hosts == nullptr ? size_ : 0)),
        hosts_(ctx.hosts == nullptr ? apart_ : *ctx.hosts),
        said_(size_),
        more_(size_) {}

  void run() {
    meet();
    check();
    const Span own = move_.send_to(me_);
    copy(move_.recvs[me_].data, own.data, own.bytes);
    net_together(ctx_, [&] { transfer(); });
    ctx_.stats.add(d_.op, DataPath::kMessages, ctx_.moved);
  }

 private:
  void transfer() {
    plan();
    const size_t steps = (longest_ + segment_ - 1) / segment_;
    for (size_t s = 0; longest_ != 0 && s < steps + kNetAhead; ++s) {
      if (s < steps) {
        begin(s);
      }
      if (s >= kNetAhead) {
        finish(s - kNetAhead);
      }
    }
    if (direct_) {
      // Neighbours may still read or write this rank's tensors.
      ctx_.domain->barrier(d_, ctx_.deadline);
    }
    for (auto& [step, one] : sends_) {
      one.request->wait(ctx_.deadline);
    }
    for (NetPending& one : told_) {
      one.request->wait(ctx_.deadline);
    }
  }

  // --- agreeing --------------------------------------------------------------
  uint64_t sends(int from, int to) const {
    return word(from, to);
  }
  uint64_t expects(int to, int from) const {
    return word(to, size_ + from);
  }
  uint64_t word(int rank, int index) const {
    uint64_t value = 0;
    std::memcpy(&value, more_[rank].data() + index * kWord, kWord);
    return value;
  }
  size_t row_bytes() const {
    return 2 * static_cast<size_t>(size_) * kWord;
  }
  bool came_along(int from) const {
    return (said_[from].flags & kStaged) != 0;
  }

  NetBuffer row(bool with_data, int to) const {
    const Span send = with_data ? move_.send_to(to) : Span{};
    const size_t padded = (send.bytes + kWord - 1) / kWord * kWord;
    const NetBuffer row(row_bytes() + padded);
    for (int p = 0; p < size_; ++p) {
      const uint64_t words[] = {move_.send_to(p).bytes, move_.recvs[p].bytes};
      std::memcpy(row.data() + p * kWord, &words[0], kWord);
      std::memcpy(row.data() + (size_ + p) * kWord, &words[1], kWord);
    }
    if (send.bytes != 0) {
      std::memcpy(row.data() + row_bytes(), send.data, send.bytes);
      std::memset(
          row.data() + row_bytes() + send.bytes, 0, padded - send.bytes);
    }
    return row;
  }

  void meet() {
    ctx_.identify(d_);
    size_t all = 0;
    size_t longest = 0;
    for (int p = 0; p < size_; ++p) {
      if (p != me_) {
        all += move_.send_to(p).bytes;
        longest = std::max(longest, move_.send_to(p).bytes);
      }
    }
    const bool with_data = select_net_inline(all, longest);
    d_.flags |= with_data ? kStaged : 0;
    said_[me_] = d_;
    more_[me_] = row(false, me_);
    std::vector<NetPending> facts(size_);
    std::optional<NetBuffer> same;
    for (int k = 1; k < size_; ++k) {
      const int p = (me_ + k) % size_;
      facts[p] = net_receive(
          ctx_, p, NetKind::kBlock, NetBuffer(sizeof(OpDescriptor)));
      if (!same || !move_.shared) {
        same = row(with_data, p);
      }
      tell(ctx_, p, d_, *same, told_);
    }
    for (int p = 0; p < size_; ++p) {
      if (p == me_) {
        continue;
      }
      facts[p].request->wait(ctx_.deadline);
      std::memcpy(&said_[p], facts[p].buffer.data(), sizeof(OpDescriptor));
      if (says_more(said_[p])) {
        NetPending more = net_receive(
            ctx_,
            p,
            NetKind::kTable,
            NetBuffer(said_[p].table_entries * kWord));
        more.request->wait(ctx_.deadline);
        more_[p] = more.buffer;
      }
    }
  }

  // All ranks compare everything, so all of them throw or none does.
  void check() {
    check_said(
        d_,
        me_,
        size_,
        [this](int p) -> const OpDescriptor& { return said_[p]; },
        [this](int p) { return std::string(more_[p].data()); });
    for (int from = 0; from < size_; ++from) {
      for (int to = 0; to < size_; ++to) {
        check_sizes(d_, from, to, sends(from, to), expects(to, from));
      }
    }
  }

  // --- who sends what to whom ------------------------------------------------
  struct Flow {
    int peer; // in the group; of what goes through the stage, in the domain
    int lane = 0; // of the stage
    Span data;
    bool passed_on = false; // it has to arrive first
  };
  // Between tensors of two ranks of this host, of which one lies in the arena.
  struct Copy {
    char* to;
    Span data;
    bool passed_on = false;
  };

  void plan() {
    std::vector<int> owners; // of what did not come along
    for (int from = 0; from < size_; ++from) {
      if (came_along(from)) {
        if (from != me_) {
          copy(
              move_.recvs[from].data,
              more_[from].data() + row_bytes(),
              move_.recvs[from].bytes);
        }
        continue;
      }
      uint64_t most = 0;
      for (int to = 0; to < size_; ++to) {
        most = std::max(most, to == from ? 0 : sends(from, to));
      }
      if (most != 0) {
        owners.push_back(from);
        longest_ = std::max<size_t>(longest_, most);
      }
    }
    if (ctx_.domain != nullptr && longest_ != 0) {
      publish(*ctx_.domain, d_, locate(move_, *ctx_.domain->arena()));
      ctx_.domain->barrier(d_, ctx_.deadline);
      places_ = published(*ctx_.domain);
    }
    const NetSpread spread = move_.shared && owners.size() == 1
        ? select_net_spread(longest_, hosts_.num_hosts())
        : NetSpread::kDirect;
    segment_ = select_move_segment(longest_, size_, hosts_.num_hosts(), spread);
    // Everybody begins with another peer.
    for (const int from : owners) {
      if (move_.shared) {
        share(from, spread);
      } else {
        for (int k = 1; k < size_; ++k) {
          pair(from, (from + k) % size_);
        }
      }
    }
  }

  // What a rank has for all.
  void share(int owner, NetSpread spread) {
    const Span data = owner == me_ ? move_.sends[0] : move_.recvs[owner];
    const int home = hosts_.host(owner);
    const int count = hosts_.num_hosts();
    for (int k = 1; k < count; ++k) {
      const int before =
          spread == NetSpread::kChain ? (home + k - 1) % count : home;
      const int from = hosts_.proxy(owner, before);
      const int to = hosts_.proxy(owner, (home + k) % count);
      if (to == me_) {
        ins_.push_back({from, 0, data});
      }
      if (from == me_) {
        outs_.push_back({to, 0, data, owner != me_});
      }
    }
    const int here = hosts_.host(me_);
    const int writer = hosts_.proxy(owner, here);
    for (const int taker : hosts_.ranks(here)) {
      if (taker != writer) {
        pass(writer, taker, owner, owner, data);
      }
    }
  }

  // Ranks of a host read and write each other's tensors that lie in an arena; the
  // rest goes through the writer's staging buffer.
  void pass(int writer, int taker, int owner, int lane, const Span& data) {
    const bool arrives = owner != writer; // from another host
    const uint64_t source = arrives ? kNotInArena : place_of_send(owner, taker);
    const uint64_t target = place_of_recv(taker, owner);
    if (source != kNotInArena) {
      direct_ = true;
      if (taker == me_) {
        char* from = address(writer, source);
        pulls_.push_back({static_cast<char*>(data.data), {from, data.bytes}});
      }
      return;
    }
    if (target != kNotInArena) {
      direct_ = true;
      if (writer == me_) {
        pushes_.push_back({address(taker, target), data, arrives});
      }
      return;
    }
    const size_t bytes = sends(owner, taker);
    local_ = std::max(local_, (bytes + segment_ - 1) / segment_);
    if (taker == me_) {
      reads_.push_back({hosts_.local(writer), lane, data});
    } else if (
        writer == me_ && (writes_.empty() || writes_.back().lane != lane)) {
      writes_.push_back({0, lane, data, arrives});
    }
  }

  uint64_t place_of_send(int from, int to) const {
    return told(from, move_.shared ? 0 : to);
  }
  uint64_t place_of_recv(int to, int from) const {
    return told(to, move_.sends.size() + from);
  }
  uint64_t told(int rank, size_t index) const {
    const std::vector<uint64_t>& table = places_[hosts_.local(rank)].table;
    return table.empty() ? kNotInArena : table[index];
  }
  char* address(int rank, uint64_t place) const {
    return ctx_.domain->address(hosts_.local(rank), place);
  }

  void pair(int from, int to) {
    const size_t bytes = sends(from, to);
    if (bytes == 0) {
      return;
    }
    const bool here = hosts_.host(from) == hosts_.host(me_);
    if (here && hosts_.host(to) == hosts_.host(me_)) {
      pass(
          from,
          to,
          from,
          to,
          from == me_ ? move_.sends[to] : move_.recvs[from]);
    } else if (from == me_) {
      outs_.push_back({to, 0, move_.sends[to]});
    } else if (to == me_) {
      ins_.push_back({from, 0, move_.recvs[from]});
    }
  }

  // --- the transfer ----------------------------------------------------------
  Span part(const Span& whole, size_t step) const {
    const size_t begin = std::min(step * segment_, whole.bytes);
    return {
        static_cast<char*>(whole.data) + begin,
        std::min(segment_, whole.bytes - begin)};
  }
  static NetBuffer buffer(const Span& span) {
    return NetBuffer::borrowed(static_cast<char*>(span.data), span.bytes);
  }
  void copy(void* to, const void* from, size_t bytes) {
    if (to != from && bytes != 0) {
      ctx_.kernels.copy(to, from, bytes, false);
    }
  }

  void begin(size_t s) {
    std::vector<NetPending> receives;
    for (const Flow& in : ins_) {
      if (const Span one = part(in.data, s); one.bytes != 0) {
        receives.push_back(
            net_receive(ctx_, in.peer, NetKind::kMove, buffer(one)));
      }
    }
    receives_.push_back(std::move(receives));
    send(s, false, s);
  }

  void send(size_t s, bool passed_on, size_t needed_at) {
    for (const Flow& out : outs_) {
      const Span one = part(out.data, s);
      if (out.passed_on == passed_on && one.bytes != 0) {
        sends_.emplace_back(
            needed_at, net_send(ctx_, out.peer, NetKind::kMove, buffer(one)));
      }
    }
  }

  void finish(size_t s) {
    const int half = s < local_ ? ctx_.domain->next_half() : 0;
    stage(s, half, false);
    copy_direct(s, pulls_, false);
    copy_direct(s, pushes_, false);
    for (NetPending& one : receives_.front()) {
      one.request->wait(ctx_.deadline);
    }
    receives_.pop_front();
    send(s, true, s + kNetAhead);
    stage(s, half, true);
    copy_direct(s, pushes_, true);
    if (s < local_) {
      ctx_.domain->barrier(d_, ctx_.deadline);
      for (const Flow& read : reads_) {
        const Span one = part(read.data, s);
        copy(one.data, place(read.peer, read.lane, half), one.bytes);
      }
    }
    // By step: a receiver has posted this one before it can need the next ones.
    while (!sends_.empty() && sends_.front().first <= s) {
      sends_.front().second.request->wait(ctx_.deadline);
      sends_.pop_front();
    }
  }

  void copy_direct(size_t s, const std::vector<Copy>& copies, bool passed_on) {
    for (const Copy& one : copies) {
      if (one.passed_on == passed_on) {
        const Span from = part(one.data, s);
        copy(
            one.to + std::min(s * segment_, one.data.bytes),
            from.data,
            from.bytes);
      }
    }
  }

  char* place(int local, int lane, int half) const {
    return ctx_.domain->stage_in(local, half) +
        static_cast<size_t>(lane) * segment_;
  }

  void stage(size_t s, int half, bool passed_on) {
    for (const Flow& write : writes_) {
      const Span one = part(write.data, s);
      if (write.passed_on == passed_on) {
        copy(place(ctx_.domain->rank(), write.lane, half), one.data, one.bytes);
      }
    }
  }

  NetContext& ctx_;
  const Move& move_;
  OpDescriptor& d_;
  const int me_;
  const int size_;
  const HostMap apart_;
  const HostMap& hosts_;
  std::vector<OpDescriptor> said_; // by rank
  std::vector<NetBuffer> more_;
  std::vector<NetPending> told_;

  size_t longest_ = 0; // bytes that one rank sends to another
  size_t segment_ = 0;
  size_t local_ = 0; // segments that go through the stages of this host
  std::vector<Flow> ins_, outs_, writes_, reads_;
  std::vector<Locations> places_; // of this host's ranks' tensors
  std::vector<Copy> pulls_, pushes_;
  bool direct_ = false; // some of this host's ranks read or write so
  std::deque<std::vector<NetPending>> receives_; // by step
  // With the step in which they must be over.
  std::deque<std::pair<size_t, NetPending>> sends_;
};

} // namespace

void net_move(NetContext& ctx, const Move& move, OpDescriptor& d) {
  try {
    NetMover(ctx, move, d).run();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kMismatch &&
        error.kind() != ErrorKind::kInvalid && ctx.entered) {
      ctx.transport.end(); // receives into tensors may be posted
    }
    throw;
  } catch (...) {
    if (ctx.entered) { // or this rank can still refuse
      ctx.transport.end();
    }
    throw;
  }
}

void net_refuse(NetContext& ctx, const std::string& reason) {
  OpDescriptor d;
  d.flags = kRefused;
  ctx.identify(d);
  const NetBuffer more((reason.size() / kWord + 1) * kWord);
  std::memset(more.data(), 0, more.bytes());
  std::memcpy(more.data(), reason.data(), reason.size());
  std::vector<NetPending> sends;
  for (int p = 0; p < ctx.transport.size(); ++p) {
    if (p != ctx.transport.rank()) {
      tell(ctx, p, d, more, sends);
    }
  }
  for (NetPending& one : sends) {
    one.request->wait(ctx.deadline);
  }
}

} // namespace fusedpg
