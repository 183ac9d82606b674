#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "base/host_map.hpp"
#include "collectives/net_blocks.hpp"
#include "collectives/net_segments.hpp"

namespace fusedpg {

// Who contributes what to the segments of an operation between machines: all
// to everything, unless blocks of zeros stay at home.
class NetParts {
 public:
  NetParts(const NetBlocks* blocks, const HostMap& hosts, int rank)
      : blocks_(blocks),
        place_(hosts.local(rank)),
        places_(hosts.ranks(hosts.host(rank)).size()),
        hosts_(static_cast<size_t>(hosts.num_hosts())),
        everybody_(std::max(places_, hosts_)) {
    std::iota(everybody_.begin(), everybody_.end(), 0);
  }
  // Most elements of a part in which somebody has nothing.
  void set_most(size_t elements) {
    most_ = elements;
  }

  // Calls fn(begin, end, places, num) for the parts of a piece that the same
  // ranks of this host contribute, of a lane that this rank works for,
  template <typename Fn>
  void for_places(const LanePiece& piece, const Fn& fn) const {
    for_parts(blocks_ ? &blocks_->local : nullptr, places_, piece, fn);
  }
  // and fn(begin, end, hosts, num) for those of the same hosts, of its own lane.
  template <typename Fn>
  void for_hosts(const LanePiece& piece, const Fn& fn) const {
    for_parts(blocks_ ? &blocks_->hosts : nullptr, hosts_, piece, fn);
  }

  // Of a segment of this rank's lane, what a host contributes.
  size_t elements_of(int host, const NetSegment& one) const {
    if (blocks_ == nullptr) {
      return one.elements;
    }
    size_t sum = 0;
    for (const LanePiece& piece : one.pieces) {
      sum += blocks_->hosts.present_elements(host, piece);
    }
    return sum;
  }

  // Of any segment, what this rank contributes.
  NetSegment mine(const NetSegment& one) const {
    if (blocks_ == nullptr) {
      return one;
    }
    NetSegment mine;
    for (const LanePiece& piece : one.pieces) {
      blocks_->local.for_present(place_, piece, [&](size_t begin, size_t end) {
        mine.pieces.push_back({piece.tensor, begin, end - begin});
        mine.elements += end - begin;
      });
    }
    return mine;
  }

 private:
  template <typename Fn>
  void for_parts(
      const BlockMap* map,
      size_t all,
      const LanePiece& piece,
      const Fn& fn) const {
    if (map == nullptr) {
      fn(piece.begin, piece.begin + piece.count, everybody_.data(), all);
      return;
    }
    map->for_contributors(
        piece, [&](size_t begin, size_t end, const int* who, size_t num) {
          const size_t most = num == all ? end - begin : most_;
          for (size_t n = 0; begin < end; begin += n) {
            n = std::min(most, end - begin);
            fn(begin, begin + n, who, num);
          }
        });
  }

  const NetBlocks* blocks_; // none: everybody has everything
  const int place_; // on this host
  const size_t places_;
  const size_t hosts_;
  size_t most_ = 1;
  std::vector<int> everybody_; // 0, 1, 2, ...
};

} // namespace fusedpg
