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

  struct Stats {
    uint64_t jobs = 0; // that have begun
    uint64_t active = 0; // of them, not ended
    uint64_t refused = 0;
    uint64_t failed = 0; // that ended in the middle of an operation
    uint64_t operations = 0;
    uint64_t segments = 0; // added up
    uint64_t bytes_received = 0; // contributions
    uint64_t bytes_sent = 0; // results
  };
  Stats stats();

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
  Stats ended_; // of jobs that have
  WakeSignal signal_; // that it ends or drains
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

} // namespace fusedpg::aggregate
