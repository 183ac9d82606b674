#pragma once

#include <functional>
#include <vector>

#include "base/dtype.hpp"
#include "collectives/block_map.hpp"

namespace fusedpg {

// What an epilogue combines: every rank's contribution, in rank order, or what
// they come to (`folded`), in the wide type and times their weights.
struct Sources {
  const void* const* data;
  size_t num;
  bool folded = false;
};

// The type in which contributions of a type are added.
constexpr DType wide_type(DType type) {
  return type == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// What a reducing operation is, whichever way it is done: reduce-scatter ->
// epilogue on the owned slice -> all-gather.
//
// A *lane* is what one owner reduces, as a list of pieces of tensors.
struct Plan {
  // One tensor of the call on this rank.
  struct Tensor {
    const char* src; // contribution; nullptr where this rank owns nothing of it
    char* dst; // result; may be identical to src
  };
  // Combines the sources into all dsts.
  using Epilogue = std::function<void(
      size_t tensor,
      size_t begin,
      size_t count,
      void* const* dsts,
      size_t num_dsts,
      const Sources& srcs,
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
  // In shared memory only these blocks of a contribution are staged; the
  // epilogue takes the rest for zeros. Null: all of it.
  const BlockMap* blocks = nullptr;
  // The epilogue gets multiples of this many elements, counted from the start
  // of a piece, but for the piece's end.
  size_t granule = 1;
  // For ways that fold contributions before the epilogue: their type, their
  // weights by rank (empty: none), and the elements of blocks whose zeros need
  // not travel (0: all do).
  DType src_type = DType::kOpaque;
  std::vector<double> weights;
  size_t skip_block = 0;

  // Lanes by the ownership map: owner p has shard_range(count, P, p) of each.
  static Lanes shards(const std::vector<size_t>& counts, int world_size);
  // Elements of each tensor that the lanes cover.
  std::vector<size_t> counts() const;
  // Takes a tensor out of the operation; the same on all ranks.
  void drop(size_t tensor);
};

} // namespace fusedpg
