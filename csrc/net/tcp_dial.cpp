#include "net/tcp_dial.hpp"

#include <poll.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "base/error.hpp"

namespace fusedpg::tcp {
namespace {

constexpr std::chrono::milliseconds kLook{20};

[[noreturn]] void late(const Deadline& deadline) {
  fail(
      ErrorKind::kTimeout,
      "fused: no answer within {} ms",
      deadline.timeout().count());
}

[[noreturn]] void ended(int error) {
  fail(
      ErrorKind::kPeerFailed,
      "fused: the connection has ended ({})",
      error == 0 ? "it was closed"
                 : std::strerror(error)); // NOLINT(concurrency-mt-unsafe)
}

void await(
    const Fd& socket,
    short events,
    const Deadline& deadline,
    const Check& check) {
  pollfd one{.fd = socket.get(), .events = events, .revents = 0};
  while (poll(&one, 1, static_cast<int>(kLook.count())) <= 0) {
    check();
    if (deadline.expired()) {
      late(deadline);
    }
  }
}

void write_all(
    const Fd& socket,
    const void* data,
    size_t bytes,
    const Deadline& deadline,
    const Check& check) {
  const auto* from = static_cast<const char*>(data);
  while (bytes != 0) {
    const ssize_t sent = send(socket.get(), from, bytes, MSG_NOSIGNAL);
    if (sent < 0 && !would_block()) {
      ended(errno);
    }
    if (sent < 0) {
      await(socket, POLLOUT, deadline, check);
      continue;
    }
    from += sent;
    bytes -= static_cast<size_t>(sent);
  }
}

void read_all(
    const Fd& socket,
    void* data,
    size_t bytes,
    const Deadline& deadline,
    const Check& check) {
  auto* into = static_cast<char*>(data);
  while (bytes != 0) {
    const ssize_t got = recv(socket.get(), into, bytes, 0);
    if (got == 0 || (got < 0 && !would_block())) {
      ended(got == 0 ? 0 : errno);
    }
    if (got < 0) {
      await(socket, POLLIN, deadline, check);
      continue;
    }
    into += got;
    bytes -= static_cast<size_t>(got);
  }
}

// None: nobody listens there now.
Fd reach(
    const SocketAddress& address,
    const Deadline& deadline,
    const Check& check) {
  Fd socket = connect_to(address);
  if (socket) {
    await(socket, POLLOUT, deadline, check);
    errno = connect_result(socket);
    if (errno != 0) {
      socket.reset();
    }
  }
  return socket;
}

} // namespace

Fd dial(
    const TcpAddress& address,
    int from,
    int to,
    const Deadline& deadline,
    const Check& check) {
  Fd socket;
  while (!(socket = reach(address.socket, deadline, check))) {
    const int why = errno;
    check();
    if (deadline.expired() || (why != ECONNREFUSED && why != EINTR)) {
      fail(
          deadline.expired() ? ErrorKind::kTimeout : ErrorKind::kPeerFailed,
          "fused: cannot connect to {}: {}",
          address.socket.text(),
          std::strerror(why)); // NOLINT(concurrency-mt-unsafe)
    }
    std::this_thread::sleep_for(kLook);
  }
  Hello hello;
  hello.endpoint = address.endpoint;
  hello.from = from;
  hello.to = to;
  hello.nonce = random_key();
  write_all(socket, &hello, sizeof hello, deadline, check);
  Challenge challenge;
  read_all(socket, &challenge, sizeof challenge, deadline, check);
  if (challenge.nonce == Key128{} && challenge.proof == Key128{}) {
    fail(
        ErrorKind::kPeerFailed,
        "fused: who listens at {} takes nobody in any more",
        address.socket.text());
  }
  if (!same_secret(
          challenge.proof,
          listener_proof(address.key, hello, challenge.nonce))) {
    fail(
        ErrorKind::kPeerFailed,
        "fused: who listens at {} has another key",
        address.socket.text());
  }
  const Key128 proof = connector_proof(address.key, hello, challenge.nonce);
  write_all(socket, proof.data(), proof.size(), deadline, check);
  return socket;
}

void say(
    const Fd& socket,
    const std::string& word,
    const Deadline& deadline,
    const Check& check) {
  const auto bytes = static_cast<uint32_t>(word.size());
  write_all(socket, &bytes, sizeof bytes, deadline, check);
  write_all(socket, word.data(), word.size(), deadline, check);
}

std::string hear(
    const Fd& socket,
    size_t most,
    const Deadline& deadline,
    const Check& check) {
  uint32_t bytes = 0;
  read_all(socket, &bytes, sizeof bytes, deadline, check);
  if (bytes > most) {
    fail(
        ErrorKind::kPeerFailed,
        "fused: a word of {} bytes, where {} are the most",
        bytes,
        most);
  }
  std::string word(bytes, '\0');
  read_all(socket, word.data(), bytes, deadline, check);
  return word;
}

} // namespace fusedpg::tcp
