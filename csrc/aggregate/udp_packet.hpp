#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "base/siphash.hpp"

// Packets of SwitchML's workers and its switch (Sapio et al. 2021;
// p4app-switchML, headers.p4), so that a switch can take an aggregator's place:
//
//   type 4 bits (1) | 0 | size class 3 bits | job 8 bits | packet 32 bits,
//   little-endian | set 1 bit, slot 15 bits, big-endian | two exponents of 8
//   bits, of which the switch takes the largest each | 64 or 256 integers of 32
//   bits, big-endian, which it adds up
//
// Behind that comes the seal, which no switch knows and which can be left out:
// 64 bits of a keyed hash of the packet, of who sent it, and of the operation's
// whole number, of which the format has 8 bits.
//
// Datagrams with type 15 are ours: how a worker gets in, what it is told while
// a sum is missing, and its leaving.
namespace fusedpg::aggregate::udp {

constexpr size_t kHeaderBytes = 8;
constexpr size_t kExponentBytes = 2;
constexpr size_t kSealBytes = 8;
constexpr size_t kSmallNumel = 64;
constexpr size_t kLargeNumel = 256;
constexpr size_t kMostPacketBytes =
    kHeaderBytes + kExponentBytes + 4 * kLargeNumel + kSealBytes;
constexpr uint32_t kMostWorkers = 32; // the bits of the switch's bitmap
constexpr uint32_t kMostSlots = 4096; // of one worker's thread
constexpr uint16_t kSecondSet = 0x8000;
constexpr uint8_t kFromAggregator = 0xff; // workers are their ranks

// Without its seal.
constexpr size_t packet_bytes(size_t numel) {
  return kHeaderBytes + kExponentBytes + 4 * numel;
}

struct Header {
  uint8_t type_and_size = 0;
  uint8_t job = 0;
  uint32_t packet = 0;
  uint16_t pool = 0;

  static uint8_t type_and_size_of(size_t numel) {
    return static_cast<uint8_t>(1U << 4 | (numel < kLargeNumel ? 1U : 3U));
  }
  void put(uint8_t* to) const;
  static Header of(const uint8_t* from);
};

// A block's exponent (kernels/block_float.hpp) as two of 8 bits whose largest
// are those of the largest exponent.
struct Exponents {
  int8_t first = INT8_MIN;
  int8_t second = INT8_MIN;

  static Exponents of(int32_t exponent);
  int32_t exponent() const;
};

// Bytes behind a packet that sealing it and looking at its seal overwrite.
constexpr size_t kSealRoom = 16;

// Derives a session's key from the aggregator's.
Key128 session_key(const Key128& secret, const Key128& session);

// One packet, but for its elements.
struct Packet {
  uint64_t operation = 0; // the whole number
  uint32_t number = 0; // of the operation's packets
  uint16_t pool = 0;
  uint8_t from = kFromAggregator;
  Exponents exponents;
};

// The packets of a session, which both sides write and read alike.
struct PacketFormat {
  Key128 key{}; // of the session
  size_t numel = kLargeNumel;
  bool with_seal = true;

  void write(
      const Packet& packet,
      const uint32_t* elements,
      std::vector<uint8_t>& into) const;
  // Returns none if it is no packet of this session and sender. The packet
  // carries the last 8 bits of its operation's number: the number nearest to
  // `newest` that ends in them is meant. There must be kSealRoom bytes behind
  // the packet.
  std::optional<Packet> read(
      uint8_t* bytes,
      size_t size,
      uint64_t newest,
      uint8_t from) const;
  // An element of what was read.
  static uint32_t element(const uint8_t* bytes, size_t index) {
    uint32_t value = 0;
    std::memcpy(
        &value,
        bytes + kHeaderBytes + kExponentBytes + sizeof value * index,
        sizeof value);
    return __builtin_bswap32(value);
  }
};

enum class Kind : uint8_t {
  kJoin = 0xf0, // of a worker; without a cookie it is asked for one
  kChallenge, // the cookie
  kWelcome,
  kRefused,
  kWaiting, // to a worker that repeats a packet: whose is missing
  kLeave,
  kNext, // to a worker: what it sends after this packet's result is missing
  kResult, // of a worker that lacks that, and is asked for the next packet
};

enum class Refusal : uint8_t {
  kNone,
  kDrains,
  kFull,
  kNonsense,
  kDiffers, // from what other workers of the session say
  kTaken, // another one has joined as this rank
  kOver, // all of the session have left
};
const char* refusal_text(Refusal why);

// Both sides are little-endian.
struct Control {
  Kind kind = Kind::kJoin;
  uint8_t rank = 0;
  uint8_t workers = 0;
  uint8_t with_seal = 1;
  uint16_t numel = 0;
  uint16_t slots = 0; // wanted; of a welcome, granted; of a result, its place
  uint32_t missing = 0; // of a waiting: workers, as bits
  uint32_t left = 0;
  uint64_t operation = 0;
  Key128 session{};
  Key128 nonce{}; // an answer has its question's
  Key128 cookie{};
  Refusal refusal = Refusal::kNone;
  std::array<uint8_t, 3> nothing{};
  uint32_t packet = 0; // of a waiting, next and result, of that operation
  Key128 proof{};

  void prove(const Key128& secret);
  // None: it is no datagram of this kind, or of somebody without the secret.
  static std::optional<Control> of(
      const uint8_t* bytes,
      size_t size,
      const Key128& secret);
  const uint8_t* data() const {
    return reinterpret_cast<const uint8_t*>(this);
  }
};
static_assert(std::is_trivially_copyable_v<Control> && sizeof(Control) == 96);

// A datagram's destination: the bytes of a sockaddr.
struct Address {
  uint32_t length = 0;
  std::array<uint8_t, 28> bytes{};

  bool operator==(const Address&) const = default;
};
struct AddressHash {
  size_t operator()(const Address& address) const;
};

using Send =
    std::function<void(const Address& to, const uint8_t* bytes, size_t size)>;

} // namespace fusedpg::aggregate::udp
