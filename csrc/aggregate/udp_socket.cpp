#include "aggregate/udp_socket.hpp"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "base/error.hpp"

namespace fusedpg::aggregate::udp {
namespace {

constexpr int kBuffer = 8 << 20; // wanted

Fd datagram_socket(const SocketAddress& like) {
  Fd fd = Fd::opened([&] {
    return socket(like.get()->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  });
  if (!fd) {
    fail_errno("fused: a socket of UDP");
  }
  // The first of each takes a privilege; the second gives at most
  // net.core.rmem_max and wmem_max.
  for (const auto& [forced, plain] :
       {std::pair{SO_RCVBUFFORCE, SO_RCVBUF},
        std::pair{SO_SNDBUFFORCE, SO_SNDBUF}}) {
    if (setsockopt(fd.get(), SOL_SOCKET, forced, &kBuffer, sizeof kBuffer) !=
        0) {
      setsockopt(fd.get(), SOL_SOCKET, plain, &kBuffer, sizeof kBuffer);
    }
  }
  // Nothing waits for a queue for long.
  const timeval second{.tv_sec = 1, .tv_usec = 0};
  setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &second, sizeof second);
  return fd;
}

Address address_of(const sockaddr_storage& storage, socklen_t length) {
  Address address;
  if (storage.ss_family == AF_INET6) {
    sockaddr_in6 in;
    std::memcpy(&in, &storage, sizeof in);
    in.sin6_flowinfo = 0;
    std::memcpy(address.bytes.data(), &in, sizeof in);
    address.length = sizeof in;
  } else {
    address.length = std::min<uint32_t>(length, sizeof(sockaddr_in));
    std::memcpy(address.bytes.data(), &storage, address.length);
  }
  return address;
}

} // namespace

Address address_of(const SocketAddress& address) {
  return address_of(address.storage, address.length);
}

Datagrams::Datagrams(Fd socket, bool connected)
    : socket_(std::move(socket)),
      connected_(connected),
      out_(kBatch),
      in_(kBatch) {}

Datagrams Datagrams::at(const SocketAddress& local) {
  Fd fd = datagram_socket(local);
  if (bind(fd.get(), local.get(), local.length) != 0) {
    fail_errno(formatted("fused: cannot listen at {} (UDP)", local.text()));
  }
  return Datagrams(std::move(fd), false);
}

Datagrams Datagrams::to(const SocketAddress& peer) {
  Fd fd = datagram_socket(peer);
  if (connect(fd.get(), peer.get(), peer.length) != 0) {
    fail_errno(formatted("fused: no way to {} (UDP)", peer.text()));
  }
  return Datagrams(std::move(fd), true);
}

void Datagrams::wait(const WakeSignal& signal, std::chrono::nanoseconds most)
    const {
  const auto left = std::max(most, std::chrono::nanoseconds(0));
  const auto seconds = std::chrono::floor<std::chrono::seconds>(left);
  const timespec time{
      .tv_sec = seconds.count(), .tv_nsec = (left - seconds).count()};
  pollfd both[] = {
      {.fd = fd(), .events = POLLIN, .revents = 0},
      {.fd = signal.fd(), .events = POLLIN, .revents = 0}};
  ppoll(both, 2, &time, nullptr);
}

size_t Datagrams::buffer() const {
  int bytes = 0;
  socklen_t length = sizeof bytes;
  getsockopt(fd(), SOL_SOCKET, SO_RCVBUF, &bytes, &length);
  return static_cast<size_t>(std::max(bytes, 0));
}

void Datagrams::send(const Address& to, const uint8_t* bytes, size_t size) {
  std::memcpy(out_[waiting_].data(), bytes, std::min(size, kRoom));
  to_[waiting_] = to;
  sizes_[waiting_] = size;
  if (++waiting_ == kBatch) {
    flush();
  }
}

void Datagrams::flush() {
  std::array<iovec, kBatch> vectors{};
  std::array<mmsghdr, kBatch> messages{};
  for (size_t i = 0; i < waiting_; ++i) {
    vectors[i] = {out_[i].data(), sizes_[i]};
    msghdr& head = messages[i].msg_hdr;
    head.msg_iov = &vectors[i];
    head.msg_iovlen = 1;
    if (!connected_) {
      head.msg_name = to_[i].bytes.data();
      head.msg_namelen = to_[i].length;
    }
  }
  for (size_t done = 0; done < waiting_;) {
    const int sent = sendmmsg(
        fd(),
        &messages[done],
        static_cast<unsigned>(waiting_ - done),
        MSG_NOSIGNAL);
    if (sent > 0) {
      done += static_cast<size_t>(sent);
    } else if (errno == ECONNREFUSED) {
      ++refusals_; // of an earlier one; this one has not gone out
      ++done;
    } else if (errno != EINTR) {
      ++done;
    }
  }
  waiting_ = 0;
}

void Datagrams::receive(const Take& take) {
  std::array<iovec, kBatch> vectors{};
  std::array<mmsghdr, kBatch> messages{};
  std::array<sockaddr_storage, kBatch> from{};
  // Not for ever: others want something, too.
  for (int round = 0; round < 16; ++round) {
    for (size_t i = 0; i < kBatch; ++i) {
      vectors[i] = {in_[i].data(), kRoom - kSealRoom};
      messages[i] = {};
      messages[i].msg_hdr.msg_iov = &vectors[i];
      messages[i].msg_hdr.msg_iovlen = 1;
      messages[i].msg_hdr.msg_name = &from[i];
      messages[i].msg_hdr.msg_namelen = sizeof from[i];
    }
    const int got =
        recvmmsg(fd(), messages.data(), kBatch, MSG_DONTWAIT, nullptr);
    if (got < 0) {
      if (errno == EINTR) {
        continue;
      }
      if (errno == ECONNREFUSED) {
        ++refusals_;
        continue;
      }
      return;
    }
    for (int i = 0; i < got; ++i) {
      const msghdr& head = messages[i].msg_hdr;
      // One that is too long for any of ours is cut, and so is none.
      take(
          address_of(from[i], head.msg_namelen),
          in_[i].data(),
          (head.msg_flags & MSG_TRUNC) != 0 ? 0 : messages[i].msg_len);
    }
    if (static_cast<size_t>(got) < kBatch) {
      return;
    }
  }
}

} // namespace fusedpg::aggregate::udp
