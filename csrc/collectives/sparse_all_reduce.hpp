#pragma once

#include <vector>

#include "collectives/block_map.hpp"
#include "collectives/collectives.hpp"
#include "collectives/find_blocks.hpp"

// Reductions that skip blocks of zeros. The result is that of the dense
// operation, bit for bit but for NaN payloads.
namespace fusedpg {

// all_reduce(), skipping. Throws Error(kInvalid) when !can_skip(args), or for a
// threshold with several tensors.
void sparse_all_reduce(
    Context& ctx,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args,
    const SparseOptions& options);

// Its second half, for an operation that `d` describes and that statistics call
// `named`.
void run_skipping(
    Context& ctx,
    OpDescriptor& d,
    OpCode named,
    const std::vector<ReduceTensor>& tensors,
    const kernels::ReduceArgs& args,
    const SparseOptions& options);

// The parts of an operation that skips, for those that are more than sums.
class Skipping {
 public:
  // Finds this rank's blocks and leaves them where peers find them; before
  // enter().
  Skipping(
      Context& ctx,
      const std::vector<ReduceTensor>& tensors,
      DType dtype,
      const SparseOptions& options);
  // After enter().
  void load(Context& ctx);
  const BlockMap& map() const {
    return map_;
  }
  // Blocks in the result, as a share of all.
  double density() const;
  // Of the operation whose dense lanes these are.
  // `gathers`: the blocks of the result go to all ranks.
  OpStats stats(
      Context& ctx,
      const Lanes& lanes,
      size_t element,
      bool gathers = true) const;

  // Where a piece's sources and results begin, and how large elements are.
  struct Spans {
    const void* const* srcs; // by rank
    size_t src_size;
    void* const* dsts;
    size_t num_dsts;
    size_t dst_size;
  };
  // Calls fn(begin, end, srcs, num_srcs, dsts) for the parts of a piece that
  // the same ranks contribute. Where some do not, a source of zeros comes last,
  // and parts are at most as long as that.
  template <typename Fn>
  void for_sources(const Piece& piece, const Spans& spans, Fn&& fn) const;

 private:
  BlockMap map_;
};

template <typename Fn>
void Skipping::for_sources(const Piece& piece, const Spans& spans, Fn&& fn)
    const {
  thread_local std::vector<const void*> some;
  thread_local std::vector<void*> outs;
  outs.resize(spans.num_dsts);
  map_.for_contributors(
      piece, [&](size_t begin, size_t end, const int* ranks, size_t num) {
        const bool all = num == map_.size();
        const size_t most = all ? end - begin : kZeroBytes / spans.src_size;
        some.resize(num + 1);
        for (size_t at = begin; at < end; at += most) {
          const size_t offset = at - piece.begin;
          for (size_t k = 0; k < num; ++k) {
            some[k] = static_cast<const char*>(spans.srcs[ranks[k]]) +
                offset * spans.src_size;
          }
          some[num] = kZeros;
          for (size_t k = 0; k < spans.num_dsts; ++k) {
            outs[k] =
                static_cast<char*>(spans.dsts[k]) + offset * spans.dst_size;
          }
          fn(at,
             std::min(at + most, end),
             some.data(),
             all ? num : num + 1,
             outs.data());
        }
      });
}

} // namespace fusedpg
