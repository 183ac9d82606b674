// The step of a whole list in two kernels, over the memory of all ranks: see
// PeerAccess.

#include <type_traits>

#include "cuda/kernels/barrier.cuh"
#include "cuda/kernels/launchers.cuh"

namespace fusedpg::cuda {
namespace {

static_assert(kMaxDirectRanks <= kThreads);

// --- what ranks tell each other ------------------------------------------------

__device__ __forceinline__ uint64_t* notice_of(
    const PeerAccess& peers,
    int rank) {
  return room_of(peers, rank)->notice.words;
}

// A block reads what blocks of its number have written: those meet at its
// barrier. One that ends before leaves an earlier step's words: `stop` or `late`
// says so to all kernels behind this one.
__global__ void __launch_bounds__(kThreads)
    exchange_kernel(const __grid_constant__ ExchangeArgs args) {
  const PeerAccess& peers = args.peers;
  const uint32_t of_header = args.header_words;
  const uint64_t* header = args.headers + uint64_t(peers.rank) * of_header;
  if (told_to_stop(peers)) {
    return;
  }
  const uint32_t of_offsets = 2 * args.num_tensors;
  const uint32_t words = of_header + of_offsets;
  const uint32_t first = blockIdx.x * kThreads + threadIdx.x;
  const uint32_t stride = gridDim.x * kThreads;
  uint64_t* mine = notice_of(peers, peers.rank);
  for (uint32_t i = first; i < words; i += stride) {
    mine[i] = i < of_header ? header[i] : args.offsets[i - of_header];
  }
  PeerBarrier barrier(peers);
  if (!barrier.sync()) {
    return;
  }
  barrier.leave();
  for (uint32_t i = first; i < words; i += stride) {
    for (int rank = 0; rank < peers.size; ++rank) {
      const uint64_t word = notice_of(peers, rank)[i];
      if (i < of_header) {
        args.headers[uint64_t(rank) * of_header + i] = word;
      } else {
        args.all_offsets[uint64_t(rank) * of_offsets + i - of_header] = word;
      }
    }
  }
}

// --- the step ------------------------------------------------------------------

// Where a tile lies in every rank's arena.
struct Peers {
  char* grads[kMaxDirectRanks];
  char* params[kMaxDirectRanks];
};

// Left fold of the ranks' gradients.
template <typename C>
struct PeerGradients {
  const Peers& peers;
  const double* weights;
  int size;
  DType type;
  bool all_aligned;

  __device__ bool aligned() const {
    return all_aligned;
  }

  template <int W, int U, bool kFull>
  __device__ __forceinline__ void gather(
      const Vectors<W, U, kFull>& at,
      C (&grad)[U][W]) const {
    fold_ranks(
        at,
        size,
        weights,
        type,
        [&](int rank) { return peers.grads[rank]; },
        grad);
  }
};

// The masters if any, and all ranks' parameters.
template <typename C>
struct PeerSink {
  const Peers& peers;
  const PeerAccess& memory;
  bool everywhere; // by multicast, at `place` of the arenas
  uint64_t place;
  int rank;
  int size;
  DType type;
  bool all_aligned;
  bool masters;
  Column<C> master;

  __device__ bool aligned() const {
    return all_aligned;
  }

  template <int W, int U, bool kFull>
  __device__ __forceinline__ void take(
      const Vectors<W, U, kFull>& at,
      int u,
      const C* /* old */,
      const C* result) const {
    if (masters) {
      at.store(master, u, result);
    }
    if constexpr (kFull) {
      if (everywhere) {
        const Column<C> column(peers.params[rank], 0, type);
        const Raw<C, W> raw = column.template round<W>(result);
        if (!column.narrow()) {
          store_words_everywhere<W * sizeof(C)>(
              memory, place + at[u] * sizeof(C), raw.words);
          return;
        }
        if constexpr (W * sizeof(C) % 32 == 0) {
          store_words_everywhere<W * sizeof(C) / 2>(
              memory, place + at[u] * (sizeof(C) / 2), raw.words);
          return;
        }
      }
    }
    // Every rank begins with another peer.
#pragma unroll 1
    for (int k = 1, p = rank; k <= size; ++k) {
      p = p + 1 == size ? 0 : p + 1;
      at.store(Column<C>(peers.params[p], 0, type), u, result);
    }
  }
};

template <typename Shape, typename Rule>
__device__ __forceinline__ void direct_tile(
    const DirectArgs& direct,
    uint32_t tile,
    Peers& peers) {
  using C = typename Rule::Value;
  const UpdateArgs& args = direct.update;
  const int thread = static_cast<int>(threadIdx.x);
  const int rank = args.chunk.rank;
  const int size = args.chunk.size;
  const Span span = span_of(args.chunk, tile);
  const TensorScalars& scalars = args.scalars[span.index];
  const uint32_t n = span.count(rank);
  if (scalars.skip || n == 0) {
    return;
  }
  const uint64_t first = span.first(rank);
  const uint64_t* offsets = direct.offsets + 2 * uint64_t(span.index);
  const uint64_t stride = 2 * uint64_t(direct.num_tensors);
  bool grad_aligned = true;
  bool param_aligned = true;
  bool same_place = true;
  if (thread < size) {
    const uint64_t* of_peer = offsets + thread * stride;
    char* arena = direct.peers.arenas[thread];
    peers.grads[thread] = at(arena + of_peer[0], first, args.grad_type);
    peers.params[thread] = at(arena + of_peer[1], first, args.param_type);
    grad_aligned = is_aligned(peers.grads[thread]);
    param_aligned = is_aligned(peers.params[thread]);
    same_place = of_peer[1] == offsets[1];
  }
  grad_aligned = __syncthreads_and(grad_aligned) != 0;
  param_aligned = __syncthreads_and(param_aligned) != 0;
  same_place = __syncthreads_and(same_place) != 0;
  const Slices<C> slices = slices_of<Rule>(args, span);
  const PeerGradients<C> gradients{
      peers, direct.weights, size, args.grad_type, grad_aligned};
  const PeerSink<C> sink{
      peers,
      direct.peers,
      direct.peers.multicast != nullptr && same_place,
      static_cast<uint64_t>(peers.params[rank] - direct.peers.arenas[rank]),
      rank,
      size,
      args.param_type,
      param_aligned,
      args.masters,
      slices.param};
  run_rule<Shape, Rule>(slices, scalars, gradients, sink, n, thread, kThreads);
  // The next tile's addresses are written to the same place.
  __syncthreads();
}

template <typename Shape, typename Rule>
__global__ void __launch_bounds__(kThreads, 2)
    direct_kernel(const __grid_constant__ DirectArgs args) {
  FUSEDPG_SHARED(Peers, peers);
  if (told_to_stop(args.peers)) {
    return;
  }
  PeerBarrier barrier(args.peers);
  for (uint32_t tile = blockIdx.x; tile < args.update.chunk.num_tiles;
       tile += gridDim.x) {
    direct_tile<Shape, Rule>(args, tile, peers);
  }
  // All parameters have arrived, and nobody reads the gradients any more.
  barrier.sync();
  barrier.leave();
}

template <typename C, int kElements>
int launch_direct(const DirectArgs& args, Stream stream) {
  return with_rule<C>(args.update, [&](auto tag) {
    using Rule = typename decltype(tag)::Type;
    if constexpr (Rule::kFirstHalf) {
      return launch(
          direct_kernel<Shape<kElements, 1>, Rule>,
          kDirectBlocks,
          args,
          stream);
    } else {
      // LAMB needs sums over all ranks on the way.
      return static_cast<int>(cudaErrorInvalidValue);
    }
  });
}

} // namespace

int launch_exchange(const ExchangeArgs* args, Stream stream) {
  return launch(exchange_kernel, kExchangeBlocks, *args, stream);
}

int launch_direct_step(const DirectArgs* args, Stream stream) {
  const UpdateArgs& update = args->update;
  if (update.param_type == DType::kFloat64) {
    return launch_direct<double, 2>(*args, stream);
  }
  // 16 bytes of the narrower type.
  return is_half(update.param_type) || is_half(update.grad_type)
      ? launch_direct<float, 8>(*args, stream)
      : launch_direct<float, 4>(*args, stream);
}

} // namespace fusedpg::cuda
