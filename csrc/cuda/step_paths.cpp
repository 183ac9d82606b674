// What some operations do in another way: LAMB's norms, the direct path and the
// ring of a patched NCCL.

#include "cuda/run.hpp"

namespace fusedpg::cuda {
namespace {

// In nanoseconds; added to a GPU's clock it is still a number of 64 bits.
constexpr uint64_t kForever = UINT64_MAX / 4;

} // namespace

void Run::exchange_norms() {
  const bool ring = path_ == GpuPath::kRing;
  AddSumsArgs sum{};
  sum.partial = device<double>(partial_sums_);
  sum.list = ring ? layout_->piece_list : layout_->tile_list;
  sum.begin = ring ? layout_->piece_begin : layout_->tile_begin;
  sum.pairs = ring ? kRingChannels : 1;
  sum.sums = device<double>(sums_);
  sum.num_tensors = static_cast<uint32_t>(n_);
  check("add_sums", cuda_.add_sums(&sum, compute_));
  if (!alone()) {
    order(compute_, e_.events_.summed, wire_);
    gather(sums_, all_sums_, 2 * n_ * sizeof(double));
    order(wire_, e_.events_.gathered_sums, compute_);
  }
  TrustArgs trust{};
  trust.gathered = device<double>(alone() ? sums_ : all_sums_);
  trust.tensors = device<TensorInfo>(tensors_);
  trust.hypers = device<kernels::Hyper>(hypers_);
  trust.scalars = device<TensorScalars>(scalars_);
  trust.num_tensors = static_cast<uint32_t>(n_);
  trust.size = e_.size_;
  check("trust", cuda_.trust(&trust, compute_));
}

// For a kernel of the direct path.
PeerAccess Run::peers() const {
  PeerAccess peers = *e_.peers_;
  // The call's deadline says nothing about when a graph is replayed.
  peers.nanoseconds = operation_->captured_
      ? kForever
      : static_cast<uint64_t>(
            std::chrono::nanoseconds(operation_->deadline_.remaining())
                .count());
  peers.sequence = operation_->sequence;
  return peers;
}

void Run::exchange() {
  static_assert(kMaxDirectTensors >= kMaxStepTensors);
  ExchangeArgs args{};
  args.peers = peers();
  args.headers = device<uint64_t>(headers_);
  args.offsets = device<uint64_t>(offsets_);
  args.all_offsets = device<uint64_t>(all_offsets_);
  args.num_tensors = static_cast<uint32_t>(n_);
  args.header_words = static_cast<uint32_t>(slot_header() / sizeof(uint64_t));
  check("exchange", cuda_.exchange(&args, compute_));
}

// Also where there is nothing to update: its barrier lets no rank tell the next
// operation's facts before all have read this one's.
void Run::run_direct() {
  prepare();
  DirectArgs args{};
  args.peers = peers();
  args.update = step_args();
  Chunk& all = args.update.chunk;
  all.tensors = device<TensorInfo>(tensors_);
  all.pieces = layout_->pieces;
  all.tiles = layout_->tiles;
  all.num_tiles = static_cast<uint32_t>(layout_->layout.tiles.size());
  all.rank = e_.rank_;
  all.size = e_.size_;
  args.offsets = device<uint64_t>(all_offsets_);
  args.weights = weighted_ ? device<double>(weights_) : nullptr;
  args.num_tensors = static_cast<uint32_t>(n_);
  check("direct_step", cuda_.direct_step(&args, compute_));
}

RingUpdate Run::ring_update(size_t t) const {
  const ChunkLayout& c = chunks()[t];
  const std::vector<Tile>& tiles = layout_->layout.tiles;
  const uint32_t first = tiles[c.first_tile].piece;
  RingUpdate ring{};
  ring.update = update_args(t, true);
  ring.update.chunk.pieces = layout_->pieces + first;
  ring.update.grads = ring.update.params_out;
  ring.num_pieces = tiles[c.first_tile + c.num_tiles - 1].piece - first + 1;
  ring.mode = lamb_ ? RingMode::kMoments : RingMode::kUpdate;
  ring.sums = device<double>(partial_sums_) + size_t(2) * kRingChannels * first;
  return ring;
}

// compute:  pack(0)    pack(1)    unpack(0)  pack(2)    unpack(1) ...
// wire:     agree   ring(0)           ring(1)            ring(2)  ...
//
// LAMB's trust ratios need all norms before anything is gathered: its rings
// end with the moments, and there is nothing to unpack.
void Run::run_ring() {
  const CudaEngine::Events& ev = e_.events_;
  const size_t n = chunks().size();
  if (n == 0) {
    prepare(); // flags and counters
  }
  if (lamb_) {
    check(
        "cudaMemsetAsync",
        cuda_.clear(
            device<double>(partial_sums_), partial_sum_bytes(), compute_));
  }
  for (size_t t = 0; t < n + 1; ++t) {
    if (t < n) {
      pack(t);
      prepare();
      order(compute_, ev.packed[t % 2], wire_);
      ring(t);
      check(
          "cudaEventRecord",
          cuda_.event_record(ev.gathered[t % 2].get(), wire_));
    }
    if (t >= 1) {
      check(
          "cudaStreamWaitEvent",
          cuda_.stream_wait_event(compute_, ev.gathered[(t - 1) % 2].get()));
      if (!lamb_) {
        unpack(t - 1);
      }
    }
  }
}

void Run::ring(size_t t) {
  e_.call_nccl("ncclFusedpgReduceScatterUpdate", [&](NcclComm comm) {
    return e_.nccl_.reduce_scatter_update(
        grad_block(t, 0),
        param_block(t, 0),
        chunks()[t].block,
        nccl_type(task_.param_type),
        device<RingUpdate>(rings_) + t,
        lamb_ ? 0 : kRingGathers,
        comm,
        wire_);
  });
}

} // namespace fusedpg::cuda
