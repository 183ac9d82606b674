#pragma once

#include <functional>
#include <vector>

#include "collectives/block_map.hpp"
#include "collectives/context.hpp"

namespace fusedpg {

// The skeleton of every reducing operation: reduce-scatter -> epilogue on the
// owned slice -> all-gather.
//
// A *lane* is what one owner reduces, as a list of pieces of tensors. Lanes are
// cut into *chunks*; in each step a rank copies in chunk s for all other
// owners, applies the epilogue to chunk s-1 of its own lane, and copies out
// chunk s-2 of the others' results. Where all tensors lie in arenas, peers read
// or write them in place and that part of the step vanishes.
struct TwoShot {
  // One tensor of the call on this rank.
  struct Tensor {
    const char* src; // contribution; nullptr where this rank owns nothing of it
    char* dst; // result; may be identical to src
  };
  // Combines srcs (one per rank, in rank order) into all dsts.
  using Epilogue = std::function<void(
      size_t tensor,
      size_t begin,
      size_t count,
      void* const* dsts,
      size_t num_dsts,
      const void* const* srcs,
      bool stream)>;

  size_t src_size; // bytes of an element of the contributions
  size_t dst_size; // and of the results
  std::vector<Tensor> tensors;
  Lanes lanes; // by owner
  Epilogue epilogue;
  // Who receives results: everyone (kAll), their owner alone (kOwner), nobody
  // (the epilogue keeps them; kNobody), or one rank.
  static constexpr int kAll = -1;
  static constexpr int kOwner = -2;
  static constexpr int kNobody = -3;
  int receiver = kAll;
  // Whether there are contributions; without, the epilogue's srcs mean nothing.
  bool reads = true;
  // Whether the owners' results are memory that all ranks see: then nobody
  // returns before all are written.
  bool shared_results = false;
  // Of a contribution only these blocks are staged; the epilogue takes the rest
  // for zeros. Null: all of it.
  const BlockMap* blocks = nullptr;
  // The epilogue gets multiples of this many elements, counted from the start
  // of a piece, but for the piece's end.
  size_t granule = 1;

  // Lanes by the ownership map: owner p has shard_range(count, P, p) of each.
  static Lanes shards(const std::vector<size_t>& counts, int world_size);

  // enter() for this operation: publishes where the tensors lie, followed by
  // the words of `extra`, which peers find at extra_words().
  void begin(
      Context& ctx,
      OpDescriptor& d,
      const std::vector<uint64_t>& extra = {}) const;
  const uint64_t* extra_words(Context& ctx, int rank) const;
  // Takes a tensor out of the operation; between begin() and run(), the same on
  // all ranks.
  void drop(size_t tensor);
  // The rest. `d` names the operation in errors.
  void run(Context& ctx, const OpDescriptor& d) const;
};

} // namespace fusedpg
