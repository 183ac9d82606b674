#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/rendezvous.hpp"
#include "net/transport.hpp"
#include "net/ucx_api.hpp"

namespace fusedpg {

struct UcxConfig {
  // Names without "UCX_", and values, on top of UCX's own and the user's
  // environment.
  std::vector<std::pair<std::string, std::string>> set;
  std::chrono::microseconds spin{50}; // before a wait sleeps
  std::chrono::milliseconds farewell{2000}; // for what is under way at the end
};

// Messages by UCX: over InfiniBand, RoCE or TCP, whichever it finds.
//
// A connection to every rank is made at once, and every one has carried a
// message when the constructor returns. When a peer's process ends, UCX says so
// within milliseconds; that a link is down it may never say, which is what
// deadlines are for. After a failure all connections are closed before the
// error is thrown, so nothing writes to a buffer any more, and peers hear of it.
class UcxTransport : public Transport {
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
  // Waits until what was sent is on its way, for a limited time.
  ~UcxTransport() override;

  int rank() const override {
    return rank_;
  }
  int size() const override {
    return static_cast<int>(peers_.size());
  }
  RequestPtr send(int to, uint32_t tag, const NetBuffer& message) override;
  RequestPtr receive(int from, uint32_t tag, const NetBuffer& into) override;
  bool ends_at_once() const override {
    return true;
  }
  void flush(const Deadline& deadline) override;
  void progress() override;
  void set_watch(std::function<void()> watch) override {
    watch_ = std::move(watch);
  }
  void abort() override;
  // After it nobody reads from or writes to any buffer.
  void end() noexcept override;

  // --- for one that connects to others as it needs them ----------------------
  // What a peer connects to. It may do so whether or not this rank does.
  const std::string& address() const {
    return address_;
  }
  void connect(int peer, const std::string& address);
  bool connected(int peer) const {
    return peers_[peer].endpoint != nullptr;
  }
  bool lost(int peer) const {
    return peers_[peer].lost != ucx::kOk;
  }
  enum class State { kUnderWay, kDone, kLost };
  State state(const Request& request) const;
  // Sleeps until there is something to do, or wake(), for at most so long.
  void doze(std::chrono::milliseconds most);
  // From any thread.
  void wake();

 private:
  struct Operation;
  class UcxRequest;
  struct Peer {
    UcxTransport* transport;
    int rank;
    ucx::Endpoint endpoint = nullptr;
    ucx::Status lost = ucx::kOk; // what ended the connection
  };
  using Operations = std::list<std::shared_ptr<Operation>>;

  static void on_sent(void* request, ucx::Status, void* operation);
  static void on_received(
      void* request,
      ucx::Status,
      const ucx::ReceiveInfo*,
      void* operation);
  static void on_lost(void* peer, ucx::Endpoint, ucx::Status);

  void start(const UcxConfig& config);
  void connect_all(
      const UcxConfig& config,
      Rendezvous& rendezvous,
      const Deadline& deadline,
      const std::function<void()>& check);
  std::shared_ptr<Operation> begin(
      int peer,
      bool sends,
      const NetBuffer& buffer);
  std::shared_ptr<Operation> start_send(
      int to,
      uint32_t tag,
      const NetBuffer& message);
  std::shared_ptr<Operation> start_receive(
      int from,
      uint32_t tag,
      const NetBuffer& into);
  bool over(const Operation& operation) const;
  void started_is(Operation& operation, ucx::StatusPtr started);
  void check(ucx::Status status, const char* what) const;
  // Makes progress until `done`, or sleeps for it; false at the deadline or on
  // abort().
  template <typename Done>
  bool progress_until(const Deadline& deadline, const Done& done);
  void sleep(const Deadline& deadline);
  void wait(Operation& operation, const Deadline& deadline);
  [[noreturn]] void give_up(const Operation& operation, const Deadline&);
  std::string losses() const;
  void close_endpoints(bool force, const Deadline& deadline);
  void release() noexcept;

  const ucx::Api& api_;
  const int rank_;
  const std::chrono::microseconds spin_;
  std::function<void()> watch_;
  const std::chrono::milliseconds farewell_;
  ucx::Context context_ = nullptr;
  ucx::Worker worker_ = nullptr;
  std::string address_;
  int progress_fd_ = -1; // readable when there is something to do
  int abort_fd_ = -1;
  std::atomic<bool> aborted_{false};
  bool failed_ = false;
  std::vector<Peer> peers_;
  std::vector<int> lost_; // ranks, in the order in which connections ended
  Operations under_way_; // that UCX knows of
};

} // namespace fusedpg
