// The step of a whole list in one kernel, over NCCL's windows into the memory
// of all ranks (NCCL's device API). Compiled where NCCL's headers are found.

#include <nccl.h>
#include <nccl_device.h>

#include <cstdlib>

#include "cuda/kernels/barrier.cuh"
#include "cuda/kernels/launchers.cuh"

namespace fusedpg::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
static_assert(kMaxDirectRanks <= kThreads);

using DestroyDevComm = ncclResult_t (*)(ncclComm_t, const ncclDevComm_t*);

struct Context {
  ncclDevComm comm;
  DestroyDevComm destroy;
  ncclWindow_t window;
  const char* arena;

  uint64_t place(const void* p) const {
    return static_cast<uint64_t>(static_cast<const char*>(p) - arena);
  }
};

struct DirectLaunch {
  DirectArgs args;
  ncclDevComm comm;
  ncclWindow_t window;
  uint64_t signals_at; // of the arena, in bytes
  uint64_t present_at;
};

// Where a tile lies in every rank's arena.
struct Peers {
  char* grads[kMaxDirectRanks];
  char* params[kMaxDirectRanks];
  uint32_t present[kMaxDirectRanks]; // blocks whose gradients are to be read
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
    // A vector lies in one block, and so do a warp's.
    static_assert(U == 1 && kSkipBlock % W == 0);
    const uint32_t block = uint32_t{1} << (at[0] / kSkipBlock);
    // Ranks whose loads are under way together: 32 registers' worth.
    constexpr int kFan =
        kFull ? static_cast<int>(128 / (U * W * sizeof(C))) : 1;
#pragma unroll 1
    for (int begin = 0; begin < size; begin += kFan) {
      Raw<C, W> raw[kFan][U];
      FUSEDPG_UNROLL
      for (int f = 0; f < kFan; ++f) {
        if (begin + f < size) {
          if ((peers.present[begin + f] & block) != 0) {
            at.load(Column<C>(peers.grads[begin + f], 0, type), raw[f]);
          } else {
            raw[f][0] = {};
          }
        }
      }
      FUSEDPG_UNROLL
      for (int f = 0; f < kFan; ++f) {
        if (begin + f < size) {
          add(begin + f, raw[f], grad);
        }
      }
    }
  }

 private:
  template <int W, int U>
  __device__ __forceinline__ void add(
      int rank,
      const Raw<C, W> (&raw)[U],
      C (&grad)[U][W]) const {
    const Column<C> column(nullptr, 0, type);
    const C weight = weights != nullptr ? static_cast<C>(weights[rank]) : C(1);
    FUSEDPG_UNROLL
    for (int u = 0; u < U; ++u) {
      C values[W];
      column.widen(values, raw[u]);
      FUSEDPG_UNROLL
      for (int e = 0; e < W; ++e) {
        // A product with 1 has the factor's bits.
        const C value = values[e] * weight;
        grad[u][e] = rank == 0 ? value : grad[u][e] + value;
      }
    }
  }
};

// The masters if any, and all ranks' parameters.
template <typename C>
struct PeerSink {
  const Peers& peers;
  char* everywhere; // or null
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
      if (everywhere != nullptr) {
        const Column<C> column(everywhere, 0, type);
        const Raw<C, W> raw = column.template round<W>(result);
        if (!column.narrow()) {
          store_words_everywhere<W * sizeof(C)>(
              everywhere + at[u] * sizeof(C), raw.words);
          return;
        }
        if constexpr (W * sizeof(C) % 32 == 0) {
          store_words_everywhere<W * sizeof(C) / 2>(
              everywhere + at[u] * (sizeof(C) / 2), raw.words);
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

// By the address at which peers read them: two for one place could disagree.
__device__ __forceinline__ uint16_t* present_words(
    const DirectLaunch& launch,
    int rank) {
  return static_cast<uint16_t*>(
      ncclGetLsaPointer(launch.window, launch.present_at, rank));
}

// For the owners' blocks of this number: a warp a word.
__device__ __forceinline__ void find_tile_bits(const DirectLaunch& launch) {
  const UpdateArgs& args = launch.args.update;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto size = static_cast<uint64_t>(args.chunk.size);
  const uint64_t tiles = args.chunk.num_tiles;
  uint16_t* words = present_words(launch, args.chunk.rank);
  for (uint64_t i = threadIdx.x / kWarp;; i += kWarps) {
    const uint64_t tile = blockIdx.x + i / size * gridDim.x;
    if (tile >= tiles) {
      break;
    }
    const int owner = static_cast<int>(i % size);
    uint32_t bits =
        tile_bits(args, static_cast<uint32_t>(tile), owner, lane, kWarp);
    for (int other = kWarp / 2; other > 0; other /= 2) {
      bits |= __shfl_xor_sync(~0u, bits, other);
    }
    if (lane == 0) {
      words[owner * tiles + tile] = static_cast<uint16_t>(bits);
    }
  }
}

template <typename Shape, typename Rule>
__device__ __forceinline__ void direct_tile(
    const DirectLaunch& launch,
    uint32_t tile,
    Peers& peers) {
  using C = typename Rule::Value;
  const UpdateArgs& args = launch.args.update;
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
  const uint64_t* offsets = launch.args.offsets + 2 * uint64_t(span.index);
  const uint64_t stride = 2 * uint64_t(launch.args.num_tensors);
  const uint64_t word =
      static_cast<uint64_t>(rank) * args.chunk.num_tiles + tile;
  bool grad_aligned = true;
  bool param_aligned = true;
  bool same_place = true;
  if (thread < size) {
    const uint64_t* of_peer = offsets + thread * stride;
    char* grads = static_cast<char*>(
        ncclGetLsaPointer(launch.window, of_peer[0], thread));
    char* params = static_cast<char*>(
        ncclGetLsaPointer(launch.window, of_peer[1], thread));
    peers.grads[thread] = at(grads, first, args.grad_type);
    peers.params[thread] = at(params, first, args.param_type);
    peers.present[thread] = launch.args.present == nullptr
        ? ~uint32_t{0}
        : present_words(launch, thread)[word];
    grad_aligned = is_aligned(peers.grads[thread]);
    param_aligned = is_aligned(peers.params[thread]);
    same_place = of_peer[1] == offsets[1];
  }
  grad_aligned = __syncthreads_and(grad_aligned) != 0;
  param_aligned = __syncthreads_and(param_aligned) != 0;
  same_place = __syncthreads_and(same_place) != 0;
  char* everywhere = nullptr;
  if (launch.comm.lsaMultimem.mcBasePtr != nullptr && same_place) {
    everywhere =
        at(ncclGetLsaMultimemPointer(launch.window, offsets[1], launch.comm),
           first,
           args.param_type);
  }
  const Slices<C> slices = slices_of<Rule>(args, span);
  const PeerGradients<C> gradients{
      peers, launch.args.weights, size, args.grad_type, grad_aligned};
  const PeerSink<C> sink{
      peers,
      everywhere,
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
    direct_kernel(const __grid_constant__ DirectLaunch launch) {
  FUSEDPG_SHARED(Peers, peers);
  const DirectArgs& args = launch.args;
  if (told_to_stop(args.stop)) {
    return;
  }
  const int rank = args.update.chunk.rank;
  const int size = args.update.chunk.size;
  const int peer = static_cast<int>(threadIdx.x);
  DirectSignals* mine = args.signals + blockIdx.x;
  const DirectSignals* theirs = peer >= size
      ? mine
      : static_cast<const DirectSignals*>(
            ncclGetLsaPointer(launch.window, launch.signals_at, peer)) +
          blockIdx.x;
  PeerBarrier barrier(theirs, mine, rank, size, args.stop);
  if (args.present != nullptr) {
    find_tile_bits(launch);
  }
  // All ranks' gradients are there, and nobody uses the parameters any more.
  if (!barrier.sync()) {
    return;
  }
  for (uint32_t tile = blockIdx.x; tile < args.update.chunk.num_tiles;
       tile += gridDim.x) {
    direct_tile<Shape, Rule>(launch, tile, peers);
  }
  // All parameters have arrived, and nobody reads the gradients any more.
  barrier.sync();
  barrier.leave();
}

template <typename C, int kElements>
int launch_direct(const DirectLaunch& arguments, Stream stream) {
  return with_rule<C>(arguments.args.update, [&](auto tag) {
    using Rule = typename decltype(tag)::Type;
    if constexpr (Rule::kFirstHalf) {
      return launch(
          direct_kernel<Shape<kElements, 1>, Rule>,
          kDirectBlocks,
          arguments,
          stream);
    } else {
      // LAMB needs sums over all ranks on the way.
      return static_cast<int>(cudaErrorInvalidValue);
    }
  });
}

struct SumLaunch {
  DirectSumArgs args;
  ncclWindow_t window;
  uint64_t signals_at; // of the arena, in bytes
  uint64_t flags_at;
};

// Blocks of the tensor go to the warps of all ranks alike: the ranks' thread
// blocks of one number exchange the flags of the same ones.
__global__ void __launch_bounds__(kThreads)
    direct_sum_kernel(const __grid_constant__ SumLaunch launch) {
  FUSEDPG_SHARED(char* [kMaxDirectRanks], bases);
  FUSEDPG_SHARED(const uint8_t* [kMaxDirectRanks], flags);
  FUSEDPG_SHARED(DirectCounts[kWarps], counts);
  const DirectSumArgs& args = launch.args;
  if (!ranks_agree(args.agree) || told_to_stop(args.stop)) {
    return;
  }
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarp;
  const uint64_t first = uint64_t(blockIdx.x) * kWarps + thread / kWarp;
  const uint64_t stride = uint64_t(gridDim.x) * kWarps;
  DirectSignals* mine = args.signals + blockIdx.x;
  const DirectSignals* theirs = mine;
  if (thread < args.size) {
    theirs = static_cast<const DirectSignals*>(
                 ncclGetLsaPointer(launch.window, launch.signals_at, thread)) +
        blockIdx.x;
    bases[thread] = static_cast<char*>(
        ncclGetLsaPointer(launch.window, args.offsets[thread], thread));
    flags[thread] = static_cast<const uint8_t*>(
        ncclGetLsaPointer(launch.window, launch.flags_at, thread));
  }
  PeerBarrier barrier(theirs, mine, args.rank, args.size, args.stop);
  // By the address at which they are read: two for one place could disagree.
  auto* own_flags = static_cast<uint8_t*>(
      ncclGetLsaPointer(launch.window, launch.flags_at, args.rank));
  for (uint64_t b = first; b < args.num_blocks; b += stride) {
    const uint32_t any = block_bits(args.tensor, b, lane, kWarp);
    const bool found = __any_sync(~0u, any != 0) != 0;
    if (lane == 0) {
      own_flags[b] = found ? 1 : 0;
    }
  }
  // All ranks' blocks are there, with their flags.
  if (!barrier.sync()) {
    return;
  }
  DirectCounts met{};
  for (uint64_t b = first; b < args.num_blocks; b += stride) {
    Ranks ranks{};
    uint32_t any = 0;
    for (int p = 0; p < args.size; p += kWarp) {
      const bool has = p + lane < args.size && flags[p + lane][b] != 0;
      ranks.words[p / kWarp] = __ballot_sync(~0u, has);
      any |= ranks.words[p / kWarp];
    }
    if (any != 0) {
      count_block(args, ranks, b, met);
      sum_block(args, bases, ranks, b, lane, kWarp);
    }
  }
  if (lane == 0) {
    counts[thread / kWarp] = met;
  }
  // All sums have arrived, and nobody reads flags any more.
  barrier.sync();
  barrier.leave();
  if (thread == 0) {
    for (int w = 1; w < kWarps; ++w) {
      counts[0].blocks_union += counts[w].blocks_union;
      counts[0].blocks_present += counts[w].blocks_present;
      counts[0].sent += counts[w].sent;
      counts[0].received += counts[w].received;
    }
    args.counts[blockIdx.x] = counts[0];
  }
}

} // namespace

static_assert(NCCL_VERSION_CODE == kDirectNcclVersion);

int direct_create(const DirectCreateArgs* args, void** context, int* usable) {
  *context = nullptr;
  *usable = 0;
  // The device API has no stable ABI: only the headers' own version will do.
  if (args->nccl_version / 100 != NCCL_VERSION_CODE / 100 ||
      args->window == nullptr || args->size > kMaxDirectRanks) {
    return kSuccess;
  }
  const auto comm = static_cast<ncclComm_t>(args->comm);
  const auto team_lsa =
      reinterpret_cast<ncclTeam_t (*)(ncclComm_t)>(args->team_lsa);
  if (team_lsa(comm).nRanks != args->size) {
    return kSuccess;
  }
#if defined(NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER)
  ncclDevCommRequirements requirements = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
#else
  ncclDevCommRequirements requirements{};
#endif
  requirements.lsaMultimem = args->multimem != 0;
  auto* created = static_cast<Context*>(std::calloc(1, sizeof(Context)));
  if (created == nullptr) {
    return cudaErrorMemoryAllocation;
  }
  created->window = static_cast<ncclWindow_t>(args->window);
  created->arena = static_cast<const char*>(args->arena);
  created->destroy = reinterpret_cast<DestroyDevComm>(args->dev_comm_destroy);
  using Create = ncclResult_t (*)(
      ncclComm_t, const ncclDevCommRequirements_t*, ncclDevComm_t*);
  const ncclResult_t result = reinterpret_cast<Create>(args->dev_comm_create)(
      comm, &requirements, &created->comm);
  if (result != ncclSuccess && result != ncclInProgress) {
    std::free(created);
    // No symmetric memory, where NCCL gives windows all the same (before 2.29).
    return result == ncclInvalidUsage ? kSuccess : int{cudaErrorUnknown};
  }
  *context = created;
  *usable = 1;
  return result == ncclSuccess ? kSuccess : kNotReady;
}

int direct_destroy(void* context, void* comm) {
  auto* ending = static_cast<Context*>(context);
  if (comm != nullptr) {
    ending->destroy(static_cast<ncclComm_t>(comm), &ending->comm);
  }
  std::free(ending);
  return kSuccess;
}

int direct_step(const DirectArgs* args, Stream stream) {
  const auto* context = static_cast<const Context*>(args->context);
  const DirectLaunch arguments{
      *args,
      context->comm,
      context->window,
      context->place(args->signals),
      args->present == nullptr ? 0 : context->place(args->present)};
  const UpdateArgs& update = args->update;
  if (update.param_type == DType::kFloat64) {
    return launch_direct<double, 2>(arguments, stream);
  }
  // 16 bytes of the narrower type.
  return is_half(update.param_type) || is_half(update.grad_type)
      ? launch_direct<float, 8>(arguments, stream)
      : launch_direct<float, 4>(arguments, stream);
}

int direct_sum(const DirectSumArgs* args, Stream stream) {
  const auto* context = static_cast<const Context*>(args->context);
  const SumLaunch arguments{
      *args,
      context->window,
      context->place(args->signals),
      context->place(args->flags)};
  return launch(direct_sum_kernel, kDirectBlocks, arguments, stream);
}

} // namespace fusedpg::cuda
