#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/deadline.hpp"
#include "base/fork.hpp"
#include "c10d/forwarding.hpp"
#include "c10d/interruptible.hpp"
#include "host/executor.hpp"
#include "messages/messages.hpp"

namespace fusedpg {

// One asynchronous operation. The thread that executes it calls complete();
// who waits for the Work executes it if it has not begun. The future, if anyone
// asked for it, is completed on another thread: its callbacks may start
// collectives of their own and wait for them. It is complete when wait()
// returns; its callbacks may still run then.
class WorkFused : public c10d::Work {
 public:
  // `title` and `inputs` go to the profiler, if there is a title; `outputs` to the future, or
  // `lists` if there are several, as with Gloo.
  WorkFused(
      std::shared_ptr<Interrupter> interrupter,
      int rank,
      c10d::OpType op_type,
      const std::string& title,
      const std::vector<at::Tensor>& inputs,
      std::vector<at::Tensor> outputs,
      TensorLists lists = {});

  void complete(std::exception_ptr error);
  // What executes it, and as which ticket; not for point to point.
  void set_executor(std::shared_ptr<Executor> executor, uint64_t ticket) {
    executor_ = std::move(executor);
    sequence_ = ticket;
  }
  // For the Work of a message: a thread that waits or asks for it moves messages.
  void set_messages(const std::shared_ptr<Messages>& messages) {
    messages_ = messages;
  }
  void set_source_rank(int rank) {
    source_rank_ = rank;
  }

  bool isCompleted() override;
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
  bool await(std::chrono::milliseconds timeout);
  void wait_for_future();
  void check_ended();

  // The value and the type of the future.
  c10::IValue value() const;
  c10::TypePtr type() const;

  const Origin origin_{};
  const std::shared_ptr<Interrupter> interrupter_;
  std::vector<at::Tensor> outputs_;
  TensorLists lists_; // none, or at least two
  std::shared_ptr<Executor> executor_;
  std::weak_ptr<Messages> messages_; // which the group may have ended meanwhile
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::atomic<uint64_t> sequence_{0};
  std::atomic<int> source_rank_{-1};
};

// Several operations as one, for coalescing. Its future, too, is complete when
// wait() returns.
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
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

} // namespace fusedpg
