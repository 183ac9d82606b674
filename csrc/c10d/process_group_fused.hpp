#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "c10d/backend_transport.hpp"
#include "c10d/cuda_group.hpp"
#include "c10d/delegate.hpp"
#include "c10d/fused_arguments.hpp"
#include "c10d/work_fused.hpp"
#include "collectives/collectives.hpp"
#include "collectives/engine.hpp"
#include "collectives/net_sparse.hpp"
#include "host/executor.hpp"
#include "host/mailbox.hpp"

namespace fusedpg {

// The torch.distributed backend "fused".
//
// Every collective takes the same way: check the arguments -> run() (take a
// ticket, record for the profiler, queue or execute inline) -> the function of
// the same name in csrc/collectives -> the Work completes. A group whose ranks
// span machines has no engine: run() is never reached and the delegate, torch's
// own Gloo, does the work.
//
// Thread-safe: any method may be called from any thread at any time.
class ProcessGroupFused : public c10d::Backend {
 public:
  struct Options : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
        : c10d::Backend::Options("fused", timeout) {}
    fusedpg::Options engine;
    // CPU tensors are taken for a GPU's: tests, with a fake CUDA and NCCL.
    bool cpu_as_cuda = false;
  };

  // Collective over the ranks of the group.
  ProcessGroupFused(
      const c10::intrusive_ptr<c10d::Store>& store,
      int rank,
      int size,
      c10::intrusive_ptr<Options> options);
  ~ProcessGroupFused() override;

  const std::string getBackendName() const override {
    return "fused";
  }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return options_;
  }

  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // --- collectives (collectives.cpp, moves.cpp, all_to_all.cpp) --------------
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts)
      override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts)
      override;
  WorkPtr allreduce_coalesced(
      Tensors& tensors,
      const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr reduce_scatter(
      Tensors& outputs,
      TensorLists& inputs,
      const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::ReduceScatterOptions& opts) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts)
      override;
  WorkPtr allgather(
      TensorLists& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(
      at::Tensor& output,
      at::Tensor& input,
      const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(
      TensorLists& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(
      TensorLists& outputs,
      Tensors& inputs,
      const c10d::GatherOptions& opts) override;
  WorkPtr scatter(
      Tensors& outputs,
      TensorLists& inputs,
      const c10d::ScatterOptions& opts) override;
  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(
      Tensors& outputs,
      Tensors& inputs,
      const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks)
      override;

  // --- point to point (point_to_point.cpp) -----------------------------------
  WorkPtr send(Tensors& tensors, int dst, int tag) override;
  WorkPtr recv(Tensors& tensors, int src, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // --- fused operations (fused.cpp, fused_net.cpp)
  // ----------------------- One operation: reduce-scatter(grads), update of the
  // owned slices, all-gather(params).
  WorkPtr fused_step_(StepArguments arguments, bool async_op);
  // Its first third: every gradient is reduced in place to its owners.
  WorkPtr reduce_shards_(ShardsArguments arguments, bool async_op);

  // --- reductions that skip zeros (sparse.cpp)
  // all_reduce() that skips blocks of zeros; see
  // collectives/sparse_all_reduce.hpp.
  WorkPtr sparse_all_reduce(
      const at::Tensor& tensor,
      const c10d::ReduceOp& op,
      int64_t block_size,
      double threshold,
      const std::optional<at::Tensor>& residual,
      bool async_op);
  // Of all operations so far; waits for sums over the GPUs' arenas.
  const Stats& stats();
  void reset_stats();

  // --- coalescing
  // ----------------------------------------------------------------
  bool supportsCoalescing() const override {
    return true;
  }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // --- memory
  // ------------------------------------------------------------------
  std::shared_ptr<c10::Allocator> getMemAllocator() override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  // A tensor in the arena, or an error; ordinary memory when the group spans
  // hosts. With `lives_long` its memory goes back to the system when it is
  // freed; otherwise the arena keeps it for the next one.
  at::Tensor empty(
      at::IntArrayRef sizes,
      at::ScalarType type,
      at::Device device = at::kCPU,
      bool lives_long = false);
  bool in_arena(const at::Tensor& t) const;
  // Collective: a tensor of which the ranks of the group hold one physical
  // copy.
  at::Tensor empty_shared(at::IntArrayRef sizes, at::ScalarType type);

  // --- groups and their end
  // ------------------------------------------------------
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
  void abort() override;
  void shutdown() override;
  // shutdown() with little patience, when the interpreter exits.
  void shutdown_at_exit();

  struct Info {
    std::string engine;
    int local_world_size;
    int threads;
    std::string isa;
    size_t arena_reserved;
    size_t arena_used;
    uint64_t sequence_number;
    bool failed;
    size_t cuda_arena = 0; // bytes that were asked for
    int nccl_version = 0; // of the CUDA engine; 0: none
    std::string cuda_path; // of its last step; see path_of_last_step()
  };
  Info info();

 private:
  // Name and profiler facts of one call.
  struct Call {
    c10d::OpType type;
    const char* title; // "fused:all_reduce"
    std::chrono::milliseconds timeout;
    bool async_op;
  };
  // The one way of a collective into the engine. `outputs` become the result of
  // the Work; returns null for a synchronous call that has succeeded.
  WorkPtr run(
      const Call& call,
      const Tensors& inputs,
      const Tensors& outputs,
      Engine::Operation operation);
  // The same for an operation that another backend executes, in ticket order.
  WorkPtr run_delegated(
      const Call& call,
      const Tensors& inputs,
      const Tensors& outputs,
      std::function<WorkPtr(c10d::Backend&)> operation);
  WorkPtr enqueue(
      const Call& call,
      const Tensors& inputs,
      const Tensors& outputs,
      std::function<void(uint64_t)> operation);
  // all_reduce of each tensor, or of all as contributions to one result.
  WorkPtr reduce_all(
      const Tensors& tensors,
      const c10d::AllreduceOptions& opts,
      bool together);
  // outputs[i][p] receives rank p's inputs[i]; then every list of `copies`
  // receives what the outputs hold, rank after rank.
  WorkPtr gather_lists(
      const TensorLists& outputs,
      const Tensors& inputs,
      const c10d::AllgatherOptions& opts,
      const TensorLists& copies = {});
  WorkPtr receive(
      Tensors& tensors,
      int src,
      int tag,
      c10d::OpType type,
      const char* title);
  WorkPtr remember(WorkPtr work);
  // Between startCoalescing and endCoalescing on this thread.
  bool is_coalescing() const;
  // For what runs on the GPU but is not NCCL's alone: it would wait for
  // collectives that a group of calls still holds back.
  void check_not_coalescing(const char* title) const;

  // Whether the CUDA side of the group has to do with these tensors.
  bool on_gpu(const at::Tensor& t) const {
    return t.is_cuda() || options_->cpu_as_cuda;
  }
  bool on_gpu(const Tensors& tensors) const {
    return !tensors.empty() && on_gpu(tensors[0]);
  }
  bool on_gpu(const TensorLists& lists) const {
    return !lists.empty() && on_gpu(lists[0]);
  }
  CudaGroup& cuda() {
    return *cuda_;
  }
  static const at::Tensor& first(const at::Tensor& t) {
    return t;
  }
  template <typename List>
  static const at::Tensor& first(const List& list) {
    return first(list[0]);
  }
  // An ordinary collective of CUDA tensors: the same method of
  // ProcessGroupNCCL.
  template <typename Tensors, typename Method, typename... Args>
  WorkPtr on_nccl(const Tensors& tensors, Method method, Args&... args) {
    return ordinary(first(tensors), [&](c10d::Backend& nccl) {
      return (nccl.*method)(args...);
    });
  }
  WorkPtr ordinary(const at::Tensor& tensor, const CudaGroup::Ordinary& call);

  std::chrono::milliseconds timeout_or(std::chrono::milliseconds given) const {
    return given > std::chrono::milliseconds(0) ? given : timeout_.load();
  }
  // Whether this is a forked child, which has neither the threads nor the
  // shared memory of the group.
  bool forked() const;
  void check_open(const char* op) const;
  void check_root(const char* op, int64_t root) const;
  void check_count(
      const char* op,
      const char* what,
      size_t found,
      size_t expected) const;
  c10::intrusive_ptr<c10d::Backend> abortable_gloo(const char* prefix);
  c10d::Backend& delegate();
  // all_reduce of one tensor on a GPU: skips blocks of zeros if the group's
  // option says so, or returns false.
  bool skip_on_gpu(
      const Tensors& tensors,
      const c10d::AllreduceOptions& opts,
      WorkPtr& work);
  WorkPtr sparse_on_gpu(
      const at::Tensor& tensor,
      const cuda::CudaEngine::SparseCall& call,
      OpCode named,
      std::chrono::milliseconds timeout,
      bool async_op);
  // For an operation between hosts that is not delegated.
  NetContext net_context(
      uint64_t ticket,
      std::chrono::milliseconds timeout,
      OpCode op = OpCode::kSparseAllReduce);
  // all_reduce of one contiguous tensor between hosts: skips blocks of zeros if
  // the group's option says so, or returns false.
  bool skip_between_hosts(
      uint64_t ticket,
      std::chrono::milliseconds timeout,
      const at::Tensor& flat,
      const c10d::ReduceOp& op);
  void abort_delegate();
  bool spans_hosts() const { // then there is no engine
    return engine_ == nullptr;
  }
  Mailbox& mailbox();

  const pid_t owner_;
  const c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<c10d::Store> own_store_; // of this group alone
  const c10::intrusive_ptr<Options> options_;
  const Settings settings_;
  std::atomic<std::chrono::milliseconds> timeout_;
  const kernels::Table& kernels_;
  int local_world_size_ = 0;
  bool ranks_share_hosts_ = false;
  Stats stats_;
  std::shared_ptr<Executor> executor_; // with every WorkFused
  std::unique_ptr<Engine> engine_; // null when the group spans machines
  std::mutex mailbox_mutex_;
  std::unique_ptr<Mailbox> mailbox_; // made by the first send or recv
  std::mutex delegate_mutex_;
  c10::intrusive_ptr<c10d::Backend> delegate_;
  // Made by the first operation that needs it; connections of its own.
  std::unique_ptr<BackendTransport> transport_;
  // Of the executing thread, in a group that spans hosts.
  SkipState net_skip_;
  std::mutex cuda_skip_mutex_;
  SkipState cuda_skip_;
  Pool net_pool_{1};
  std::unique_ptr<CudaGroup> cuda_; // makes what it needs when needed
  std::atomic<bool> closed_{false};
  std::atomic<int> children_{0}; // groups made by shrink()
};

// The live group of this name, or null. For operators, which name groups: the
// object that torch registers may hide ours behind a debugging wrapper.
ProcessGroupFused* find_group(const std::string& name);

// Shuts down every group that is still alive.
void shutdown_all_groups();

} // namespace fusedpg
