#pragma once

#include <cstdint>

#include "base/dtype.hpp"
#include "kernels/kernels.hpp"

// What the engine tells the kernels of libfusedpg_cuda.so. Plain data only:
// both sides are compiled by different compilers. Everything that a pointer
// leads to is device memory, unless said.
namespace fusedpg::cuda {

// One tensor of an operation.
struct TensorInfo {
  void* param; // whole
  const void* grad; // whole, or in a step on reduced gradients the slice
  void* output; // whole; reduce_shards leaves this rank's slice there
  void* master; // slice in fp32, or null
  void* state[3]; // slices, or null
  float* step; // counter, or null
  uint64_t count; // elements
  uint64_t shard; // elements of a full shard: rank r owns [r * shard, ...)
  uint32_t hyper; // index of its hyperparameters
  uint32_t unused;
};

// Elements [begin, begin + length) of every rank's shard of a tensor. Both are
// multiples of kShardAlignment; the shards of the last ranks may end earlier.
// (A LanePiece counts from the tensor's start and is one owner's.)
struct ShardPiece {
  uint32_t tensor;
  uint32_t unused;
  uint64_t begin;
  uint64_t length;
  // Where it lies in a rank's block on the wire, in elements; also a multiple
  // of kShardAlignment.
  uint64_t wire;
};

// A thread block's work: elements [index * kTile, ...) of a piece.
struct Tile {
  uint32_t piece;
  uint32_t index;
};
constexpr uint32_t kTile = 4096;

// A part of an operation that goes over the wire at once. The wire buffer holds
// one block a rank, in rank order.
struct Chunk {
  const TensorInfo* tensors;
  const ShardPiece* pieces;
  const Tile* tiles;
  uint32_t num_tiles;
  int32_t rank;
  int32_t size;
  uint32_t unused;
  uint64_t block; // elements of a rank's block
};

// Ranks tell each other this about a step before any of them changes anything:
// the hash of the call, the rank's weight, found_inf, and a flag a tensor. It lies
// in one of two forms.
//
// Raw: bytes, of every rank. Coded: elements of a reduction, which are 0 or 1, or
// in a minimum 0 or -1, so that no rank's flag is lost in any type. Of each bit b
// of the hash there is the pair (b, 1 - b): ranks differ if both are there. A
// weight is 8 numbers below 256, at the place of its rank alone, so that sums are
// exact in any type.
constexpr uint32_t kHeaderWeight = 8; // behind the hash, in bytes
constexpr uint32_t kHeaderFlags =
    16; // in bytes: found_inf, and those of tensors
constexpr uint32_t kCodedFlags = 128; // in elements, behind the hash
struct Header {
  // Rank 0's, or the one that is reduced. Null: nothing to agree on, and all
  // tensors are used.
  char* data;
  uint64_t stride; // from one rank's to the next one's, in bytes
  uint64_t hash; // this rank's
  DType type; // of what is coded; kOpaque: bytes are raw
  RedOp op;
  bool weighted; // has weights, if coded
  uint32_t tensors;
  int32_t rank;
  int32_t size; // of the group
};
constexpr size_t header_bytes(size_t tensors) {
  return kHeaderFlags + 1 + tensors;
}
constexpr size_t coded_elements(size_t tensors, bool weighted, size_t size) {
  return kCodedFlags + 1 + tensors + (weighted ? 8 * size : 0);
}

// Writes this rank's header to the first `copies` places.
struct ProposeArgs {
  Header to;
  uint32_t copies;
  uint32_t items; // bytes or elements; those behind the header become zero
  const uint8_t* used; // null: all are
  const float* found_inf; // null: none
  double weight;
};

// Scalars of one tensor's update.
struct TensorScalars : kernels::StepScalars {
  // gradient = reduced gradient * grad_factor; negative when maximizing.
  double grad_factor;
  bool skip; // parameters and state stay as they are
};

// Reads the headers, resolves the scalars of every tensor, and counts the step.
// One thread a tensor.
struct PrepareArgs {
  Header from;
  const TensorInfo* tensors; // null: no update, but flags (reduce_shards)
  const kernels::Hyper* hypers;
  // Of group i, a scalar that replaces hypers[i].lr; null entries: none. Null:
  // no such entries.
  const void* const* lrs;
  const DType* lr_types; // float32 or float64
  const float* grad_scale; // null: 1
  double* weights; // out: all ranks'; null: none
  double divisor; // of the sum of gradients, 1 when weighted
  TensorScalars* scalars; // out, one a tensor
  uint8_t* used; // out: what any rank uses; null: not wanted
  float* found_inf; // out: set to 1 if any rank's is; null: not wanted
  // Host memory that the device writes: receives `sequence` if ranks disagree.
  uint64_t* mismatch;
  uint64_t sequence;
  // PeerAccess's, behind an exchange of headers, which may have ended early: no
  // tensor's scalars say to update then, and no counter moves. Null: others.
  const uint64_t* stop;
  const uint64_t* late;
};

// wire[p * block + piece.wire + i] = weight * grad[p * shard + begin + i] for
// every rank p, zero beyond the end of the tensor.
struct PackArgs {
  Chunk chunk;
  void* wire;
  DType type;
  double weight; // 1: bits are copied; else each product is rounded to `type`
  bool widens; // of a half type: to fp32 on the wire
};

// The way back: of all blocks into the whole parameter, or of this rank's block
// (`wire` is the block) into the slice of the output; or, with `folds`, of the
// sum of the blocks of all ranks, of a half type.
struct UnpackArgs {
  Chunk chunk;
  const void* wire;
  DType type;
  bool to_outputs;
  bool folds;
  // Skipped tensors are left alone. Null: none is skipped.
  const TensorScalars* scalars;
  // to_outputs: values are multiplied by the reciprocal of `divisor`, or of the
  // sum of `weights` if that is not null; a sum of zero gives zeros. What is
  // folded is multiplied by the ranks' weights first.
  double divisor;
  const double* weights;
};

// The update of this rank's slices of a chunk.
struct UpdateArgs {
  Chunk chunk;
  kernels::Formula formula; // kLamb: the second half, which reads no gradient
  DType param_type;
  DType grad_type;
  DType state_type;
  bool masters;
  bool decoupled; // Adam
  bool amsgrad; // Adam
  bool momentum; // SGD
  bool nesterov; // SGD
  const TensorScalars* scalars; // by tensor
  // `grads` are the blocks of all ranks, of a half type, to be added; else they
  // are this rank's block, or if null TensorInfo::grad are slices.
  bool folds;
  const void* grads;
  const double* weights; // of folds, by rank; each product is rounded
  // This rank's block of the parameters' wire, in param_type; skipped tensors'
  // parameters are copied there. Null: the new values go to TensorInfo::param.
  void* params_out;
};

// LAMB's first half: moments, and for each tile of the chunk the sums of
// squares of parameters and directions: tile_sums[2 * (first_tile + tile)] and
// the next.
struct MomentsArgs {
  UpdateArgs update;
  double* tile_sums;
};

// Adds this rank's partial sums of each tensor: sums[2 * tensor] and the next.
// Those of tensor t are the `pairs` pairs from partial[2 * pairs * i] on of
// each i in list[begin[t]] ... [begin[t + 1] - 1], added in an order that
// depends on their number alone.
struct AddSumsArgs {
  const double* partial;
  const uint32_t* list;
  const uint32_t* begin;
  double* sums;
  uint32_t num_tensors;
  uint32_t pairs;
};

// scalars[t].lamb.step_size = lr * trust ratio, from all ranks' sums in rank
// order: gathered[(p * num_tensors + t) * 2].
struct TrustArgs {
  const double* gathered;
  const TensorInfo* tensors;
  const kernels::Hyper* hypers;
  TensorScalars* scalars;
  uint32_t num_tensors;
  int32_t size;
};

// A kernel of generated code, whose parameters are words of 8 bytes
// (fusedpg/fusion/codegen_cuda.py). Host memory.
struct ProgramLoadArgs {
  const char* image; // PTX, ended by a zero
  const char* entry;
  char* log; // out: what the driver's compiler says against it
  uint32_t log_bytes;
  uint32_t parameters;
};
struct ProgramLaunchArgs {
  void* program; // what program_load() gave
  const uint64_t* words; // of the parameters, read by the call
  uint32_t num_words;
  uint32_t unused;
  uint64_t count; // elements
};
// Elements that a block takes at once: kTile of codegen_cuda_text.py.
constexpr uint32_t kProgramTile = 1024;

// What the ring of a patched NCCL (patches/nccl) does to this rank's block
// while it passes by. Lies in device memory.
constexpr uint32_t kRingChannels = 64; // at most
enum class RingMode : uint32_t {
  kUpdate, // the update; the parameters go on
  kMoments, // LAMB's first half; nothing goes on
};
struct RingUpdate {
  // `grads` and `params_out` are this rank's block of the receive buffer, where
  // the ring leaves the sum and takes up the parameters.
  UpdateArgs update;
  uint32_t num_pieces; // of update.chunk, by ascending `wire`
  RingMode mode;
  // kMoments: sums of squares of parameters and directions, added to
  // sums[2 * (piece * kRingChannels + channel)] and the next.
  double* sums;
};
// `how` of ncclFusedpgReduceScatterUpdate.
constexpr int kRingGathers = 1;
constexpr int kRingProtocols = 3;
constexpr int ring_by(int protocol) {
  return 2 * protocol + 2;
}
// Changes with the call, and the meaning or the layout of what RingUpdate leads
// to.
constexpr uint64_t kRingAbi = (uint64_t(3) << 32) | sizeof(RingUpdate);

// Blocks meet the other ranks' blocks of their number, so all ranks start as
// many, whatever their GPUs are.
constexpr uint32_t kDirectBlocks = 128;
constexpr uint32_t kExchangeBlocks = 16; // the first of them
constexpr int kMaxDirectRanks = 128;

// What the barriers of one block count: those it has left in earlier kernels,
// and those at which each rank has arrived, which that rank writes.
struct alignas(128) DirectSignals {
  uint64_t epoch;
  uint64_t passed[kMaxDirectRanks];
};

// A rank tells the others this before a step: its raw header, in words, and where
// its gradients and parameters begin in its arena, in bytes, two words a tensor.
constexpr size_t kMaxDirectTensors = 4000;
struct DirectNotice {
  uint64_t
      words[(header_bytes(kMaxDirectTensors) + 7) / 8 + 2 * kMaxDirectTensors];
};

// Lies behind the tensors of each rank's arena; zeros before the first step.
struct DirectRoom {
  DirectSignals signals[kDirectBlocks];
  DirectNotice notice;
};

// The memory of all ranks, for a kernel of the direct path, and how it waits for
// them.
struct PeerAccess {
  int32_t rank;
  int32_t size;
  char* arenas[kMaxDirectRanks]; // by rank
  // An address that stores by multicast begin at: to the same place of all
  // arenas. Null: there is none.
  char* multicast;
  uint64_t room; // where DirectRoom is in each arena, in bytes
  // Host memory that the device reads: once it is not 0, kernels that wait for
  // other ranks end, whatever has been done by then.
  const uint64_t* stop;
  // A kernel that has waited for so long ends, too, and tells the host: `late`
  // receives `sequence`, unless it holds an earlier kernel's.
  uint64_t nanoseconds;
  uint64_t* late;
  uint64_t sequence;
};

// Tells all ranks what this one has, and reads what they tell, behind a barrier:
// their streams have come this far then, and so have their gradients.
struct ExchangeArgs {
  PeerAccess peers;
  uint64_t* headers; // by rank: this rank's; out: the others', too
  const uint64_t* offsets; // this rank's, as DirectNotice has them
  uint64_t* all_offsets; // out: all ranks', in their order
  uint32_t num_tensors;
  uint32_t header_words;
};

// The whole step in one kernel behind that of an exchange: reads the peers'
// gradients, updates this rank's slices, and stores the new parameters to all
// ranks, whose barrier ends it. Sums are left folds in rank order, in the compute
// type.
struct DirectArgs {
  UpdateArgs update; // its `grads` and `params_out` mean nothing
  PeerAccess peers;
  const uint64_t* offsets; // all ranks'
  const double* weights; // by rank; each product is rounded. Null: none
  uint32_t num_tensors;
  uint32_t unused;
};

} // namespace fusedpg::cuda
