#pragma once

#include <optional>
#include <vector>

#include "aggregate/blocks.hpp"
#include "kernels/kernels.hpp"
#include "net/tcp_transport.hpp"

namespace fusedpg::aggregate {

// An aggregator's side of one tensor that is mostly zeros: the workers' streams
// of blocks, added up in rank order, as a stream to each of them. If some
// worker does not have a block, +0.0 is added once, as the dense sum does.
class Merge {
 public:
  struct Counts {
    uint64_t messages = 0;
    uint64_t bytes_received = 0;
    uint64_t bytes_sent = 0;
  };

  // All live as long. `buffers` are of the job.
  Merge(
      TcpTransport& transport,
      const kernels::Table& kernels,
      const kernels::ReduceArgs& args,
      const BlockLayout& layout,
      size_t aggregator,
      int workers,
      NetBuffers& buffers);

  // Until the last contributions have come and results are under way. Throws
  // Error: kMismatch where a worker says what makes no sense, and what waits
  // throw.
  Counts run();
  // Until results are on their way.
  void flush();

 private:
  // One worker's messages.
  struct Stream {
    NetBuffer header_bytes{sizeof(BlockHeader)};
    Transport::RequestPtr header_comes; // null: the header is here, if one is
    BlockHeader header;
    NetBuffer coming; // the message that the header announces
    Transport::RequestPtr message_comes;
    NetBuffer message; // its blocks are being added up
    std::vector<uint32_t> blocks; // of it
    size_t at = 0; // the first of these that is not
    size_t offset = 0; // of its elements, in bytes
    uint32_t after = 0; // behind these: nothing comes before this block

    uint32_t next() const {
      return at < blocks.size() ? blocks[at] : after;
    }
  };
  // A message of results.
  struct Out {
    NetBuffer message;
    std::vector<Transport::RequestPtr> sends;
  };

  void listen(int worker);
  void hear(int worker); // the header has come
  void look_at_headers();
  // The next message of a worker of whose last one nothing is left.
  void load(int worker);
  void add_up(uint32_t block);
  void send(bool last);
  void wait_for(Out& out);

  TcpTransport& transport_;
  const kernels::Table& kernels_;
  const kernels::ReduceArgs args_;
  const BlockLayout& layout_;
  const size_t aggregator_;
  NetBuffers& buffers_;
  const std::vector<char> zeros_; // a block
  std::vector<Stream> streams_; // by worker
  std::vector<Out> outs_;
  size_t next_out_ = 0;
  std::optional<BlockMessage> result_; // that is being written
  uint32_t contributions_ = 0; // to it
  std::vector<const void*> sources_;
  Counts counts_;
};

} // namespace fusedpg::aggregate
