#include "aggregate/udp_packet.hpp"

#include <algorithm>
#include <string_view>

#include "kernels/block_float.hpp"

namespace fusedpg::aggregate::udp {
namespace {

// The exponents of float32's blocks, see block_exponents().
constexpr int32_t kLeast = -148;
constexpr int32_t kMost = 128;

// The first kSealBytes of it are the seal.
Key128 seal_of(
    const Key128& key,
    uint8_t* packet,
    size_t bytes,
    uint64_t operation,
    uint8_t from) {
  std::array<uint8_t, kSealRoom> end{};
  std::memcpy(end.data(), &operation, sizeof operation);
  end[sizeof operation] = from;
  std::memcpy(packet + bytes, end.data(), end.size());
  return siphash(key, packet, bytes + end.size());
}

} // namespace

void Header::put(uint8_t* to) const {
  to[0] = type_and_size;
  to[1] = job;
  std::memcpy(to + 2, &packet, sizeof packet);
  to[6] = static_cast<uint8_t>(pool >> 8);
  to[7] = static_cast<uint8_t>(pool);
}

Header Header::of(const uint8_t* from) {
  Header header;
  header.type_and_size = from[0];
  header.job = from[1];
  std::memcpy(&header.packet, from + 2, sizeof header.packet);
  header.pool = static_cast<uint16_t>(from[6] << 8 | from[7]);
  return header;
}

// 0: zeros; from 1 on kLeast to kMost; then not finite.
Exponents Exponents::of(int32_t exponent) {
  const int32_t place = exponent < kLeast ? 0
      : exponent > kMost                  ? kMost - kLeast + 2
                                          : exponent - kLeast + 1;
  Exponents two;
  two.first = static_cast<int8_t>(std::min(place, 255) + INT8_MIN);
  two.second = static_cast<int8_t>(std::max(place - 255, 0) + INT8_MIN);
  return two;
}

int32_t Exponents::exponent() const {
  const int32_t place = (first - INT8_MIN) + (second - INT8_MIN);
  return place == 0                ? kernels::kZeroBlock
      : place > kMost - kLeast + 1 ? kernels::kNotFiniteBlock
                                   : place - 1 + kLeast;
}

void PacketFormat::write(
    const Packet& packet,
    const uint32_t* elements,
    std::vector<uint8_t>& into) const {
  const size_t bytes = packet_bytes(numel);
  into.resize(bytes + kSealRoom);
  uint8_t* to = into.data();
  Header header;
  header.type_and_size = Header::type_and_size_of(numel);
  header.job = static_cast<uint8_t>(packet.operation);
  header.packet = packet.number;
  header.pool = packet.pool;
  header.put(to);
  to[kHeaderBytes] = static_cast<uint8_t>(packet.exponents.first);
  to[kHeaderBytes + 1] = static_cast<uint8_t>(packet.exponents.second);
  for (size_t i = 0; i < numel; ++i) {
    const uint32_t value = __builtin_bswap32(elements[i]);
    std::memcpy(
        to + kHeaderBytes + kExponentBytes + sizeof value * i,
        &value,
        sizeof value);
  }
  if (with_seal) {
    const Key128 hash = seal_of(key, to, bytes, packet.operation, packet.from);
    std::memcpy(to + bytes, hash.data(), kSealBytes);
  }
  into.resize(bytes + (with_seal ? kSealBytes : 0));
}

std::optional<Packet> PacketFormat::read(
    uint8_t* bytes,
    size_t size,
    uint64_t newest,
    uint8_t from) const {
  const size_t unsealed = packet_bytes(numel);
  if (size != unsealed + (with_seal ? kSealBytes : 0)) {
    return std::nullopt;
  }
  const Header header = Header::of(bytes);
  const auto away = static_cast<int8_t>(header.job - newest);
  const uint64_t operation = newest + static_cast<uint64_t>(int64_t{away});
  if (header.type_and_size != Header::type_and_size_of(numel)) {
    return std::nullopt;
  }
  if (with_seal) {
    Key128 given{};
    std::memcpy(given.data(), bytes + unsealed, kSealBytes);
    Key128 hash = seal_of(key, bytes, unsealed, operation, from);
    std::fill(hash.begin() + kSealBytes, hash.end(), uint8_t{0});
    if (!same_secret(given, hash)) {
      return std::nullopt;
    }
  }
  return Packet{
      operation,
      header.packet,
      header.pool,
      from,
      {static_cast<int8_t>(bytes[kHeaderBytes]),
       static_cast<int8_t>(bytes[kHeaderBytes + 1])}};
}

Key128 session_key(const Key128& secret, const Key128& session) {
  std::array<uint8_t, 32> text{};
  std::memcpy(text.data(), "fusedpg-udp", 11);
  std::memcpy(text.data() + 16, session.data(), session.size());
  return siphash(secret, text.data(), text.size());
}

const char* refusal_text(Refusal why) {
  switch (why) {
    case Refusal::kDrains:
      return "it takes nobody in any more";
    case Refusal::kFull:
      return "it has as many sessions as it can";
    case Refusal::kDiffers:
      return "other workers of this session have other packets, or are another "
             "number";
    case Refusal::kTaken:
      return "another one has joined as this rank";
    case Refusal::kOver:
      return "this session has ended";
    case Refusal::kNone:
    case Refusal::kNonsense:
      break;
  }
  return "it does not understand that";
}

void Control::prove(const Key128& secret) {
  proof = siphash(secret, this, offsetof(Control, proof));
}

std::optional<Control> Control::of(
    const uint8_t* bytes,
    size_t size,
    const Key128& secret) {
  Control said;
  if (size != sizeof said || bytes[0] < static_cast<uint8_t>(Kind::kJoin)) {
    return std::nullopt;
  }
  std::memcpy(&said, bytes, sizeof said);
  const Key128 proof = siphash(secret, &said, offsetof(Control, proof));
  return same_secret(said.proof, proof) ? std::optional(said) : std::nullopt;
}

size_t AddressHash::operator()(const Address& address) const {
  return std::hash<std::string_view>()(
      {reinterpret_cast<const char*>(address.bytes.data()), address.length});
}

} // namespace fusedpg::aggregate::udp
