#include "net/tcp_socket.hpp"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <optional>

#include "base/error.hpp"

namespace fusedpg {
namespace {

using Infos = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Infos resolve_host(
    const std::string& host,
    const std::string& port,
    int type,
    int flags = 0) {
  addrinfo hints{};
  hints.ai_flags = flags;
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = type;
  addrinfo* found = nullptr;
  const int status = getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
  return {status == 0 ? found : nullptr, freeaddrinfo};
}

SocketAddress address_of(const sockaddr* from, socklen_t length) {
  SocketAddress address;
  std::memcpy(&address.storage, from, length);
  address.length = length;
  return address;
}

socklen_t length_of(const sockaddr* address) {
  return address->sa_family == AF_INET ? sizeof(sockaddr_in)
                                       : sizeof(sockaddr_in6);
}

bool is_loopback(const SocketAddress& address) {
  if (address.storage.ss_family == AF_INET) {
    const auto* in = reinterpret_cast<const sockaddr_in*>(&address.storage);
    return (ntohl(in->sin_addr.s_addr) >> 24) == 127;
  }
  const auto* in = reinterpret_cast<const sockaddr_in6*>(&address.storage);
  return IN6_IS_ADDR_LOOPBACK(&in->sin6_addr);
}

bool is_link_local(const sockaddr* address) {
  return address->sa_family == AF_INET6 &&
      IN6_IS_ADDR_LINKLOCAL(
             &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

// IPv4 first, then IPv6, link-local last; of an interface, or of any that is
// up and leads elsewhere.
std::optional<SocketAddress> interface_address(const std::string& interface) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) {
    fail_errno("fused: getifaddrs");
  }
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(
      list, freeifaddrs);
  std::optional<SocketAddress> best;
  int best_rank = 3;
  for (const ifaddrs* one = list; one != nullptr; one = one->ifa_next) {
    const sockaddr* address = one->ifa_addr;
    if (address == nullptr ||
        (address->sa_family != AF_INET && address->sa_family != AF_INET6)) {
      continue;
    }
    const bool usable = interface.empty()
        ? (one->ifa_flags & IFF_UP) != 0 && (one->ifa_flags & IFF_LOOPBACK) == 0
        : interface == one->ifa_name;
    const int rank = address->sa_family == AF_INET ? 0
        : is_link_local(address)                   ? 2
                                                   : 1;
    if (usable && rank < best_rank) {
      best = address_of(address, length_of(address));
      best_rank = rank;
    }
  }
  return best;
}

// Nothing is sent: the system only chooses where it would begin.
Fd new_socket(int family, int type) {
  return Fd::opened([&] { return socket(family, type | SOCK_CLOEXEC, 0); });
}

std::optional<SocketAddress> way_begins_at(
    const std::string& peer,
    uint16_t port) {
  const Infos infos = resolve_host(peer, std::to_string(port), SOCK_DGRAM);
  for (const addrinfo* one = infos.get(); one != nullptr; one = one->ai_next) {
    const Fd fd = new_socket(one->ai_family, SOCK_DGRAM);
    if (fd && connect(fd.get(), one->ai_addr, one->ai_addrlen) == 0) {
      return bound_address(fd);
    }
  }
  return std::nullopt;
}

std::optional<SocketAddress> own_name_address() {
  char name[256] = "";
  if (gethostname(name, sizeof name - 1) != 0) {
    return std::nullopt;
  }
  const Infos infos = resolve_host(name, "0", SOCK_STREAM);
  for (const addrinfo* one = infos.get(); one != nullptr; one = one->ai_next) {
    const SocketAddress address = address_of(one->ai_addr, one->ai_addrlen);
    const Fd fd = new_socket(one->ai_family, SOCK_STREAM);
    if (!is_loopback(address) && fd &&
        bind(fd.get(), address.get(), address.length) == 0) {
      return address;
    }
  }
  return std::nullopt;
}

void set_option(const Fd& fd, int level, int name) {
  const int on = 1;
  setsockopt(fd.get(), level, name, &on, sizeof on);
}

} // namespace

SocketAddress SocketAddress::of(const std::string& text) {
  const size_t space = text.rfind(' ');
  if (space != std::string::npos) {
    const Infos infos = resolve_host(
        text.substr(0, space),
        text.substr(space + 1),
        SOCK_STREAM,
        AI_NUMERICHOST | AI_NUMERICSERV);
    if (infos) {
      return address_of(infos->ai_addr, infos->ai_addrlen);
    }
  }
  fail(ErrorKind::kSystem, "fused: no address of a socket: \"{}\"", text);
}

SocketAddress SocketAddress::named(const std::string& host, uint16_t port) {
  const Infos infos = resolve_host(host, std::to_string(port), SOCK_STREAM);
  if (!infos) {
    fail(ErrorKind::kInvalid, "fused: no host has the name {}", host);
  }
  return address_of(infos->ai_addr, infos->ai_addrlen);
}

std::string SocketAddress::text() const {
  char port[8];
  if (getnameinfo(
          get(), length, nullptr, 0, port, sizeof port, NI_NUMERICSERV) != 0) {
    fail(ErrorKind::kSystem, "fused: an address of a socket without a port");
  }
  return host() + " " + port;
}

std::string SocketAddress::readable() const {
  const std::string both = text();
  const size_t space = both.rfind(' ');
  return both.substr(0, space) + " port" + both.substr(space);
}

std::string SocketAddress::host() const {
  char host[NI_MAXHOST];
  if (getnameinfo(
          get(), length, host, sizeof host, nullptr, 0, NI_NUMERICHOST) != 0) {
    fail(ErrorKind::kSystem, "fused: an address of a socket without a host");
  }
  return host;
}

SocketAddress SocketAddress::with_port(uint16_t port) const {
  SocketAddress other = *this;
  if (storage.ss_family == AF_INET) {
    reinterpret_cast<sockaddr_in*>(&other.storage)->sin_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in6*>(&other.storage)->sin6_port = htons(port);
  }
  return other;
}

bool SocketAddress::any_port() const {
  return storage.ss_family == AF_INET
      ? reinterpret_cast<const sockaddr_in*>(&storage)->sin_port == 0
      : reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port == 0;
}

namespace {

std::string interface_names() {
  std::string names;
  const std::unique_ptr<struct if_nameindex, decltype(&if_freenameindex)> all(
      if_nameindex(), &if_freenameindex);
  for (const auto* one = all.get(); one != nullptr && one->if_index != 0;
       ++one) {
    names += (names.empty() ? "" : ", ") + std::string(one->if_name);
  }
  return names.empty() ? "none" : names;
}

} // namespace

SocketAddress local_address(
    const std::string& interface,
    const std::string& peer,
    uint16_t peer_port) {
  if (!interface.empty()) {
    if (const auto found = interface_address(interface)) {
      return found->with_port(0);
    }
    fail(
        ErrorKind::kSystem,
        "fused: no interface {} with an address (FUSEDPG_SOCKET_IFNAME or "
        "GLOO_SOCKET_IFNAME); this machine has {}",
        interface,
        interface_names());
  }
  const bool here =
      peer == "localhost" || peer == "::1" || peer.starts_with("127.");
  if (!here) {
    std::optional<SocketAddress> found;
    if (!peer.empty()) {
      found = way_begins_at(peer, peer_port);
    }
    // The store may be here, and its name that of the loopback address.
    if (!found || is_loopback(*found)) {
      found = own_name_address();
    }
    if (!found) {
      found = interface_address("");
    }
    if (found) {
      return found->with_port(0);
    }
  }
  return SocketAddress::of("127.0.0.1 0");
}

namespace {

// None: errno says why.
Fd try_to_listen(const SocketAddress& address) {
  Fd fd = new_socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK);
  if (fd) {
    // An earlier listener at this port may have left connections behind. They
    // block the port unless both sockets have this option.
    set_option(fd, SOL_SOCKET, SO_REUSEADDR);
  }
  if (fd &&
      (bind(fd.get(), address.get(), address.length) != 0 ||
       listen(fd.get(), SOMAXCONN) != 0)) {
    const int why = errno;
    fd.reset();
    errno = why;
  }
  return fd;
}

} // namespace

PortRange PortRange::of(const std::string& text) {
  PortRange ports;
  if (text.empty()) {
    return ports;
  }
  const char* const end = text.data() + text.size();
  auto read = std::from_chars(text.data(), end, ports.first);
  ports.last = ports.first;
  if (read.ec == std::errc() && read.ptr != end && *read.ptr == '-') {
    read = std::from_chars(read.ptr + 1, end, ports.last);
  }
  if (read.ec != std::errc() || read.ptr != end || ports.first == 0 ||
      ports.last < ports.first) {
    fail(
        ErrorKind::kInvalid,
        "fused: FUSEDPG_PORT_RANGE must be two ports, such as 40000-40099, got "
        "\"{}\"",
        text);
  }
  return ports;
}

Fd listen_at(const SocketAddress& address, const PortRange& ports) {
  Fd fd;
  if (ports.any() || !address.any_port()) {
    fd = try_to_listen(address);
  } else {
    for (int port = ports.first; port <= ports.last; ++port) {
      fd = try_to_listen(address.with_port(static_cast<uint16_t>(port)));
      if (fd || errno != EADDRINUSE) {
        break;
      }
    }
  }
  if (!fd) {
    fail_errno(
        !address.any_port()
            ? formatted("fused: cannot listen at {}", address.text())
            : !ports.any()
            ? formatted(
                  "fused: cannot listen at {}, ports {} to {} "
                  "(FUSEDPG_PORT_RANGE; "
                  "each process needs one)",
                  address.host(),
                  ports.first,
                  ports.last)
            : formatted(
                  "fused: cannot listen at {} (FUSEDPG_SOCKET_IFNAME names "
                  "another interface)",
                  address.host()));
  }
  return fd;
}

SocketAddress bound_address(const Fd& socket) {
  SocketAddress address;
  address.length = sizeof address.storage;
  if (getsockname(
          socket.get(),
          reinterpret_cast<sockaddr*>(&address.storage),
          &address.length) != 0) {
    fail_errno("fused: getsockname");
  }
  return address;
}

Fd accept_from(const Fd& socket) {
  return Fd::opened([&] {
    return accept4(
        socket.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  });
}

Fd connect_to(const SocketAddress& address) {
  Fd fd = new_socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK);
  if (!fd) {
    fail_errno("fused: socket");
  }
  set_option(fd, IPPROTO_TCP, TCP_NODELAY);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE);
  // A firewall that drops packets is given up after 1 + 2 + 4 + 8 + 16 s, not
  // after two minutes: who is reached here has said that it listens.
  constexpr int kAgain = 4;
  setsockopt(fd.get(), IPPROTO_TCP, TCP_SYNCNT, &kAgain, sizeof kAgain);
  if (connect(fd.get(), address.get(), address.length) != 0 &&
      errno != EINPROGRESS) {
    return {};
  }
  return fd;
}

int connect_result(const Fd& socket) {
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  return error;
}

bool would_block() {
  return errno == EAGAIN || errno == EINTR;
}

} // namespace fusedpg
