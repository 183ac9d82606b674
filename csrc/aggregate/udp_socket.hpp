#pragma once

#include <array>
#include <chrono>
#include <functional>
#include <vector>

#include "aggregate/udp_packet.hpp"
#include "base/fd.hpp"
#include "net/tcp_socket.hpp"
#include "net/wake_signal.hpp"

namespace fusedpg::aggregate::udp {

Address address_of(const SocketAddress& address);

// Datagrams, many with one call of the system. One thread at a time.
class Datagrams {
 public:
  // Bound to `local`, or connected to `peer`.
  static Datagrams at(const SocketAddress& local);
  static Datagrams to(const SocketAddress& peer);

  int fd() const {
    return socket_.get();
  }
  SocketAddress address() const {
    return bound_address(socket_);
  }
  // Until there are datagrams, the signal is set, or so long.
  void wait(const WakeSignal& signal, std::chrono::nanoseconds most) const;
  // The size of the system's buffer for received packets, in bytes.
  size_t buffer() const;

  // Copies the datagram, which goes out with flush() or when a batch is full.
  // If the system does not take it, it is lost, as any datagram may be.
  void send(const Address& to, const uint8_t* bytes, size_t size);
  void flush();
  // Passes on all datagrams that have come, without waiting. Each has kSealRoom
  // bytes of room behind it.
  using Take =
      std::function<void(const Address& from, uint8_t* bytes, size_t size)>;
  void receive(const Take& take);
  // How often the peer's machine has said that nobody listens there.
  uint64_t refusals() const {
    return refusals_;
  }

 private:
  static constexpr size_t kBatch = 64;
  static constexpr size_t kRoom = kMostPacketBytes + kSealRoom + 14;

  explicit Datagrams(Fd socket, bool connected);

  Fd socket_;
  bool connected_;
  uint64_t refusals_ = 0;
  size_t waiting_ = 0; // to go out
  std::vector<std::array<uint8_t, kRoom>> out_, in_;
  std::array<Address, kBatch> to_;
  std::array<size_t, kBatch> sizes_{};
};

} // namespace fusedpg::aggregate::udp
