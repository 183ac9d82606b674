#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "aggregate/udp_packet.hpp"
#include "base/deadline.hpp"
#include "kernels/kernels.hpp"

namespace fusedpg::aggregate::udp {

// Fills an operation's packets and takes their sums. Packet p + window() is
// filled when packet p's sum has been taken.
class Payload {
 public:
  virtual ~Payload() = default;
  uint32_t packets() const {
    return packets_;
  }
  uint32_t window() const {
    return window_;
  }
  virtual void fill(uint32_t packet, int32_t* elements, int32_t& exponent) = 0;
  virtual void take(
      uint32_t packet,
      const int32_t* elements,
      int32_t exponent) = 0;

 protected:
  Payload(size_t count, size_t numel);
  size_t size(uint32_t block) const; // elements

  const size_t count_;
  const size_t numel_; // of a block
  const uint32_t blocks_;
  uint32_t packets_;
  uint32_t window_ = 0;
};

// int32 as they are; a sum beyond them is modulo 2^32. In place.
class Integers : public Payload {
 public:
  Integers(int32_t* data, size_t count, size_t numel, uint32_t slots);
  void fill(uint32_t packet, int32_t* elements, int32_t& exponent) override;
  void take(uint32_t packet, const int32_t* elements, int32_t exponent)
      override;

 private:
  int32_t* const data_;
};

// Blocks of `numel` floats as integers that share an exponent, which all
// workers' have in common: packet p carries the exponent of block p, and the
// integers of block p - window(), whose largest exponent is known by then.
// In place.
class Floats : public Payload {
 public:
  Floats(
      float* data,
      size_t count,
      size_t numel,
      uint32_t slots,
      uint32_t workers,
      const kernels::Table& kernels);
  void fill(uint32_t packet, int32_t* elements, int32_t& exponent) override;
  void take(uint32_t packet, const int32_t* elements, int32_t exponent)
      override;

 private:
  float* const data_;
  const int bits_;
  const kernels::Table& kernels_;
  std::vector<int32_t> exponents_; // the largest, by packet % window()
};

// One worker's packets at one aggregator, operation by operation. No socket, no
// thread: datagrams and the time come in, datagrams go out.
class Stream {
 public:
  struct Config {
    Key128 secret{}; // of the aggregator
    Key128 session{};
    uint8_t rank = 0;
    uint8_t workers = 1;
    bool with_seal = true;
    size_t numel = kLargeNumel;
    uint32_t slots = 64; // a power of two
    std::chrono::microseconds timeout{10'000}; // until times are known
  };
  struct Stats {
    uint64_t packets_sent = 0; // with those that were sent again
    uint64_t bytes_sent = 0;
    uint64_t retransmissions = 0;
    uint64_t packets_received = 0; // results, right ones
    uint64_t repeated = 0; // of packets that were there already
    uint64_t wrong = 0; // whatever else came
  };
  using Out = std::function<void(const uint8_t* bytes, size_t size)>;

  explicit Stream(const Config& config);

  // The payload stays until the operation is done, or for good.
  void begin(Payload& payload, Clock::time_point now, const Out& out);
  bool done() const {
    return unfinished_ == 0;
  }
  // With kSealRoom bytes of room behind it.
  void take(uint8_t* bytes, size_t size, Clock::time_point now, const Out& out);
  // Sends again what is due; next_due() is when it is to be called.
  void tick(Clock::time_point now, const Out& out);
  Clock::time_point next_due() const;

  // When the aggregator was heard; at first, of the operation's beginning.
  Clock::time_point heard() const {
    return heard_;
  }
  // Workers, as bits, of whom a packet of this operation was missing when the
  // aggregator said so last; and those that have left.
  uint32_t missing() const {
    return missing_;
  }
  uint32_t left() const {
    return left_;
  }
  const Stats& stats() const {
    return stats_;
  }

 private:
  struct InFlight {
    uint32_t packet = 0;
    bool out = false;
    bool resent = false;
    // Last, or when the aggregator said that it has it, but not all others'.
    Clock::time_point sent;
    Clock::time_point due;
    std::chrono::microseconds patience{};
    std::vector<uint8_t> bytes;
  };
  void send_next(
      InFlight& entry,
      uint32_t packet,
      Clock::time_point now,
      const Out& out);
  void hear(Control said, Clock::time_point now, const Out& out);
  void send_again(InFlight& entry, Clock::time_point now, const Out& out);
  // Whether the aggregator asks for it where it is missing.
  bool asked_for(uint32_t packet) const;
  void send_overtaken(Clock::time_point now, const Out& out);
  void measure(const InFlight& entry, Clock::time_point now);
  uint16_t pool_of(uint32_t packet) const;

  const Config config_;
  const PacketFormat format_;
  Payload* payload_ = nullptr;
  uint64_t operation_ = ~uint64_t{0}; // the first one is 0
  uint64_t position_ = 0; // of the operation's first packet, of all
  uint64_t behind_ = 0; // the packets of all operations
  uint32_t unfinished_ = 0; // packets
  std::vector<InFlight> in_flight_;
  // When entries of in_flight_ were sent, in that order. An entry may have been
  // sent again since, or have its result.
  std::deque<std::pair<Clock::time_point, uint32_t>> sent_;
  Clock::time_point newest_; // when the latest packet with a result was sent
  std::vector<int32_t> elements_;
  std::chrono::microseconds patience_;
  std::chrono::microseconds mean_{0};
  std::chrono::microseconds least_{0}; // recently
  std::chrono::microseconds deviation_{0};
  Clock::time_point heard_;
  Clock::time_point progress_; // the last result
  Clock::time_point measured_; // the last one of a packet sent once
  uint32_t missing_ = 0;
  uint32_t left_ = 0;
  Stats stats_;
};

} // namespace fusedpg::aggregate::udp
