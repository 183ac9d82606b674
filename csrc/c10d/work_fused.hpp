#pragma once

#include <exception>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace fusedpg {

// One asynchronous operation. The thread that executes it calls complete();
// waiters of the Work wake at once, while the future, if anyone asked for it,
// is completed on another thread: its callbacks may start collectives of their
// own and wait for them.
class WorkFused : public c10d::Work {
 public:
  // `title` and `inputs` go to the profiler; `outputs` to the future.
  WorkFused(
      int rank,
      c10d::OpType op_type,
      const char* title,
      const std::vector<at::Tensor>& inputs,
      std::vector<at::Tensor> outputs);

  void complete(std::exception_ptr error);
  void set_sequence(uint64_t sequence) {
    sequence_ = sequence;
  }
  void set_source_rank(int rank) {
    source_rank_ = rank;
  }

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override {
    return sequence_;
  }
  int sourceRank() const override {
    return source_rank_;
  }

 private:
  std::vector<at::Tensor> outputs_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::atomic<uint64_t> sequence_{0};
  std::atomic<int> source_rank_{-1};
};

// Several operations as one, for coalescing.
class WorkGroup : public c10d::Work {
 public:
  WorkGroup(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : Work(rank, c10d::OpType::COALESCED),
        works_(std::move(works)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

} // namespace fusedpg
