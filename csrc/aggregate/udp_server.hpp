#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <thread>

#include "aggregate/udp_socket.hpp"
#include "aggregate/udp_sums.hpp"
#include "net/wake_signal.hpp"

namespace fusedpg::aggregate::udp {

// Sums at a socket, on a thread of its own.
class Server {
 public:
  // Listens from now on.
  Server(const SocketAddress& address, const Key128& secret);
  Server(const Server&) = delete;
  ~Server();

  // "10.0.0.1 4711": with the port that was chosen where 0 was asked for.
  std::string address() const {
    return address_;
  }
  // Takes nobody in any more; sessions that are there go on.
  void drain();
  Sums::Stats stats();

 private:
  void run();

  Datagrams socket_;
  const std::string address_;
  std::mutex mutex_; // of the sums
  Sums sums_;
  WakeSignal signal_;
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

} // namespace fusedpg::aggregate::udp
