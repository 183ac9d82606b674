#include "net/transport.hpp"

#include <thread>

#include "base/error.hpp"

namespace fusedpg {

NetBuffer NetBuffers::take(size_t bytes) {
  while (!free_.empty()) {
    NetBuffer buffer = std::move(free_.back());
    free_.pop_back();
    bytes_ -= buffer.bytes();
    if (buffer.bytes() >= bytes) {
      return buffer;
    } // the others are as short: operations have got larger
  }
  return NetBuffer(bytes);
}

void NetBuffers::give(NetBuffer buffer) {
  if (bytes_ + buffer.bytes() <= kMost) {
    bytes_ += buffer.bytes();
    free_.push_back(std::move(buffer));
  }
}

std::string await_rank(
    Rendezvous& rendezvous,
    const std::string& key,
    int rank,
    int awaited,
    const Deadline& deadline,
    const std::function<void()>& check) {
  constexpr std::chrono::milliseconds kLook{5};
  while (!rendezvous.has(key)) {
    check();
    if (deadline.expired()) {
      fail(
          ErrorKind::kTimeout,
          "fused: timeout after {} ms on rank {} waiting for rank {}, which "
          "did not reach the first operation that connects the hosts",
          deadline.timeout().count(),
          rank,
          awaited);
    }
    std::this_thread::sleep_for(kLook);
  }
  return rendezvous.get(key, deadline);
}

} // namespace fusedpg
