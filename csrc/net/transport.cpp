#include "net/transport.hpp"

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

} // namespace fusedpg
