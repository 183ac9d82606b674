#pragma once

#include "cuda/enqueuing.hpp"
#include "cuda/selector.hpp"
#include "cuda/task.hpp"

namespace fusedpg::cuda {

// One operation of the engine while it is enqueued.
class Run : Enqueuing {
 public:
  Run(CudaEngine& engine, Operation& operation, const Task& task)
      : Enqueuing(engine, operation),
        task_(task),
        n_(task.tensors.size()),
        lamb_(
            task.step != nullptr &&
            formula(task.op) == kernels::Formula::kLamb),
        weighted_(task.reduction.weight.has_value() && task.reduces),
        config_(step_config()),
        path_(select_step_path(config_)) {}

  void run();

 private:
  enum class Middle { kUpdate, kMoments, kOutputs };

  StepConfig step_config() const;
  size_t lay_out_slot(); // its bytes
  void fill_slot();
  void agree();
  void prepare();
  double divisor() const {
    return task_.reduces && task_.reduction.mean && !weighted_ ? e_.size_ : 1;
  }

  const std::vector<ChunkLayout>& chunks() const {
    return layout_->layout.chunks;
  }

  Chunk chunk(size_t t) const;
  char* block(const DeviceMemory& buffer, size_t t, DType type, int rank)
      const {
    // Results of whole chunks are all that lies in their buffer.
    const size_t begin =
        chunks()[t].whole ? 0 : static_cast<size_t>(rank) * chunks()[t].block;
    return static_cast<char*>(buffer.get()) + begin * dtype_size(type);
  }
  char* grad_block(size_t t, int rank) const {
    return block(e_.wire_.grads[t % 2], t, task_.grad_type, rank);
  }
  // Of a result that is gathered.
  char* param_block(size_t t, int rank, size_t result = 0) const {
    size_t before = 0;
    for (size_t k = 0; k < result; ++k) {
      before += layout_->layout.max_block * dtype_size(task_.results[k]);
    }
    return block(e_.wire_.params[t % 2], t, task_.results[result], rank) +
        before * static_cast<size_t>(e_.size_);
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

  CudaEngine::Needs wire_needs() const;
  // A single rank's gradients are its slices.
  bool in_place() const {
    return alone() && task_.updates && !weighted_ && !task_.widens;
  }

  void pass(bool reduces, Middle middle, bool gathers);
  void pack(size_t t);
  void reduce_scatter(size_t t);
  UpdateArgs update_args(size_t t, bool reduced_here) const;
  void work_on(size_t t, Middle middle, bool reduced_here);
  void all_gather(size_t t);
  void unpack(size_t t);

  // --- program.cpp
  void launch_program(size_t t, bool reduced_here);

  // --- step_paths.cpp
  void exchange_norms();
  void run_direct();
  RingUpdate ring_update(size_t t) const;
  void run_ring();
  void ring(size_t t);

  const Task& task_;
  const size_t n_;
  const bool lamb_;
  const bool weighted_;
  const StepConfig config_;
  const GpuPath path_;
  CudaEngine::DeviceLayout* layout_ = nullptr;
  bool skips_ = false; // blocks of zeros
  bool has_lrs_ = false;
  bool prepared_ = false;
  // Offsets in the slot.
  size_t tensors_ = 0, hypers_ = 0, lrs_ = 0, lr_types_ = 0, weight_ = 0,
         offsets_ = 0, agree_ = 0, weights_ = 0, scalars_ = 0, all_offsets_ = 0,
         partial_sums_ = 0, sums_ = 0, all_sums_ = 0, rings_ = 0;
  size_t uploaded_ = 0; // bytes, from the slot's beginning
};

} // namespace fusedpg::cuda
