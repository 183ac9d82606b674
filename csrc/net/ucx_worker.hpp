#pragma once

#include <chrono>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.hpp"
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

// A UCX worker with a connection to each peer, and what is under way on them.
// One thread at a time; callbacks come from progress().
class UcxWorker {
 public:
  struct Operation {
    UcxWorker& worker;
    const int peer;
    const bool sends;
    const NetBuffer buffer; // stays as long as UCX knows of it
    void* request = nullptr;
    bool done = false;
    ucx::Status status = ucx::kOk;
    size_t length = 0; // of what has come
    std::list<std::shared_ptr<Operation>>::iterator place{};
  };
  using OperationPtr = std::shared_ptr<Operation>;

  UcxWorker(const ucx::Api& api, const UcxConfig& config, int size);
  UcxWorker(const UcxWorker&) = delete;
  // As end().
  ~UcxWorker();

  // What peers connect to.
  const std::string& address() const {
    return address_;
  }
  void connect(int peer, const std::string& address);
  bool connected(int peer) const {
    return peers_[peer].endpoint != nullptr;
  }
  // What ended the connection, or kOk.
  ucx::Status lost(int peer) const {
    return peers_[peer].lost;
  }
  // In the order in which connections ended.
  const std::vector<int>& losses() const {
    return lost_;
  }
  int size() const {
    return static_cast<int>(peers_.size());
  }

  OperationPtr send(int to, uint64_t tag, const NetBuffer& message);
  OperationPtr receive(int from, uint64_t tag, const NetBuffer& into);
  bool progress() {
    return api_.worker_progress(worker_) != 0;
  }
  // Readable when there is something to do, once arm() has returned true; false
  // says that there is something to do now.
  int event_fd() const {
    return event_fd_;
  }
  bool arm() {
    return api_.worker_arm(worker_) == ucx::kOk;
  }
  // What was sent is on its way once the request that it returns, which is
  // released then, is over(); null: it is.
  ucx::StatusPtr start_flush();
  bool over(ucx::StatusPtr request) const {
    return api_.request_check(request) != ucx::kInProgress;
  }
  void release(ucx::StatusPtr request) {
    api_.request_free(request);
  }

  // Closes all connections at once. After it nobody reads from or writes to any
  // buffer.
  void end() noexcept;
  // Gives up what it still receives, and asks for all connections to close once
  // what was sent is on its way.
  void begin_leaving() noexcept;
  // Whether that is done, after some progress. Perhaps never: a connection that
  // is not quite made stays as long as its peer does nothing for UCX.
  bool has_left() noexcept;
  // Whether something under way uses memory of others, who may free it.
  bool borrows() const;

 private:
  struct Peer {
    UcxWorker* worker;
    int rank;
    ucx::Endpoint endpoint = nullptr;
    ucx::Status lost = ucx::kOk;
  };

  static void on_sent(void* request, ucx::Status, void* operation);
  static void on_received(
      void* request,
      ucx::Status,
      const ucx::ReceiveInfo*,
      void* operation);
  static void on_lost(void* peer, ucx::Endpoint, ucx::Status);

  void start(const UcxConfig& config);
  void check(ucx::Status status, const char* what) const;
  OperationPtr begin(int peer, bool sends, const NetBuffer& buffer);
  void started_is(Operation& operation, ucx::StatusPtr started);
  void close_endpoints(bool force) noexcept;
  void cancel_receives() noexcept;

  const ucx::Api& api_;
  std::chrono::milliseconds farewell_;
  ucx::Context context_ = nullptr;
  ucx::Worker worker_ = nullptr;
  std::string address_;
  int event_fd_ = -1; // UCX's
  std::vector<Peer> peers_;
  std::vector<int> lost_;
  std::list<OperationPtr> under_way_; // that UCX knows of
  std::vector<ucx::StatusPtr> closing_;
};

} // namespace fusedpg
