#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "aggregate/protocol.hpp"
#include "aggregate/server.hpp"
#include "base/fd.hpp"
#include "net/tcp_transport.hpp"

namespace fusedpg::aggregate {

// One group's work at one aggregator. run() is the body of a thread of its own.
class Job {
 public:
  Job(std::shared_ptr<TcpListener> listener,
      const kernels::Table& kernels,
      Server::Counters& counters,
      Fd visitor);

  // From what was said at the front door to the end of the job.
  void run() noexcept;
  // From any thread: run() returns soon.
  void end();
  bool ended() const {
    return ended_;
  }

 private:
  // One place of the pipeline.
  struct Slot {
    std::vector<NetBuffer> contributions; // by worker
    std::vector<Transport::RequestPtr> receives;
    NetBuffer result;
    std::vector<Transport::RequestPtr> sends;
  };

  bool open();
  void serve();
  // False: a worker has left, between two operations.
  bool next(Head& head);
  void check(const Head& head) const;
  void all_reduce(const Head& head);
  void merge(const Head& head); // of blocks
  void post(Slot& slot, size_t bytes);
  void add_up(Slot& slot, const kernels::ReduceArgs& args, size_t bytes);
  // Throws where a worker is lost whose part of a segment is still missing.
  void watch() const;

  const std::shared_ptr<TcpListener> listener_;
  const kernels::Table& kernels_;
  Server::Counters& counters_; // of all jobs
  Fd visitor_;
  int workers_ = 0;
  Request request_;
  std::unique_ptr<TcpTransport> transport_;
  std::mutex mutex_; // of the transport's life, for end()
  std::atomic<bool> ending_{false};
  std::atomic<bool> ended_{false};
  bool receiving_ = false;
  std::vector<Slot> slots_;
  NetBuffers buffers_; // of blocks
};

} // namespace fusedpg::aggregate
