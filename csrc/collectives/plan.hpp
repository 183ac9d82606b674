#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "base/dtype.hpp"
#include "collectives/lanes.hpp"
#include "collectives/skip.hpp"
#include "kernels/kernels.hpp"

namespace fusedpg {

// What an epilogue combines: every rank's contribution, in rank order; or
// (`folded`) sums of several ranks' each, in the wide type and times their
// weights, to be added in this order. Where that type is not the contributions'
// own the first source may be overwritten.
struct Sources {
  const void* const* data;
  size_t num;
  bool folded = false;
};

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
  // Blocks of contributions that are zeros need not travel: the epilogue gets
  // the contributions of those that have more, and zeros for all others.
  std::optional<SkipOptions> skip;
  // What nobody contributes to has its result already: all is done in place,
  // and zeros give zeros. Such plans always skip.
  bool zeros_stay = false;
  // The epilogue must get all ranks' contributions, or what they come to.
  bool needs_all = false;
  // The epilogue gets multiples of this many elements, counted from the start
  // of a piece, but for the piece's end.
  size_t granule = 1;
  // For ways that fold contributions before the epilogue: their type (kOpaque:
  // they cannot be folded), how, and their weights by rank (empty: none).
  DType src_type = DType::kOpaque;
  RedOp op = RedOp::kSum;
  std::vector<double> weights;
  // Set where the epilogue is this reduction and nothing else, so that somebody
  // else may do it.
  std::optional<kernels::ReduceArgs> reduction;

  // Lanes by the ownership map: owner p has shard_range(count, P, p) of each.
  static Lanes shards(const std::vector<size_t>& counts, int world_size);
  // Owners of one tensor that is runs of equal blocks, one each in every run.
  static Lanes blocks(size_t count, size_t runs, int world_size);
  // Elements of each tensor that the lanes cover.
  std::vector<size_t> counts() const;
  // Takes a tensor out of the operation; the same on all ranks.
  void drop(size_t tensor);
};

} // namespace fusedpg
