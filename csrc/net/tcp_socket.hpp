#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "base/fd.hpp"

// Sockets of TCP, which never block.
namespace fusedpg {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  // "10.0.0.1 4711", "fe80::1%eth0 4711"; throws Error(kSystem) for anything
  // else.
  static SocketAddress of(const std::string& text);
  // Looks up a host by name or number, which may take as long as the resolver
  // does. Throws Error(kInvalid) if the host has no address.
  static SocketAddress named(const std::string& host, uint16_t port);
  std::string text() const;
  // "10.0.0.1 port 4711", for messages.
  std::string readable() const;
  // Without the port.
  std::string host() const;
  SocketAddress with_port(uint16_t port) const;
  // Port 0: the system chooses one.
  bool any_port() const;
  const sockaddr* get() const {
    return reinterpret_cast<const sockaddr*>(&storage);
  }
};

// The address at which other hosts reach this process: the first address of an interface if
// one is named, else the one that the way to `peer` (a host's name) begins at,
// if it leaves this machine; else that of this host's name; else of the first
// interface that is up. The loopback address where the peer is "localhost" or
// the like. An empty peer is not known.
SocketAddress local_address(
    const std::string& interface,
    const std::string& peer,
    uint16_t peer_port);

// Both ends included. Zeros: any port, which the system chooses.
struct PortRange {
  uint16_t first = 0;
  uint16_t last = 0;

  // "40000-40099", "40000" or nothing; throws Error(kInvalid) for anything else.
  static PortRange of(const std::string& text);
  bool any() const {
    return last == 0;
  }
};

// Bound to the address; where that has no port, to a free one of these. Throws
// Error(kSystem) where there is none.
Fd listen_at(const SocketAddress& address, const PortRange& ports = {});
SocketAddress bound_address(const Fd& socket);
// The next connection that waits, or none.
Fd accept_from(const Fd& socket);
// Under way, or refused: errno says which where there is none.
Fd connect_to(const SocketAddress& address);
// Result of a connection attempt, once the socket can be written: 0, or an
// errno.
int connect_result(const Fd& socket);
// Whether a call that failed may be made again, by errno.
bool would_block();

} // namespace fusedpg
