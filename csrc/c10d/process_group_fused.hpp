#pragma once

#include <memory>
#include <string>
#include <vector>

#include "c10d/routes/cpu.hpp"
#include "c10d/routes/cuda.hpp"
#include "c10d/routes/route.hpp"
#include "host/reunion.hpp"

namespace fusedpg {

// The torch.distributed backend "fused": a group with a route for its CPU
// tensors and one for those on GPUs (c10d/routes/). A collective is the route's
// method of the same name; what is here is the group's life.
//
// Thread-safe: any method may be called from any thread at any time.
class ProcessGroupFused : public Forwarding<c10d::Backend, ProcessGroupFused> {
 public:
  struct Options : c10d::Backend::Options {
    explicit Options(
        std::chrono::milliseconds timeout = kBackendDefaultTimeout,
        const std::string& name = "fused")
        : c10d::Backend::Options(name, timeout) {}
    // Whether the group serves "gloo" (fusedpg/_serve_gloo.py).
    bool serves_gloo() const {
      return backend == "gloo";
    }
    // The fields of Gloo's options, first and in its order: see layout_is_gloos().
    std::vector<std::shared_ptr<void>> devices; // none
    int threads = 2; // has no effect
    // A group that serves "gloo" has a real one for tensors on GPUs.
    bool gloo_for_cuda = false;
    fusedpg::Options engine;
    // ProcessGroupNCCL's, for the delegate; may be null.
    c10::intrusive_ptr<c10d::Backend::Options> nccl_options;
    // CPU tensors are taken for a GPU's: tests, with a fake CUDA and NCCL.
    bool cpu_as_cuda = false;
  };

  // Ranks of another group, by rank of the new one: if they are all on one host,
  // they know each other from there and meet without the store.
  struct Known {
    std::shared_ptr<Links> links; // null: they do not
    std::vector<int> ranks; // of the links
  };
  // Collective over the ranks of the group.
  ProcessGroupFused(
      const c10::intrusive_ptr<c10d::Store>& store,
      int rank,
      int size,
      c10::intrusive_ptr<Options> options,
      Known known = {});
  ~ProcessGroupFused() override;

  const std::string getBackendName() const override {
    return options_->backend;
  }
  // Whether this torch's ProcessGroupGloo, of which `gloo` is one with so many
  // threads, has its options where this class has them. DDP's logger casts the
  // backend of any group whose name is "gloo" to ProcessGroupGloo and reads
  // options_->threads: only then may a group serve under that name.
  static bool layout_is_gloos(c10d::Backend& gloo, int threads);
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return options_;
  }

  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks)
      override;
  // For GPUs NCCL needs it: messages of one stream would wait for each other. It
  // makes torch's batch_isend_irecv() keep a list of the group, to which other
  // operations are added, and not performed, that another thread calls meanwhile,
  // or whoever comes after an exception.
  bool supportsCoalescing() const override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // --- fused operations; see Route -------------------------------------------
  WorkPtr fused_step_(StepArguments arguments, bool async_op);
  WorkPtr reduce_shards_(ShardsArguments arguments, bool async_op);
  WorkPtr fused_program_(ProgramArguments arguments, bool async_op);
  // See CudaRoute.
  int program_architecture(const at::Tensor& tensor) {
    return cuda_->program_architecture(tensor);
  }
  std::shared_ptr<cuda::LoadedProgram> load_program(
      const std::string& image,
      const std::string& entry,
      uint32_t parameters,
      const at::Tensor& tensor) {
    return cuda_->load_program(image, entry, parameters, tensor);
  }
  // Whether a tensor is a GPU's to this group.
  bool on_gpu(const at::Tensor& tensor) const {
    return tensor.is_cuda() || options_->cpu_as_cuda;
  }
  WorkPtr sparse_all_reduce(
      const at::Tensor& tensor,
      const SkipArguments& arguments,
      bool async_op);
  // Synchronous; `op` is a name, "sum".
  void all_reduce_(const at::Tensor& tensor, std::string_view op);
  // Of the blocks that are skipped where nothing else is said; in elements.
  int64_t block_size() const {
    return static_cast<int64_t>(group_->settings.block_size);
  }
  // Of all operations so far; waits for sums over the GPUs' arenas.
  const Stats& stats();
  const Waits& waits();
  void reset_stats();

  // --- memory; see Route -----------------------------------------------------
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor empty(
      at::IntArrayRef sizes,
      at::ScalarType type,
      at::Device device = at::kCPU,
      bool lives_long = false);
  at::Tensor empty_shared(at::IntArrayRef sizes, at::ScalarType type);
  bool in_arena(const at::Tensor& t);

  // --- groups and their end --------------------------------------------------
  bool supportsSplitting() const override {
    return true;
  }
  bool supportsShrinking() const override {
    return true;
  }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store,
      const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  c10::intrusive_ptr<c10d::Backend> shrink(
      const std::vector<int64_t>& ranks_to_exclude,
      int shrink_flags,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {} // both begin at zero
  uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override;
  // For a caller that raises before it calls the group for an operation on CPU
  // tensors: the peers that are in the operation, or come to it, raise with the
  // reason. Where all ranks do so, nothing else happens.
  void refuse(const std::string& reason);
  void set_async_call(uint64_t number) {
    group_->set_async_call(number);
  }
  void abort() override;
  void shutdown() override;
  // The same with little patience, when the interpreter exits. `exit` says how,
  // for the peers.
  void shutdown_at_exit(const std::string& exit);
  GroupInfo info();
  void name_recorded();
  // --- what torch's ProcessGroupNCCL has, for tensors on GPUs; see CudaRoute
  c10::intrusive_ptr<c10d::Backend> delegate() {
    return cuda_->delegate();
  }
  void eagerConnectSingleDevice(at::Device device) override;
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  void enableCollectivesTiming() override;
  bool supportsTimeEstimation() const override;

  // How these ranks of this group may meet again.
  Known known(const std::vector<int>& ranks) const;

  // Called on rank 0 of each group once it has met; `asked`: FUSEDPG_LOG=info.
  using Announcer = std::function<void(ProcessGroupFused&, bool asked)>;
  static void set_announcer(Announcer registered);

 private:
  friend Forwarding;
  // The one place that chooses a route.
  Route& route(at::Device device) {
    if (device.is_cuda() || options_->cpu_as_cuda) {
      return *cuda_;
    }
    return *cpu_;
  }
  std::optional<ErrorKind> failure();
  void end(); // shutdown(), where no signal handlers are to run
  c10d::Backend& target(const at::Tensor* tensor);
  // With this group's name, as its members know it by now.
  c10::intrusive_ptr<c10d::Backend> new_delegate(
      const char* device,
      const c10::intrusive_ptr<c10d::Store>& store) const;
  // While it lives this thread is in a method of c10d. Waits within it run signal
  // handlers. `is_collective`: what is found wrong before the operation has its
  // place in the group's order is known to this rank alone, and its peers may wait
  // in it.
  class Calling {
   public:
    Calling(ProcessGroupFused& group, bool is_collective)
        : group_(group),
          scope_(group.group_->interrupter.get()),
          unknown_(is_collective) {}
    WorkPtr returned(WorkPtr work) {
      unknown_ = false;
      scope_.raise();
      return work;
    }
    // Throws what the caller gets in place of the exception that is being handled.
    [[noreturn]] void failed();

   private:
    ProcessGroupFused& group_;
    const uint64_t before_ = shared_errors();
    Interruptible scope_;
    bool unknown_;
  };
  template <typename Method, typename... Arguments>
  WorkPtr forward(
      const at::Tensor* tensor,
      Method method,
      Arguments&... arguments) {
    c10d::Backend& there = target(tensor);
    Calling calling(*this, is_cpu(there));
    try {
      return calling.returned((there.*method)(arguments...));
    } catch (...) {
      calling.failed();
    }
  }
  // A refused message is not announced: it concerns one peer alone.
  template <typename Method, typename... Arguments>
  WorkPtr forward_message(
      const at::Tensor* tensor,
      Method method,
      Arguments&... arguments) {
    return call(false, [&] { return (target(tensor).*method)(arguments...); });
  }
  template <typename Operation>
  WorkPtr call(bool is_collective, const Operation& operation) {
    Calling calling(*this, is_collective);
    try {
      return calling.returned(operation());
    } catch (...) {
      calling.failed();
    }
  }
  bool is_cpu(const c10d::Backend& there) const {
    return &there == cpu_.get();
  }
  bool has_another_store() const;
  // The first two members of ProcessGroupGloo are a shared_ptr and its options:
  // see layout_is_gloos().
  const c10::intrusive_ptr<c10d::Store> store_;
  void* const second_half_ = nullptr;
  const c10::intrusive_ptr<Options> options_;
  std::unique_ptr<Group> group_;
  std::vector<int> local_ranks_; // of this host
  Known known_; // of this group's ranks
  bool store_ends_with_peer_ = false; // its process keeps the store's server
  c10::intrusive_ptr<CpuRoute> cpu_;
  c10::intrusive_ptr<CudaRoute> cuda_;
  c10::intrusive_ptr<c10d::Backend> gloo_for_cuda_; // may be null
  std::atomic<int> children_{0}; // groups made by shrink()
};

// The live group of this name, or null. For operators, which name groups: the
// object that torch registers may hide ours behind a debugging wrapper.
ProcessGroupFused* find_group(const std::string& name);

// Tells the flight recorder what the live groups are called, and their ranks.
void name_recorded_groups();

// At the interpreter's exit: shuts down every group that is still alive, and
// sees to it that no callback of a future runs any more. `exit`: see
// shutdown_at_exit().
void end_at_exit(const std::string& exit);

} // namespace fusedpg
