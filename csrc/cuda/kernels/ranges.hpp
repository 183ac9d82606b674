#pragma once

#include "cuda/kernels/updates.hpp"

// Functions of their own, so that each has no more registers than it needs: the
// code around them may have few. Static, as nvcc's linker wants one definition.
#if defined(__CUDACC__)
#define FUSEDPG_CALLED static __host__ __device__ __noinline__
#else
#define FUSEDPG_CALLED inline
#endif

// Updates of ranges of this rank's block on the wire, as a ring has them; tiles
// mean nothing here.
namespace fusedpg::cuda {

template <typename Rule>
FUSEDPG_CALLED void update_part(
    const UpdateArgs& args,
    Span span,
    int thread,
    int threads) {
  update_span<Rule, false>(args, span, thread, threads);
}

FUSEDPG_CALLED Sums
moments_part(const UpdateArgs& args, Span span, int thread, int threads) {
  return moments_span<float, false>(args, span, thread, threads);
}

// Calls call(piece, span) for what elements [begin, end) of the block are.
template <typename Call>
FUSEDPG_HOST_DEVICE void for_spans(
    const RingUpdate& ring,
    uint64_t begin,
    uint64_t end,
    Call&& call) {
  const Chunk& chunk = ring.update.chunk;
  // The last piece that does not begin behind `begin`.
  uint32_t piece = 0;
  for (uint32_t left = ring.num_pieces; left > 1;) {
    const uint32_t half = left / 2;
    if (chunk.pieces[piece + half].wire <= begin) {
      piece += half;
      left -= half;
    } else {
      left = half;
    }
  }
  for (; piece < ring.num_pieces && chunk.pieces[piece].wire < end; ++piece) {
    const ShardPiece& p = chunk.pieces[piece];
    const uint64_t from = begin > p.wire ? begin : p.wire;
    const uint64_t to = end < p.wire + p.length ? end : p.wire + p.length;
    if (from < to) {
      call(
          piece,
          Span{
              chunk.tensors + p.tensor,
              p.tensor,
              static_cast<uint32_t>(to - from),
              p.begin + (from - p.wire),
              from});
    }
  }
}

FUSEDPG_HOST_DEVICE void update_range(
    const RingUpdate& ring,
    uint64_t begin,
    uint64_t end,
    int thread,
    int threads) {
  for_spans(ring, begin, end, [&](uint32_t, const Span& span) {
    with_rule<float>(ring.update, [&](auto tag) {
      update_part<typename decltype(tag)::Type>(
          ring.update, span, thread, threads);
    });
  });
}

// `add(sums)` gives the sums of all threads, to thread 0 at least.
template <typename Add>
FUSEDPG_HOST_DEVICE void moments_range(
    const RingUpdate& ring,
    int channel,
    uint64_t begin,
    uint64_t end,
    int thread,
    int threads,
    Add&& add) {
  for_spans(ring, begin, end, [&](uint32_t piece, const Span& span) {
    const Sums sums = add(moments_part(ring.update, span, thread, threads));
    if (thread == 0) {
      double* to = ring.sums +
          2 * (static_cast<uint64_t>(piece) * kRingChannels + channel);
      to[0] += sums.param;
      to[1] += sums.direction;
    }
  });
}

} // namespace fusedpg::cuda
