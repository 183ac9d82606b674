#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "aggregate/udp_socket.hpp"
#include "aggregate/udp_stream.hpp"
#include "base/deadline.hpp"
#include "net/wake_signal.hpp"

namespace fusedpg::aggregate::udp {

// A worker's side of a session at one aggregator. One thread at a time, but for
// end().
class Client {
 public:
  // Joins the session, of which the config's slots are how many it wants.
  // `place` is "host:port". Throws Error: kInvalid, kSystem or kTimeout, which
  // name the place and what is wrong.
  Client(
      const std::string& place,
      const Stream::Config& config,
      const Deadline& deadline);
  Client(const Client&) = delete;
  ~Client();

  // Collective over the workers: the sum, in place. Throws Error: kTimeout,
  // kPeerFailed or kAborted; the session has ended then, and part of the data
  // may be sums.
  void all_reduce(int32_t* data, size_t count, const Deadline& deadline);
  void all_reduce(
      float* data,
      size_t count,
      const kernels::Table& kernels,
      const Deadline& deadline);

  // From any thread: this worker is gone, of which the others hear if they wait
  // for it; what waits here raises.
  void end() noexcept;

  uint32_t slots() const {
    return config_.slots;
  }
  const Stream::Stats& stats() const {
    return stream_->stats();
  }

 private:
  // A question of this kind, which the answer repeats.
  Control asked(Kind kind, const Key128& cookie = {}) const;
  void ask_to_join(const Key128& cookie = {});
  // None: it is no answer to a question of this worker.
  std::optional<Control> answered(const uint8_t* bytes, size_t size) const;
  void join(const Deadline& deadline);
  void run(Payload& payload, const Deadline& deadline);
  void look(Clock::time_point now, const Deadline& deadline);
  std::string ranks(uint32_t bits) const;

  const std::string place_;
  Stream::Config config_;
  Datagrams socket_;
  Key128 nonce_ = random_key();
  std::unique_ptr<Stream> stream_;
  WakeSignal signal_;
  std::atomic<bool> ended_{false};
  Clock::time_point asked_; // whether it still knows this session
  uint64_t refusals_ = 0; // before the aggregator was heard last
};

} // namespace fusedpg::aggregate::udp
