#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "aggregate/udp_packet.hpp"
#include "base/deadline.hpp"

namespace fusedpg::aggregate::udp {

// Does with workers' packets what a switch does, and begins and ends sessions.
// No sockets, no threads: datagrams and the time come in, datagrams go out.
//
// A slot has two places, which a worker uses in turn. It sends a slot's next
// packet when it has the result of the one before, so when a packet for one
// place comes, everybody has sent its part of the other one, and has the result
// of what was in this one before: that can go. The other one's result is kept
// for those that have not got it. A place knows which packet it is for: what
// comes late, from an earlier one, is dropped (a switch would add it up).
//
// A worker answers a result by the slot's next packet, in the order of results.
// A worker that has answered later ones is asked for that packet: either this or
// the result is lost. No switch does that.
class Sums {
 public:
  struct Stats {
    uint64_t sessions = 0; // that have begun
    uint64_t active = 0;
    uint64_t refused = 0; // workers, by an answer
    uint64_t packets = 0; // of workers, right ones
    uint64_t sums = 0; // that are complete
    uint64_t repeated = 0; // packets that were there already
    uint64_t resent = 0; // results
    uint64_t asked = 0; // workers, for a packet that later ones have overtaken
    uint64_t stale = 0; // of packets that are over
    uint64_t wrong = 0; // whatever else came
  };

  // `most_slots`: that a worker's thread of so many workers is granted.
  Sums(
      const Key128& secret,
      std::function<uint32_t(uint32_t workers)> most_slots,
      size_t most_sessions = 256);

  // A datagram, which must have kSealRoom bytes of room behind it.
  void take(
      const Address& from,
      uint8_t* bytes,
      size_t size,
      Clock::time_point now,
      const Send& send);
  // Now and then: forgets what is long ago; while it drains, sessions that are
  // silent end.
  void tick(Clock::time_point now);
  // Takes nobody in any more.
  void drain() {
    drains_ = true;
  }
  Stats stats() const;

 private:
  struct Place {
    bool begun = false;
    bool complete = false;
    uint64_t operation = 0;
    uint32_t packet = 0;
    uint32_t seen = 0; // workers, as bits
    uint32_t asked = 0; // for it: workers, as bits
    Clock::time_point completed;
    uint64_t number = 0; // of the session's results
    Exponents exponents;
    std::vector<uint32_t> sums;
    std::vector<uint8_t> result; // the packet
  };
  // The sender of a datagram, its time, and the way for answers.
  struct Visit {
    const Address& from;
    Clock::time_point now;
    const Send& send;
  };
  // A result that a worker was sent, until the slot's next packet comes.
  struct Sent {
    uint64_t number = 0; // of results, when it was sent or last looked at
    Clock::time_point asked{}; // for the next packet, last
    uint64_t operation = 0;
    uint32_t packet = 0;
    uint32_t place = 0;
  };
  struct Session {
    Key128 id{};
    PacketFormat format;
    uint8_t workers = 0;
    uint16_t slots = 0;
    uint32_t joined = 0; // as bits
    uint32_t left = 0;
    uint64_t operation = 0; // the newest
    Clock::time_point heard;
    std::vector<Address> addresses; // by rank
    std::vector<Place> places; // of the first set, then of the second one
    uint64_t results = 0;
    std::vector<std::deque<Sent>> sent; // by rank
    std::vector<uint64_t> newest; // by rank: the latest that it has answered
    // From a result's sending to the slot's next packet, on average.
    std::chrono::nanoseconds trip{0};
  };
  struct Member {
    Session* session = nullptr;
    uint8_t rank = 0;
  };

  void control(const Visit& visit, const Control& said);
  Refusal join(const Visit& visit, const Control& said, Session*& session);
  void resend(const Visit& visit, const Session& session, const Control& said);
  void say(const Visit& visit, Control said) const;
  static void send_result(const Visit& visit, const Address&, const Place&);
  Key128 cookie(const Address& from, const Control& said) const;
  bool make_room(Clock::time_point now);
  // A worker has gone; the session, with the last one.
  void leave(Session& session, uint8_t rank, Clock::time_point now);
  void remove(Session& session, Clock::time_point now);
  // The one that a slot's next packet is for.
  static Place& other_place(Session& session, size_t index);
  void packet(
      const Visit& visit,
      const Member& member,
      uint8_t* bytes,
      size_t size);
  // Asks for what it should have sent before.
  void ask_for_overtaken(const Visit& visit, Session& session, uint8_t rank);

  const Key128 secret_;
  const Key128 cookie_key_ = random_key();
  const std::function<uint32_t(uint32_t)> most_slots_;
  const size_t most_sessions_;
  bool drains_ = false;
  std::map<Key128, std::unique_ptr<Session>> sessions_;
  // Sessions that have ended lately: a join that comes late begins none.
  std::deque<std::pair<Clock::time_point, Key128>> over_;
  std::unordered_map<Address, Member, AddressHash> members_;
  Stats stats_;
};

} // namespace fusedpg::aggregate::udp
