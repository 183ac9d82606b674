// The step of a whole list in one kernel, over NCCL's windows into the memory
// of all ranks (NCCL's device API). Compiled where NCCL's headers are found.

#include <nccl.h>
#include <nccl_device.h>

#include <cstdlib>

#include "cuda/kernels/barrier.cuh"
#include "cuda/kernels/launchers.cuh"

namespace fusedpg::cuda {
namespace {

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
};

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
  PeerBarrier barrier(theirs, mine, rank, size, args);
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
      *args, context->comm, context->window, context->place(args->signals)};
  const UpdateArgs& update = args->update;
  if (update.param_type == DType::kFloat64) {
    return launch_direct<double, 2>(arguments, stream);
  }
  // 16 bytes of the narrower type.
  return is_half(update.param_type) || is_half(update.grad_type)
      ? launch_direct<float, 8>(arguments, stream)
      : launch_direct<float, 4>(arguments, stream);
}

} // namespace fusedpg::cuda
