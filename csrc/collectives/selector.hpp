#pragma once

#include <cstddef>

#include "base/step.hpp"
#include "collectives/context.hpp"
#include "collectives/density.hpp"
#include "collectives/net_exchange.hpp"

// The one place that chooses algorithms. Every input is the same on all ranks,
// so every choice is.
namespace fusedpg {

// Most bytes of an operation that is staged before the first barrier: everybody
// reads everybody and no second barrier is needed.
constexpr size_t kOneShotBytes = size_t(32) << 10;

// Whether this rank stages an input of `bytes` before the first barrier. Ranks
// may answer differently when only some inputs lie in arenas; the operation is
// then staged in chunks.
bool select_one_shot(size_t bytes, bool in_arena);

// How the data of a large operation travel.
struct Path {
  bool reads_direct; // peers read the inputs in place
  bool writes_direct; // peers write the outputs in place
};

// Called after enter().
Path select_path(Context& ctx);

// Bytes that a rank stages between two barriers, over all destinations.
size_t select_chunk(size_t total_bytes, int world_size);

// How an all-reduce treats blocks of zeros, by the group's option. Before
// enter(); the same on all ranks.
DensityEstimates::Choice select_skip(
    const SkipState& state,
    int world_size,
    uint64_t shape,
    size_t bytes,
    const kernels::ReduceArgs& args);
// After enter(), if that chose kDense or kProbe: only what all ranks have
// entered may count, or they would choose differently ever after.
void count_dense(
    SkipState& state,
    int world_size,
    uint64_t shape,
    size_t bytes,
    const kernels::ReduceArgs& args);

// The share of blocks in the result from which skipping costs more time than it
// saves.
double select_skip_limit(const Path& path);

// How what everybody has travels between machines. Directly a rank's link
// carries N (P-1)/P each way; but ranks of one machine share its link, and a
// chain in rank order enters and leaves each machine once.
enum class NetPath { kDirect, kChain };
NetPath select_net_path(const NetContext& ctx);

// Whether a step between machines looks for blocks of zeros in a gradient of
// so many bytes: that takes rounds of messages of its own.
bool select_net_skip(size_t bytes);

// Shares of blocks in the result from which skipping is worth nothing: for the
// next operation, and for the one that has found them.
struct SkipLimits {
  double next;
  double now;
};
// Between machines the wire is slower than everything else, and where the
// blocks are known the rest of skipping costs nothing.
constexpr SkipLimits kNetSkipLimits{0.9, 2};
// Between GPUs (not measured): NCCL moves the union as it would move all.
constexpr double kCudaSkipLimit = 0.8;

// Whether results of this size should be written around the cache.
bool select_stream(size_t bytes);

} // namespace fusedpg
