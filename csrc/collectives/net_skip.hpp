#pragma once

#include <deque>
#include <vector>

#include "collectives/block_map.hpp"
#include "collectives/host_fold.hpp"
#include "collectives/net_exchange.hpp"
#include "collectives/plan.hpp"

namespace fusedpg {

// A reduction of one tensor, in place, that skips blocks of zeros, between
// machines: every rank sends the blocks it has to their owners; owners combine
// them in the order of HostFold and send the union to everybody. Bitmaps go first, so
// everybody knows the length of every message before it comes, and nobody waits
// for a rank that has nothing. Ranks have agreed on all of it.
class NetSkip {
 public:
  // `gives`: results go to all ranks; else only owners have theirs.
  NetSkip(
      NetContext& ctx,
      const ReduceTensor& tensor,
      DType dtype,
      RedOp op,
      const SkipOptions& options,
      bool gives);

  // Finds this rank's blocks, and learns what the other ranks have.
  void find();
  // The share of blocks that any rank has.
  double density() const {
    return results_.density();
  }
  // What it moved is added to ctx.moved.
  void run(const Plan::Epilogue& epilogue);

 private:
  // The words of the bitmap in which the blocks of a lane are.
  struct Words {
    size_t first;
    size_t count;
  };
  Words words_of(int owner) const;
  // Segment `s` of an owner's lane; empty behind its end.
  LanePiece segment(int owner, size_t s) const;
  char* at(size_t index) const {
    return static_cast<char*>(tensor_.data) + index * element_;
  }
  void send(int to, NetKind kind, const NetBuffer& message);
  void wait_for_sends(size_t left);
  NetPending receive(int from, NetKind kind, size_t bytes);

  void exchange_bitmaps(const std::vector<uint64_t>& mine);
  void exchange_unions();
  void contribute(size_t s);
  void reduce(size_t s, const Plan::Epilogue& epilogue);
  void take_results(size_t s);

  NetContext& ctx_;
  const ReduceTensor tensor_;
  const DType dtype_;
  HostFold fold_;
  const SkipOptions options_;
  const bool gives_;
  const int rank_;
  const int size_;
  const size_t element_;
  const size_t segment_; // elements, of whole blocks
  std::vector<LanePiece> lanes_; // by owner
  size_t steps_ = 0;
  BlockMap map_; // all blocks of this rank; in its lane, those of all ranks
  BlockMap results_;
  std::vector<BlockMap> lane_maps_; // the union in each lane
  std::deque<std::vector<NetPending>> contributions_; // by segment
  std::deque<std::vector<NetPending>> arriving_;
  std::deque<NetPending> sends_;
};

} // namespace fusedpg
