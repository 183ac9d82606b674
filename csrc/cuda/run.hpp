#pragma once

#include "base/round_up.hpp"
#include "cuda/engine.hpp"
#include "cuda/selector.hpp"
#include "cuda/task.hpp"

namespace fusedpg::cuda {

// Lays the arrays of an operation out in its slot.
class Arrays {
 public:
  size_t add(size_t bytes) {
    const size_t offset = bytes_;
    bytes_ += (bytes + 15) / 16 * 16;
    return offset;
  }
  size_t bytes() const {
    return bytes_;
  }

 private:
  size_t bytes_ = 0;
};

// One operation of the engine while it is enqueued.
class Run {
 public:
  Run(CudaEngine& engine,
      const CudaEngine::OperationPtr& operation,
      const Task& task)
      : e_(engine),
        cuda_(engine.cuda_),
        operation_(operation),
        compute_(engine.compute_.get()),
        wire_(engine.wire_stream_.get()),
        task_(task),
        n_(task.tensors.size()),
        lamb_(
            task.step != nullptr &&
            formula(task.op) == kernels::Formula::kLamb),
        weighted_(task.reduction.weight.has_value() && task.reduces),
        config_(step_config()),
        path_(select_step_path(config_)),
        folds_(select_folds(config_, path_)),
        rides_(select_rides(config_, path_, weighted_)) {}

  // Takes the memory that the operation needs. Throws before anything has been
  // enqueued; other ranks wait then until this one calls it again.
  void acquire();
  void enqueue();

 private:
  void check(const char* what, int error) const {
    cuda::check(cuda_, what, error);
  }
  // `to` goes on when `from` has got this far.
  void order(Stream from, const OwnedEvent& event, Stream to) {
    check("cudaEventRecord", cuda_.event_record(event.get(), from));
    check("cudaStreamWaitEvent", cuda_.stream_wait_event(to, event.get()));
  }
  // Gathers bytes of this slot from all ranks; `from` may be their place in `to`.
  void gather(size_t from, size_t to, size_t bytes);
  bool alone() const {
    return e_.size_ == 1;
  }

  template <typename T>
  T* device(size_t offset) const {
    return reinterpret_cast<T*>(
        static_cast<char*>(operation_->slot_->device.get()) + offset);
  }
  template <typename T>
  T* host(size_t offset) const {
    return reinterpret_cast<T*>(
        static_cast<char*>(operation_->slot_->host.get()) + offset);
  }

  enum class Middle { kUpdate, kMoments, kOutputs };

  StepConfig step_config() const;
  size_t lay_out_slot(); // its bytes
  void fill_slot();
  // The first call of a kind: blocks until all ranks are known to call the same,
  // or throws. Other sizes than theirs must not come to the carrier.
  void meet_ranks();
  // The headers of an operation whose first chunk has none.
  void agree();
  Header header(char* data, size_t stride) const;
  Header riding_header(char* block) const;
  size_t slot_header() const {
    return round_up(header_bytes(n_), sizeof(uint64_t));
  }
  // Writes `items` bytes or elements for each of `copies` ranks.
  void propose(const Header& to, size_t copies, size_t items);
  // Reads the headers; once, before the first kernel that needs to know.
  void prepare();
  double divisor() const {
    return task_.reduces && task_.reduction.mean && !weighted_ ? e_.size_ : 1;
  }

  const std::vector<ChunkLayout>& chunks() const {
    return layout_->layout.chunks;
  }

  // On the wire a rank's block has `block` elements.
  Chunk chunk(size_t t, size_t block) const;
  // Elements of a rank's gradients there, with their header.
  size_t sent(size_t t) const {
    return chunks()[t].block + chunks()[t].header;
  }
  char* grad_block(size_t t, int rank) const {
    return static_cast<char*>(e_.wire_.grads[t % 2].get()) +
        static_cast<size_t>(rank) * sent(t) * dtype_size(task_.grad_type);
  }
  // Where owners get all ranks' gradients, behind what they send.
  char* received(size_t t) const {
    return static_cast<char*>(e_.wire_.grads[t % 2].get()) +
        layout_->layout.max_block * static_cast<size_t>(e_.size_) *
        dtype_size(task_.grad_type);
  }
  // What reduce_scatter() leaves there.
  char* reduced(size_t t) const {
    return folds_ ? received(t) : grad_block(t, e_.rank_);
  }
  // Of a result that is gathered.
  char* param_block(size_t t, int rank, size_t result = 0) const {
    size_t before = 0;
    for (size_t k = 0; k < result; ++k) {
      before += layout_->layout.max_block * dtype_size(task_.results[k]);
    }
    return static_cast<char*>(e_.wire_.params[t % 2].get()) +
        before * static_cast<size_t>(e_.size_) +
        static_cast<size_t>(rank) * chunks()[t].block *
        dtype_size(task_.results[result]);
  }

  size_t num_rings() const {
    return path_ == GpuPath::kRing ? chunks().size() : 0;
  }
  size_t partial_sum_bytes() const {
    const Layout& l = layout_->layout;
    const size_t pairs = path_ == GpuPath::kRing
        ? l.pieces.size() * kRingChannels
        : l.tiles.size();
    return lamb_ ? 2 * pairs * sizeof(double) : 0;
  }

  // Elements of the first chunk's header; 0: it has none.
  size_t header_elements() const;
  void reserve_wire();
  // A single rank's gradients are its slices.
  bool in_place() const {
    return alone() && task_.updates && !weighted_ && !task_.widens;
  }

  void pass(bool reduces, Middle middle, bool gathers);
  void pack(size_t t);
  void reduce_scatter(size_t t);
  UpdateArgs step_args() const; // of any part of it
  UpdateArgs update_args(size_t t, bool reduced_here) const;
  void work_on(size_t t, Middle middle, bool reduced_here);
  void all_gather(size_t t);
  void unpack(size_t t);

  // --- program.cpp
  void launch_program(size_t t, bool reduced_here);

  // --- step_paths.cpp
  void exchange_norms();
  PeerAccess peers() const;
  void exchange();
  void run_direct();
  RingUpdate ring_update(size_t t) const;
  void run_ring();
  void ring(size_t t);

  CudaEngine& e_;
  const CudaApi& cuda_;
  const CudaEngine::OperationPtr operation_;
  const Stream compute_;
  const Stream wire_;
  const Task& task_;
  const size_t n_;
  const bool lamb_;
  const bool weighted_;
  const StepConfig config_;
  const GpuPath path_;
  const bool folds_; // gradients are added up by their owners
  const bool rides_; // headers go with the first chunk
  CudaEngine::DeviceLayout* layout_ = nullptr;
  bool has_lrs_ = false;
  bool prepared_ = false;
  // Offsets in the slot.
  size_t tensors_ = 0, hypers_ = 0, lrs_ = 0, lr_types_ = 0, offsets_ = 0,
         kinds_ = 0, headers_ = 0, weights_ = 0, scalars_ = 0, all_offsets_ = 0,
         partial_sums_ = 0, sums_ = 0, all_sums_ = 0, rings_ = 0;
  size_t uploaded_ = 0; // bytes, from the slot's beginning
};

} // namespace fusedpg::cuda
