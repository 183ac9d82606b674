#include "net/transport.hpp"

#include <poll.h>

#include <ctime>

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

void PolledTransport::Sleep::run() const {
  if (descriptor >= 0) {
    pollfd fd{descriptor, POLLIN, 0};
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(most);
    const timespec time{
        .tv_sec = seconds.count(), .tv_nsec = (most - seconds).count() * 1000};
    ppoll(&fd, 1, &time, nullptr);
  }
}

void PolledTransport::doze(std::chrono::milliseconds most) {
  sleep(most).run();
  awake();
  progress();
}

} // namespace fusedpg
