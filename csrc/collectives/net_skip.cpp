#include "collectives/net_skip.hpp"

#include <algorithm>
#include <cstring>

#include "base/ownership.hpp"

namespace fusedpg {

using Kind = NetKind;
using Pending = NetPending;

NetSkip::NetSkip(
    NetContext& ctx,
    const ReduceTensor& tensor,
    DType dtype,
    RedOp op,
    const SkipOptions& options,
    bool gives)
    : ctx_(ctx),
      tensor_(tensor),
      dtype_(dtype),
      fold_(ctx.kernels, *ctx.hosts, dtype, op),
      options_(options),
      gives_(gives),
      rank_(ctx.transport.rank()),
      size_(ctx.transport.size()),
      element_(dtype_size(dtype)),
      segment_(
          std::max(
              kNetSegment / element_ / options.block * options.block,
              options.block)),
      map_({tensor.count}, options.block, size_),
      results_({tensor.count}, options.block, 1) {
  for (int p = 0; p < size_; ++p) {
    const ShardRange r =
        shard_range(static_cast<int64_t>(tensor.count), size_, p);
    lanes_.push_back(
        {0, static_cast<size_t>(r.offset), static_cast<size_t>(r.length)});
    const size_t segments = (lanes_[p].count + segment_ - 1) / segment_;
    steps_ = std::max(steps_, segments);
  }
}

void NetSkip::find() {
  std::vector<uint64_t> mine(map_.words());
  find_blocks(ctx_.kernels, ctx_.pool, tensor_, dtype_, options_, mine.data());
  map_.load(rank_, mine.data());
  exchange_bitmaps(mine);
  exchange_unions();
  ctx_.moved.blocks += map_.blocks();
  ctx_.moved.blocks_present += map_.present_blocks(rank_);
  ctx_.moved.blocks_union += results_.present_blocks(BlockMap::kAny);
}

void NetSkip::run(const Plan::Epilogue& epilogue) {
  // Contributions of segment s, results of s - kNetWindow, and what arrives
  // of s - 2 kNetWindow.
  for (size_t s = 0; s < steps_ + 2 * kNetWindow; ++s) {
    if (s < steps_) {
      contribute(s);
    }
    if (s >= kNetWindow && s - kNetWindow < steps_) {
      reduce(s - kNetWindow, epilogue);
    }
    if (gives_ && s >= 2 * kNetWindow) {
      take_results(s - 2 * kNetWindow);
    }
  }
  wait_for_sends(0);
}

void NetSkip::send(int to, Kind kind, const NetBuffer& message) {
  sends_.push_back(net_send(ctx_, to, kind, message));
  wait_for_sends(4 * kNetWindow * static_cast<size_t>(size_));
}

// Until at most `left` are under way.
void NetSkip::wait_for_sends(size_t left) {
  while (sends_.size() > left) {
    sends_.front().request->wait(ctx_.deadline);
    sends_.pop_front();
  }
}

Pending NetSkip::receive(int from, Kind kind, size_t bytes) {
  return net_receive(ctx_, from, kind, NetBuffer(bytes));
}

NetSkip::Words NetSkip::words_of(int owner) const {
  const LanePiece& lane = lanes_[owner];
  if (lane.count == 0) {
    return {0, 0};
  }
  const size_t first = lane.begin / options_.block / 64;
  const size_t last = (lane.begin + lane.count - 1) / options_.block / 64;
  return {first, last + 1 - first};
}

// Every rank tells every owner which blocks of its lane it has.
void NetSkip::exchange_bitmaps(const std::vector<uint64_t>& mine) {
  std::vector<Pending> bitmaps(size_);
  const Words own = words_of(rank_);
  for (int p = 0; p < size_; ++p) {
    const Words words = words_of(p);
    if (p == rank_) {
      continue;
    }
    if (words.count != 0) {
      NetBuffer bits(words.count * sizeof(uint64_t));
      std::memcpy(bits.data(), mine.data() + words.first, bits.bytes());
      send(p, Kind::kBitmap, std::move(bits));
    }
    if (own.count != 0) {
      bitmaps[p] = receive(p, Kind::kBitmap, own.count * sizeof(uint64_t));
    }
  }
  std::vector<uint64_t> bits(map_.words());
  for (int p = 0; p < size_; ++p) {
    if (bitmaps[p].request) {
      bitmaps[p].request->wait(ctx_.deadline);
      std::memcpy(
          bits.data() + own.first,
          bitmaps[p].buffer.data(),
          bitmaps[p].buffer.bytes());
      map_.load(p, bits.data());
    }
  }
}

// Every owner tells everybody which blocks of its lane any rank has.
void NetSkip::exchange_unions() {
  std::vector<Pending> unions(size_);
  // Words at the ends of a lane also have bits of other lanes: only those of
  // blocks in the lane count.
  const auto masked = [&](int owner, const uint64_t* from) {
    std::vector<uint64_t> bits(results_.words());
    const LanePiece& lane = lanes_[owner];
    const Words words = words_of(owner);
    for (size_t b = lane.begin / options_.block;
         lane.count > 0 && b * options_.block < lane.begin + lane.count;
         ++b) {
      const uint64_t bit = from[b / 64 - words.first] >> (b % 64) & 1;
      bits[b / 64] |= bit << (b % 64);
    }
    return bits;
  };
  const Words own = words_of(rank_);
  for (int p = 0; p < size_; ++p) {
    if (p == rank_) {
      continue;
    }
    if (own.count != 0) {
      NetBuffer bits(own.count * sizeof(uint64_t));
      std::memcpy(
          bits.data(), map_.bits(BlockMap::kAny) + own.first, bits.bytes());
      send(p, Kind::kUnion, std::move(bits));
    }
    if (words_of(p).count != 0) {
      unions[p] =
          receive(p, Kind::kUnion, words_of(p).count * sizeof(uint64_t));
    }
  }
  lane_maps_.reserve(size_);
  for (int p = 0; p < size_; ++p) {
    std::vector<uint64_t> words(words_of(p).count);
    if (p == rank_) {
      std::copy_n(
          map_.bits(BlockMap::kAny) + own.first, own.count, words.begin());
    } else if (!words.empty()) {
      unions[p].request->wait(ctx_.deadline);
      std::memcpy(
          words.data(), unions[p].buffer.data(), unions[p].buffer.bytes());
    }
    const std::vector<uint64_t> bits = masked(p, words.data());
    results_.load(0, bits.data());
    lane_maps_.emplace_back(
        std::vector<size_t>{tensor_.count}, options_.block, 1);
    lane_maps_.back().load(0, bits.data());
  }
}

LanePiece NetSkip::segment(int owner, size_t s) const {
  const LanePiece& lane = lanes_[owner];
  const size_t begin = std::min(s * segment_, lane.count);
  return {0, lane.begin + begin, std::min(segment_, lane.count - begin)};
}

void NetSkip::contribute(size_t s) {
  const LanePiece own = segment(rank_, s);
  std::vector<Pending> arrivals(size_);
  for (int k = 1; k < size_; ++k) {
    // Everybody begins with another peer.
    const int to = (rank_ + k) % size_;
    const int from = (rank_ + size_ - k) % size_;
    const LanePiece theirs = segment(to, s);
    const size_t bytes = map_.present_elements(rank_, theirs) * element_;
    if (bytes != 0) {
      NetBuffer message(bytes);
      char* out = message.data();
      map_.for_present(rank_, theirs, [&](size_t begin, size_t end) {
        const size_t run = (end - begin) * element_;
        std::memcpy(out, at(begin), run);
        out += run;
      });
      send(to, Kind::kContribution, std::move(message));
    }
    const size_t wanted = map_.present_elements(from, own) * element_;
    if (wanted != 0) {
      arrivals[from] = receive(from, Kind::kContribution, wanted);
    }
  }
  contributions_.push_back(std::move(arrivals));
}

void NetSkip::reduce(size_t s, const Plan::Epilogue& epilogue) {
  std::vector<Pending> arrived = std::move(contributions_.front());
  contributions_.pop_front();
  for (Pending& p : arrived) {
    if (p.request) {
      p.request->wait(ctx_.deadline);
    }
  }
  const LanePiece own = segment(rank_, s);
  const BlockMap& lane = lane_maps_[rank_];
  const size_t present =
      gives_ ? lane.present_elements(BlockMap::kAny, own) : 0;
  NetBuffer result(present * element_);
  std::vector<const char*> next(size_); // what of a peer comes next
  for (int p = 0; p < size_; ++p) {
    next[p] = arrived[p].buffer.data();
  }
  char* out = result.data();
  std::vector<const void*> srcs(size_); // null: zeros
  map_.for_contributors(
      own, [&](size_t begin, size_t end, const int* ranks, size_t num) {
        if (num == 0) {
          return;
        }
        const bool all = num == map_.size();
        const size_t most = all ? end - begin : kZeroBytes / element_;
        for (size_t from = begin; from < end; from += most) {
          const size_t n = std::min(most, end - from);
          std::fill(srcs.begin(), srcs.end(), nullptr);
          for (size_t k = 0; k < num; ++k) {
            const int p = ranks[k];
            srcs[p] = p == rank_ ? at(from) : next[p];
            next[p] += p == rank_ ? 0 : n * element_;
          }
          void* dsts[] = {at(from), out};
          out += gives_ ? n * element_ : 0;
          epilogue(
              0,
              from,
              n,
              dsts,
              gives_ ? 2 : 1,
              fold_.sources(srcs.data(), n),
              /*stream=*/false);
        }
      });
  if (!gives_) {
    return;
  }
  std::vector<Pending> arrivals(size_);
  for (int k = 1; k < size_; ++k) {
    const int to = (rank_ + k) % size_;
    const int from = (rank_ + size_ - k) % size_;
    if (result.bytes() != 0) {
      send(to, Kind::kResult, result);
    }
    const size_t bytes =
        lane_maps_[from].present_elements(BlockMap::kAny, segment(from, s)) *
        element_;
    if (bytes != 0) {
      arrivals[from] = receive(from, Kind::kResult, bytes);
    }
  }
  arriving_.push_back(std::move(arrivals));
}

void NetSkip::take_results(size_t s) {
  std::vector<Pending> arrived = std::move(arriving_.front());
  arriving_.pop_front();
  for (int p = 0; p < size_; ++p) {
    if (!arrived[p].request) {
      continue;
    }
    arrived[p].request->wait(ctx_.deadline);
    const char* from = arrived[p].buffer.data();
    lane_maps_[p].for_present(
        BlockMap::kAny, segment(p, s), [&](size_t begin, size_t end) {
          const size_t run = (end - begin) * element_;
          std::memcpy(at(begin), from, run);
          from += run;
        });
  }
}

} // namespace fusedpg
