#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "aggregate/protocol.hpp"
#include "kernels/kernels.hpp"
#include "net/tcp_listener.hpp"
#include "net/wake_signal.hpp"

namespace fusedpg::aggregate {

class Job;

// An aggregator: a front door, and a thread for each job that has been opened
// there. A job ends when one of its workers leaves or is lost, or says what
// makes no sense; that harms no other job.
class Server {
 public:
  // Listens from now on.
  Server(
      const TcpAddress& door,
      const kernels::Table& kernels = *kernels::table());
  Server(const Server&) = delete;
  // Ends all jobs.
  ~Server();

  // "10.0.0.1 4711": with the port that was chosen where 0 was asked for.
  std::string address() const {
    return listener_->address().text();
  }
  // Takes no more jobs; those that are there go on.
  void drain();

  template <typename Number>
  struct Numbers {
    Number jobs{0}; // that have begun
    Number active{0}; // that have not ended
    Number refused{0};
    Number failed{0}; // that ended in the middle of an operation
    Number operations{0};
    Number segments{0}; // added up
    Number bytes_received{0}; // contributions
    Number bytes_sent{0}; // results
  };
  using Stats = Numbers<uint64_t>;
  // Each job adds to these, on its thread.
  using Counters = Numbers<std::atomic<uint64_t>>;
  Stats stats() const;

 private:
  struct Running {
    std::unique_ptr<Job> job;
    std::thread thread;
  };
  void take_in();
  void reap();

  const kernels::Table& kernels_;
  const std::shared_ptr<TcpListener> listener_;
  std::mutex mutex_;
  std::unique_ptr<TcpEndpoint> door_; // none: it drains
  std::list<Running> jobs_;
  Counters counters_;
  WakeSignal signal_; // that it ends or drains
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

} // namespace fusedpg::aggregate
