#include "aggregate/udp_server.hpp"

#include <pthread.h>

#include "base/error.hpp"
#include "base/options.hpp"

namespace fusedpg::aggregate::udp {
namespace {

// The system counts so much of a socket's buffer for each packet.
constexpr size_t kBuffered = 2304;

} // namespace

Server::Server(const SocketAddress& address, const Key128& secret)
    : socket_(Datagrams::at(address)),
      address_(socket_.address().text()),
      // So that what one session has under way finds room.
      sums_(
          secret,
          [room = socket_.buffer() / kBuffered](uint32_t workers) {
            return static_cast<uint32_t>(room / workers);
          }),
      thread_([this] { run(); }) {}

Server::~Server() {
  ending_ = true;
  signal_.set();
  thread_.join();
}

void Server::drain() {
  const std::lock_guard<std::mutex> lock(mutex_);
  sums_.drain();
}

Sums::Stats Server::stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sums_.stats();
}

void Server::run() {
  pthread_setname_np(pthread_self(), "fusedpg-udp");
  const Send send = [this](
                        const Address& to, const uint8_t* bytes, size_t size) {
    socket_.send(to, bytes, size);
  };
  while (!ending_) {
    constexpr std::chrono::seconds kLook{1};
    socket_.wait(signal_, kLook);
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
      sums_.tick(Clock::now());
      socket_.receive([&](const Address& from, uint8_t* bytes, size_t size) {
        sums_.take(from, bytes, size, Clock::now(), send);
      });
      socket_.flush();
    } catch (const std::exception& error) { // out of memory
      log_line(formatted("aggregator: a datagram is lost: {}", error.what()));
    }
  }
}

} // namespace fusedpg::aggregate::udp
