#include "host/bootstrap.hpp"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

#include "base/error.hpp"
#include "base/topology.hpp"

namespace fusedpg {
namespace {

// Changes when the layout of shared memory or of descriptors does.
constexpr uint64_t kProtocol = 1;
constexpr size_t kTokenBytes = 16;

struct Hello {
  uint64_t protocol;
  int32_t rank;
  char token[kTokenBytes];
};

struct Credentials {
  pid_t pid;
  uid_t uid;
  gid_t gid;
};

std::string random_token() {
  char bytes[kTokenBytes];
  if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes) {
    fail_errno("fused: getrandom");
  }
  return std::string(bytes, sizeof bytes);
}

// Fields are length-prefixed: addresses and tokens hold any byte.
void append(std::string& out, const std::string& field) {
  const uint32_t n = static_cast<uint32_t>(field.size());
  out.append(reinterpret_cast<const char*>(&n), sizeof n);
  out += field;
}

std::string take(const std::string& in, size_t& at) {
  uint32_t n = 0;
  if (at + sizeof n > in.size()) {
    fail(ErrorKind::kSystem, "fused: malformed entry in the store");
  }
  std::memcpy(&n, in.data() + at, sizeof n);
  at += sizeof n;
  if (at + n > in.size()) {
    fail(ErrorKind::kSystem, "fused: malformed entry in the store");
  }
  at += n;
  return in.substr(at - n, n);
}

std::string serialize(const PeerInfo& info) {
  std::string out;
  append(out, std::to_string(kProtocol));
  append(out, info.host_id);
  append(out, info.address);
  append(out, info.token);
  append(out, info.cpus);
  append(out, std::to_string(info.pid));
  return out;
}

PeerInfo deserialize(const std::string& in, int peer) {
  size_t at = 0;
  const std::string protocol = take(in, at);
  if (protocol != std::to_string(kProtocol)) {
    fail(
        ErrorKind::kMismatch,
        "fused: rank ",
        peer,
        " runs another version of fusedpg (shared-memory protocol ",
        protocol,
        ", expected ",
        kProtocol,
        "); install the same version everywhere");
  }
  PeerInfo info;
  info.host_id = take(in, at);
  info.address = take(in, at);
  info.token = take(in, at);
  info.cpus = take(in, at);
  info.pid = std::stoi(take(in, at));
  return info;
}

void wait_for(
    int fd,
    short events,
    const Deadline& deadline,
    const char* what) {
  while (true) {
    pollfd p{fd, events, 0};
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline.remaining());
    const int n =
        poll(&p, 1, static_cast<int>(std::min<int64_t>(ms.count() + 1, 1000)));
    if (n > 0) {
      return;
    }
    if (n < 0 && errno != EINTR) {
      fail_errno("fused: poll");
    }
    if (deadline.expired()) {
      fail(
          ErrorKind::kTimeout,
          "fused: creating the group timed out after ",
          deadline.timeout().count(),
          " ms while ",
          what);
    }
  }
}

void send_hello(int socket, const Hello& hello, int memory_fd) {
  iovec io{const_cast<Hello*>(&hello), sizeof hello};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* c = CMSG_FIRSTHDR(&message);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(c), &memory_fd, sizeof memory_fd);
  if (sendmsg(socket, &message, MSG_NOSIGNAL) != sizeof hello) {
    fail_errno("fused: sending the arena to a peer");
  }
}

// An empty Fd when the message is not a whole hello with one descriptor.
Fd receive_hello(int socket, Hello& hello) {
  iovec io{&hello, sizeof hello};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t n = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL);
  Fd fd;
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr;
       c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
      int received = -1;
      std::memcpy(&received, CMSG_DATA(c), sizeof received);
      fd = Fd(received);
    }
  }
  return n == sizeof hello ? std::move(fd) : Fd();
}

Credentials credentials(int socket) {
  Credentials c{};
  socklen_t n = sizeof c;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &c, &n) != 0) {
    fail_errno("fused: SO_PEERCRED");
  }
  return c;
}

Fd connect_to(const PeerInfo& peer, int rank) {
  Fd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (!socket || peer.address.size() > sizeof address.sun_path) {
    fail_errno("fused: socket");
  }
  std::memcpy(address.sun_path, peer.address.data(), peer.address.size());
  const auto length = static_cast<socklen_t>(
      offsetof(sockaddr_un, sun_path) + peer.address.size());
  while (connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length) !=
         0) {
    if (errno == EINTR) {
      continue;
    }
    fail(
        ErrorKind::kPeerDead,
        "fused: cannot reach rank ",
        rank,
        " (pid ",
        peer.pid,
        ") on this host while creating the group: ",
        std::strerror(errno),
        ". If the ranks run in separate containers, give each its own "
        "FUSEDPG_HOST_ID");
  }
  if (credentials(socket.get()).uid != geteuid()) {
    fail(
        ErrorKind::kSystem,
        "fused: rank ",
        rank,
        " runs as another user; ranks on one host must share a user");
  }
  return socket;
}

// Waits until somebody calls. A peer that hangs up has said hello before, or
// never will.
void wait_for_hello(
    int listener,
    const std::vector<Fd>& outgoing,
    const std::vector<Bootstrap::Peer>& heard,
    const Deadline& deadline) {
  while (true) {
    std::vector<pollfd> fds{{listener, POLLIN, 0}};
    std::vector<int> ranks{-1};
    for (size_t p = 0; p < outgoing.size(); ++p) {
      if (outgoing[p] && !heard[p].memory) {
        fds.push_back({outgoing[p].get(), 0, 0});
        ranks.push_back(static_cast<int>(p));
      }
    }
    if (poll(fds.data(), fds.size(), 100) < 0 && errno != EINTR) {
      fail_errno("fused: poll");
    }
    // Again for the listener: the hello may have come since.
    if (fds[0].revents != 0 || poll(fds.data(), 1, 0) > 0) {
      return;
    }
    for (size_t i = 1; i < fds.size(); ++i) {
      if (fds[i].revents & (POLLHUP | POLLERR)) {
        fail(
            ErrorKind::kPeerDead,
            "fused: rank ",
            ranks[i],
            " failed or ended while the group was being created");
      }
    }
    if (deadline.expired()) {
      fail(
          ErrorKind::kTimeout,
          "fused: creating the group timed out after ",
          deadline.timeout().count(),
          " ms while waiting for peers on this host");
    }
  }
}

} // namespace

Bootstrap::Bootstrap(int rank, int world_size, const Settings& settings)
    : rank_(rank),
      world_size_(world_size) {
  self_.host_id = host_identity(settings.host_id);
  self_.token = random_token();
  self_.cpus = cpu_mask();
  self_.pid = getpid();
  listener_ = Fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // Bound with no name, the kernel picks a free abstract one.
  if (!listener_ ||
      bind(
          listener_.get(),
          reinterpret_cast<sockaddr*>(&address),
          sizeof(sa_family_t)) != 0 ||
      listen(listener_.get(), std::max(world_size, 16)) != 0) {
    fail_errno("fused: opening a unix socket for the group");
  }
  socklen_t length = sizeof address;
  if (getsockname(
          listener_.get(), reinterpret_cast<sockaddr*>(&address), &length) !=
      0) {
    fail_errno("fused: getsockname");
  }
  self_.address.assign(
      address.sun_path, length - offsetof(sockaddr_un, sun_path));
}

void Bootstrap::meet(Rendezvous& store, const Deadline& deadline) {
  const std::string me = std::to_string(rank_);
  const std::string prefix =
      "fusedpg/" + std::to_string(store.add("fusedpg/met/" + me, 1)) + "/";
  store.set(prefix + me, serialize(self_));
  peers_.resize(world_size_);
  for (int p = 0; p < world_size_; ++p) {
    peers_[p] = p == rank_
        ? self_
        : deserialize(store.get(prefix + std::to_string(p), deadline), p);
  }
}

bool Bootstrap::single_host() const {
  return local_world_size() == world_size_;
}

bool Bootstrap::ranks_share_hosts() const {
  std::set<std::string> hosts;
  for (const PeerInfo& p : peers_) {
    hosts.insert(p.host_id);
  }
  return hosts.size() < peers_.size();
}

int Bootstrap::local_world_size() const {
  return static_cast<int>(
      std::count_if(peers_.begin(), peers_.end(), [&](const PeerInfo& p) {
        return p.host_id == self_.host_id;
      }));
}

int Bootstrap::local_cpus() const {
  std::string all;
  for (const PeerInfo& p : peers_) {
    if (p.host_id == self_.host_id) {
      all.resize(std::max(all.size(), p.cpus.size()), '0');
      for (size_t i = 0; i < p.cpus.size(); ++i) {
        all[i] = p.cpus[i] == '1' ? '1' : all[i];
      }
    }
  }
  return static_cast<int>(std::count(all.begin(), all.end(), '1'));
}

std::vector<Bootstrap::Peer> Bootstrap::exchange_memory(
    int memory_fd,
    const Deadline& deadline) {
  std::vector<Peer> result(world_size_);
  std::vector<Fd> outgoing(world_size_); // open until all peers have read
  for (int p = 0; p < world_size_; ++p) {
    if (p == rank_) {
      continue;
    }
    Hello hello{kProtocol, rank_, {}};
    std::memcpy(hello.token, peers_[p].token.data(), kTokenBytes);
    outgoing[p] = connect_to(peers_[p], p);
    send_hello(outgoing[p].get(), hello, memory_fd);
  }
  for (int missing = world_size_ - 1; missing > 0;) {
    wait_for_hello(listener_.get(), outgoing, result, deadline);
    Fd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket) {
      continue;
    }
    const Credentials who = credentials(socket.get());
    if (who.uid != geteuid()) {
      continue; // not one of ours
    }
    if (who.pid == 0) {
      fail(
          ErrorKind::kSystem,
          "fused: a rank on this host runs in another pid namespace, where its "
          "end could not be noticed; give ranks of different containers "
          "different FUSEDPG_HOST_ID");
    }
    wait_for(socket.get(), POLLIN, deadline, "waiting for a peer's arena");
    // A hello is one small message: who sends less is not a peer.
    const timeval patience{1, 0};
    setsockopt(
        socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    Hello hello{};
    Fd memory = receive_hello(socket.get(), hello);
    const bool valid = memory && hello.protocol == kProtocol &&
        hello.rank >= 0 && hello.rank < world_size_ && hello.rank != rank_ &&
        std::memcmp(hello.token, self_.token.data(), kTokenBytes) == 0 &&
        !result[hello.rank].memory;
    if (!valid) {
      continue;
    }
    Peer& peer = result[hello.rank];
    peer.memory = std::move(memory);
    peer.pid = who.pid;
    peer.process = Fd(static_cast<int>(syscall(SYS_pidfd_open, who.pid, 0)));
    --missing;
  }
  listener_.reset();
  return result;
}

} // namespace fusedpg
