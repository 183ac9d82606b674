#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "base/rendezvous.hpp"
#include "net/transport.hpp"
#include "net/ucx_api.hpp"
#include "net/ucx_worker.hpp"
#include "net/wake_signal.hpp"

namespace fusedpg {

// Messages by UCX: over InfiniBand, RoCE or TCP, whichever it finds.
//
// A connection to every rank is made at once, and every one has carried a
// message when the constructor returns. When a peer's process ends, UCX says so
// within milliseconds; that a link is down it may never say, which is what
// deadlines are for. After a failure all connections are closed before the
// error is thrown, so nothing writes to a buffer any more, and peers hear of it.
class UcxTransport : public PolledTransport {
 public:
  // Collective. `check` throws when waiting for the others is in vain.
  UcxTransport(
      const ucx::Api& api,
      const UcxConfig& config,
      Rendezvous& rendezvous,
      int rank,
      int size,
      const Deadline& deadline,
      const std::function<void()>& check);
  // Connects to nobody: see connect().
  UcxTransport(
      const ucx::Api& api,
      const UcxConfig& config,
      int rank,
      int size);
  UcxTransport(const UcxTransport&) = delete;
  // What was sent still gets on its way: see leave().
  ~UcxTransport() override;

  int rank() const override {
    return rank_;
  }
  int size() const override {
    return worker_->size();
  }
  RequestPtr send(int to, uint32_t tag, const NetBuffer& message) override;
  RequestPtr receive(int from, uint32_t tag, const NetBuffer& into) override;
  void flush(const Deadline& deadline) override;
  bool progress() override;
  void set_watch(std::function<void()> watch) override {
    watch_ = std::move(watch);
  }
  void abort() override;
  // After it nobody reads from or writes to any buffer.
  void end() noexcept override;

  std::string address() const override {
    return worker_->address();
  }
  void connect(int peer, const std::string& address) override {
    worker_->connect(peer, address);
  }
  bool connected(int peer) const override {
    return worker_->connected(peer);
  }
  bool lost(int peer) override {
    return deaf(peer);
  }
  bool deaf(int peer) const override {
    return worker_->lost(peer) != ucx::kOk;
  }
  State state(const Request& request) override;
  Sleep sleep(std::chrono::milliseconds most) override;
  void wake() override;
  void awake() override;

 private:
  using Operation = UcxWorker::Operation;
  using OperationPtr = UcxWorker::OperationPtr;
  class UcxRequest;

  UcxTransport(const ucx::Api& api, const UcxConfig& config, int rank);
  void start(const UcxConfig& config, int size);
  void connect_all(
      const std::vector<std::string>& addresses,
      const Deadline& deadline,
      const std::function<void()>& check);
  OperationPtr start_send(int to, uint32_t tag, const NetBuffer& message);
  OperationPtr start_receive(int from, uint32_t tag, const NetBuffer& into);
  bool over(const Operation& operation) const;
  // Makes progress until `done`, or sleeps for it; false at the deadline or on
  // abort().
  template <typename Done>
  bool progress_until(const Deadline& deadline, const Done& done);
  void sleep_until(const Deadline& deadline);
  void wait(Operation& operation, const Deadline& deadline);
  [[noreturn]] void give_up(const Operation& operation, const Deadline&);
  std::string losses() const;

  const ucx::Api& api_;
  const int rank_;
  const std::chrono::microseconds spin_;
  const std::chrono::milliseconds farewell_;
  std::function<void()> watch_;
  std::unique_ptr<UcxWorker> worker_;
  WakeSignal abort_signal_;
  Fd both_; // this signal and the worker's events
  std::atomic<bool> aborted_{false};
  bool failed_ = false;
  int fruitless_ = 0; // sleeps in a row that ended early for nothing
  Clock::time_point sleeps_until_{}; // the last one
};

} // namespace fusedpg
