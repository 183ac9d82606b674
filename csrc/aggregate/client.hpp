#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "aggregate/protocol.hpp"
#include "base/deadline.hpp"
#include "base/stats.hpp"
#include "kernels/kernels.hpp"
#include "net/tcp_transport.hpp"

namespace fusedpg::aggregate {

// A worker's side of a job. One thread at a time, but for abort().
class Client {
 public:
  // `places` of the aggregators, as their user has named them; `transport` is
  // connected to them, as ranks from `workers` on.
  Client(
      std::vector<std::string> places,
      std::unique_ptr<TcpTransport> transport,
      int workers);

  const std::vector<std::string>& places() const {
    return places_;
  }

  // A tensor and its reduction, of which workers have agreed on all but the data.
  struct Reduction {
    void* data;
    size_t count;
    const kernels::ReduceArgs& args;
    uint64_t sequence;
    const Deadline& deadline;
    OpStats& moved;
  };
  // Collective over the workers, in place. Throws Error: kTimeout, kPeerFailed or
  // kAborted; the job has ended then, and nothing is written to the data any
  // more.
  void all_reduce(const Reduction& of);

  // The same of a tensor that is mostly zeros, by SUM or AVG: `bits` tell which
  // of its blocks of `block` elements this rank has, messages hold at most
  // `stripe` of them, and workers have agreed on these two. A tensor of which
  // no worker has a block is left alone.
  struct Shares {
    uint64_t blocks = 0; // that any worker has
    uint64_t contributions = 0; // the sum of what each has
  };
  Shares sparse_all_reduce(
      const Reduction& of,
      const uint64_t* bits,
      uint32_t block,
      uint32_t stripe);

  // From any thread: ends what waits, now and later.
  void abort() {
    aborted_ = true;
    transport_->abort();
  }
  // Closes the connections, by which the aggregators hear of a failure.
  void end() noexcept {
    transport_->end();
  }
  void flush(const Deadline& deadline) {
    transport_->flush(deadline);
  }

 private:
  // Runs what uses an aggregator's connections, whose errors then name it.
  void with(
      size_t aggregator,
      const Deadline& deadline,
      const std::function<void()>& body);

  // Sends each aggregator the operation's head, and returns that.
  Head begin(const Reduction& of, uint32_t block, uint32_t stripe);

  const std::vector<std::string> places_;
  const std::unique_ptr<TcpTransport> transport_;
  const int workers_;
  std::atomic<bool> aborted_{false};
  NetBuffers buffers_; // of blocks
};

// Opens a job at one aggregator, and returns the address of its endpoint there.
// Throws Error: kSystem, which names the place and what is wrong, and what
// `check` throws.
std::string open_job(
    const std::string& place,
    const Key128& key,
    const Request& request,
    const Deadline& deadline,
    const std::function<void()>& check);

} // namespace fusedpg::aggregate
