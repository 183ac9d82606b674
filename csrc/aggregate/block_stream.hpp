#pragma once

#include <deque>
#include <vector>

#include "aggregate/blocks.hpp"
#include "base/deadline.hpp"
#include "net/tcp_transport.hpp"

namespace fusedpg::aggregate {

// A worker's side of one tensor that is mostly zeros, and one aggregator: its
// blocks go there, and the sums take their places.
class BlockStream {
 public:
  struct Counts {
    uint64_t bytes_sent = 0;
    uint64_t bytes_received = 0;
    uint64_t messages_sent = 0;
    uint64_t blocks = 0; // of the results
    uint64_t contributions = 0; // to these
  };

  // `bits`: the blocks of `data` that this worker has. All live as long.
  BlockStream(
      TcpTransport& transport,
      int workers,
      size_t aggregator,
      const BlockLayout& layout,
      char* data,
      const uint64_t* bits,
      NetBuffers& buffers);

  // Does what can be done without waiting; whether there was anything. Throws
  // Error where the aggregator is lost, or says what makes no sense.
  bool move();
  // All sums are here, and nothing of the tensor is used any more.
  bool done() const {
    return heard_all_ && sends_.empty();
  }
  // Throws what a wait throws whose deadline has come, or that is aborted.
  void give_up(const Deadline& deadline);
  const Counts& counts() const {
    return counts_;
  }

 private:
  struct Sent {
    NetBuffer message;
    std::vector<Transport::RequestPtr> requests;
  };

  // Returns true once a request has ended; throws if it never can.
  bool over(const Transport::RequestPtr& request);
  bool send_some();
  bool receive_some();
  void scatter();

  TcpTransport& transport_;
  const int peer_;
  const size_t aggregator_;
  const BlockLayout& layout_;
  char* const data_;
  const uint64_t* const bits_;
  NetBuffers& buffers_;
  // Contributions.
  bool said_all_ = false;
  uint32_t next_; // of this worker's blocks
  std::deque<Sent> sends_;
  // Results.
  bool heard_all_ = false;
  const NetBuffer header_bytes_{sizeof(BlockHeader)};
  Transport::RequestPtr header_comes_;
  BlockHeader header_;
  NetBuffer message_;
  Transport::RequestPtr message_comes_;
  uint32_t from_ = 0; // no block before this one can come
  Counts counts_;
};

} // namespace fusedpg::aggregate
