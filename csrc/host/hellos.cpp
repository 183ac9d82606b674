#include "host/hellos.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/error.hpp"
#include "base/some_of.hpp"
#include "base/while_waiting.hpp"

namespace fusedpg {
namespace {

// A peer speaks as soon as it has called; so many others are kept waiting.
constexpr size_t kSilentCallers = 64;
// Calls taken at once: a flood of them must not keep this rank from the rest.
constexpr int kAccepts = 256;
// Room for more files than a hello has, to close the others.
constexpr size_t kHelloFiles = 8;
constexpr int kHelloRetryMs = 2;
constexpr int kHelloLookMs = 100;

struct Credentials {
  pid_t pid;
  uid_t uid;
  gid_t gid;
};

Credentials credentials(int socket) {
  Credentials c{};
  socklen_t n = sizeof c;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &c, &n) != 0) {
    fail_errno("fused: SO_PEERCRED");
  }
  return c;
}

Fd open_socket() {
  Fd fd = Fd::opened([] {
    return ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  });
  if (!fd) {
    fail_errno("fused: opening a unix socket for the group");
  }
  return fd;
}

} // namespace

Fd listen_for_hellos(int world_size, std::string& name) {
  Fd listener = open_socket();
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // Bound with no name, the kernel picks a free abstract one.
  if (bind(
          listener.get(),
          reinterpret_cast<sockaddr*>(&address),
          sizeof(sa_family_t)) != 0 ||
      ::listen(listener.get(), std::max(world_size, 128)) != 0) {
    fail_errno("fused: opening a unix socket for the group");
  }
  socklen_t length = sizeof address;
  if (getsockname(
          listener.get(), reinterpret_cast<sockaddr*>(&address), &length) !=
      0) {
    fail_errno("fused: getsockname");
  }
  name.assign(address.sun_path, length - offsetof(sockaddr_un, sun_path));
  return listener;
}

Hellos::Hellos(
    int rank,
    const std::vector<int>& ranks,
    const std::vector<PeerInfo>& infos,
    int listener,
    int memory_fd,
    Meeting& meeting)
    : group_ranks_(ranks),
      rank_(
          static_cast<int>(
              std::find(ranks.begin(), ranks.end(), rank) - ranks.begin())),
      size_(static_cast<int>(infos.size())),
      infos_(infos),
      listener_(listener),
      memory_fd_(memory_fd),
      meeting_(meeting),
      peers_(infos.size()),
      calls_(infos.size()),
      heard_(infos.size()) {}

std::vector<Peer> Hellos::exchange(const Deadline& deadline) {
  while (true) {
    accept_all();
    hear_all();
    // A peer that hung up has said before why: read that now.
    for (int p = 0; p < size_; ++p) {
      Call& c = calls_[p];
      if (c.hung_up && !heard(p)) {
        c = Call{}; // another call tells whether it is gone
      }
      if (p != rank_ && !c.said) {
        call(p);
      }
    }
    if (done()) {
      return std::move(peers_);
    }
    if (deadline.expired()) {
      std::vector<std::string> silent;
      for (int p = 0; p < size_; ++p) {
        if (!heard(p) || (p != rank_ && !calls_[p].said)) {
          silent.push_back(
              formatted("rank {} (pid {})", group_ranks_[p], infos_[p].pid));
        }
      }
      fail(
          ErrorKind::kTimeout,
          "fused: creating the group timed out after {} ms on rank {}: nothing "
          "was heard on this host from {}",
          deadline.timeout().count(),
          group_ranks_[rank_],
          some_of(silent));
    }
    wait();
  }
}

std::vector<Fd> Hellos::connections() {
  std::vector<Fd> all(size_);
  for (int p = 0; p < size_; ++p) {
    if (p != rank_) {
      all[p] = std::move(rank_ < p ? calls_[p].socket : heard_[p]);
    }
  }
  return all;
}

bool Hellos::done() const {
  for (int p = 0; p < size_; ++p) {
    if (p != rank_ && !(heard(p) && calls_[p].said)) {
      return false;
    }
  }
  return true;
}

void Hellos::fail_dead(int peer, const std::string& what) {
  const std::string reason =
      meeting_.reason_of(group_ranks_[peer], infos_[peer]);
  if (!reason.empty()) {
    fail(
        ErrorKind::kPeerFailed,
        "fused: rank {} failed while the group was being created: {}",
        group_ranks_[peer],
        reason);
  }
  fail(
      ErrorKind::kPeerDead,
      "fused: rank {} (pid {}) failed or ended while the group was being "
      "created: {}. If the ranks run in separate containers, give each its own "
      "FUSEDPG_HOST_ID",
      group_ranks_[peer],
      infos_[peer].pid,
      what);
}

// Tries once; a full queue at the other side or an interruption is tried again.
void Hellos::call(int peer) {
  const std::string& name = infos_[peer].address;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (name.size() > sizeof address.sun_path) {
    fail(
        ErrorKind::kSystem,
        "fused: malformed address of rank {}",
        group_ranks_[peer]);
  }
  std::memcpy(address.sun_path, name.data(), name.size());
  const auto length =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
  Call& c = calls_[peer];
  if (!c.socket) {
    c.socket = open_socket();
  }
  if (connect(c.socket.get(), reinterpret_cast<sockaddr*>(&address), length) !=
      0) {
    if (errno == EAGAIN || errno == EINTR) {
      return;
    }
    const int error = errno;
    // It may have spoken and gone on since this rank last listened.
    accept_all();
    hear_all();
    if (heard(peer)) {
      c.said = true;
      return;
    }
    fail_dead(
        peer,
        formatted("cannot reach it on this host: {}", std::strerror(error)));
  }
  if (credentials(c.socket.get()).uid != geteuid()) {
    fail(
        ErrorKind::kSystem,
        "fused: rank {} runs as another user; ranks on one host must share a "
        "user",
        group_ranks_[peer]);
  }
  Hello hello{kProtocol, rank_, {}};
  std::memcpy(hello.token, infos_[peer].token.data(), kTokenBytes);
  iovec io{&hello, sizeof hello};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &memory_fd_, sizeof memory_fd_);
  if (sendmsg(c.socket.get(), &message, MSG_NOSIGNAL) == sizeof hello) {
    c.said = true;
    return;
  }
  const bool passes = errno == EPIPE || errno == ECONNRESET ||
      errno == EAGAIN || errno == EINTR || errno == ETOOMANYREFS;
  if (!passes) {
    fail_errno("fused: sending the arena to a peer");
  }
  c = Call{};
}

void Hellos::accept_all() {
  for (int i = 0; i < kAccepts; ++i) {
    Fd socket = Fd::opened([&] {
      return accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    });
    if (!socket) {
      if (errno == EAGAIN) {
        return;
      }
      if (errno == EINTR || errno == ECONNABORTED) {
        continue;
      }
      fail_errno("fused: accepting a peer of the group");
    }
    const Credentials who = credentials(socket.get());
    if (who.uid != geteuid()) {
      continue; // not one of ours
    }
    callers_.push_back(Caller{std::move(socket), who.pid});
    if (!hear(callers_.back())) {
      callers_.pop_back();
    } else if (callers_.size() > kSilentCallers + infos_.size()) {
      drop_silent();
    }
  }
}

// The oldest caller, if possible one that is no rank's process.
void Hellos::drop_silent() {
  const auto stranger = [&](const Caller& caller) {
    return std::none_of(infos_.begin(), infos_.end(), [&](const PeerInfo& i) {
      return i.pid == caller.pid;
    });
  };
  const auto found = std::find_if(callers_.begin(), callers_.end(), stranger);
  callers_.erase(found == callers_.end() ? callers_.begin() : found);
}

void Hellos::hear_all() {
  callers_.remove_if([&](Caller& caller) { return !hear(caller); });
}

void Hellos::receive(Caller& caller) {
  char* at = reinterpret_cast<char*>(&caller.hello) + caller.got;
  iovec io{at, sizeof caller.hello - caller.got};
  alignas(cmsghdr) char control[CMSG_SPACE(kHelloFiles * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const NoFork hold;
  const ssize_t n = recvmsg(caller.socket.get(), &message, MSG_CMSG_CLOEXEC);
  if (n < 0) {
    if (errno != EAGAIN && errno != EINTR) {
      caller.socket.reset();
    }
    return;
  }
  if (n == 0) {
    caller.socket.reset();
    return;
  }
  caller.got += static_cast<size_t>(n);
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr;
       c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    for (size_t i = 0; CMSG_LEN((i + 1) * sizeof(int)) <= c->cmsg_len; ++i) {
      int received = -1;
      std::memcpy(
          &received, CMSG_DATA(c) + i * sizeof received, sizeof received);
      caller.files.emplace_back(received, hold);
    }
  }
  caller.lost_file = caller.lost_file || (message.msg_flags & MSG_CTRUNC) != 0;
}

bool Hellos::hear(Caller& caller) {
  receive(caller);
  if (!caller.socket) {
    return false; // ended in the middle
  }
  if (caller.got < sizeof caller.hello) {
    return true;
  }
  const Hello& hello = caller.hello;
  const bool valid = hello.protocol == kProtocol && hello.rank >= 0 &&
      hello.rank < size_ && hello.rank != rank_ &&
      std::memcmp(hello.token, infos_[rank_].token.data(), kTokenBytes) == 0;
  if (!valid || heard(hello.rank)) {
    return false;
  }
  if (caller.files.empty() && caller.lost_file) {
    // The kernel drops what the process has no room for.
    const Fd probe = Fd::opened([&] { return dup(caller.socket.get()); });
    if (!probe) {
      fail_errno(formatted(
          "fused: receiving the arena of rank {}", group_ranks_[hello.rank]));
    }
  }
  if (caller.files.size() != 1) {
    return false;
  }
  if (caller.pid == 0) {
    fail(
        ErrorKind::kSystem,
        "fused: a rank on this host runs in another pid namespace, where its "
        "end could not be noticed; give ranks of different containers "
        "different FUSEDPG_HOST_ID");
  }
  const PeerInfo& info = infos_[hello.rank];
  auto process = Process::watch(caller.pid);
  const uint64_t start = start_time(caller.pid);
  // The pid may be another process's by now.
  const bool other = caller.pid == info.pid && start != 0 && info.start != 0 &&
      start != info.start;
  if (process == nullptr || process->ended() || other) {
    fail_dead(hello.rank, "its process is gone");
  }
  Peer& peer = peers_[hello.rank];
  peer.memory = std::move(caller.files[0]);
  peer.pid = caller.pid;
  peer.process = std::move(process);
  // Closed when this rank has spoken to all, or has failed: so a peer that sees
  // it close knows that nothing more will come.
  heard_[hello.rank] = std::move(caller.socket);
  return false;
}

void Hellos::wait() {
  while_waiting();
  std::vector<pollfd> fds{{listener_, POLLIN, 0}};
  for (const Caller& caller : callers_) {
    fds.push_back({caller.socket.get(), POLLIN, 0});
  }
  const size_t first = fds.size();
  std::vector<int> ranks;
  bool retry = false;
  for (int p = 0; p < size_; ++p) {
    if (p == rank_) {
      continue;
    }
    if (!calls_[p].said) {
      retry = true;
    } else if (!heard(p)) {
      fds.push_back({calls_[p].socket.get(), 0, 0});
      ranks.push_back(p);
    }
  }
  if (poll(fds.data(), fds.size(), retry ? kHelloRetryMs : kHelloLookMs) < 0) {
    if (errno != EINTR) {
      fail_errno("fused: poll");
    }
    return;
  }
  for (size_t i = 0; i < ranks.size(); ++i) {
    calls_[ranks[i]].hung_up =
        (fds[first + i].revents & (POLLHUP | POLLERR)) != 0;
  }
}

} // namespace fusedpg
