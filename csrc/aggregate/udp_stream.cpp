#include "aggregate/udp_stream.hpp"

#include <algorithm>
#include <bit>

#include "base/error.hpp"

namespace fusedpg::aggregate::udp {
namespace {

using Micros = std::chrono::microseconds;

constexpr Micros kLeastPatience{2'000};
constexpr Micros kMostPatience{500'000};

uint32_t blocks_of(size_t count, size_t numel) {
  const size_t blocks = (count + numel - 1) / numel;
  if (blocks > UINT32_MAX / 2) {
    fail(
        ErrorKind::kInvalid,
        "fused: {} elements are too many for one operation by UDP",
        count);
  }
  return static_cast<uint32_t>(blocks);
}

} // namespace

// A place of a slot is used again for the packet 2 * slots later, which needs
// that packet p + slots goes out after the result of packet p. So lanes divide
// slots, or nothing in the operation is as far apart as that.

Integers::Integers(int32_t* data, size_t count, size_t numel, uint32_t slots)
    : data_(data),
      count_(count),
      numel_(numel),
      packets_(blocks_of(count, numel)),
      lanes_(std::min(packets_, slots)) {}

size_t Integers::size(uint32_t packet) const {
  return std::min(numel_, count_ - packet * numel_);
}

void Integers::fill(uint32_t packet, int32_t* elements, int32_t& exponent) {
  const size_t n = size(packet);
  std::copy_n(data_ + packet * numel_, n, elements);
  std::fill(elements + n, elements + numel_, 0);
  exponent = kernels::kZeroBlock;
}

void Integers::take(
    uint32_t packet,
    const int32_t* elements,
    int32_t /*exponent*/) {
  std::copy_n(elements, size(packet), data_ + packet * numel_);
}

Floats::Floats(
    float* data,
    size_t count,
    size_t numel,
    uint32_t slots,
    uint32_t workers,
    const kernels::Table& kernels)
    : data_(data),
      count_(count),
      numel_(numel),
      blocks_(blocks_of(count, numel)),
      lanes_(std::bit_floor(std::min(blocks_, slots))),
      bits_(kernels::block_float_bits(workers)),
      kernels_(kernels),
      exponents_(lanes_, kernels::kZeroBlock) {}

size_t Floats::size(uint32_t block) const {
  return std::min(numel_, count_ - block * numel_);
}

void Floats::fill(uint32_t packet, int32_t* elements, int32_t& exponent) {
  size_t n = 0;
  if (packet >= lanes_) {
    const uint32_t block = packet - lanes_;
    n = size(block);
    kernels_.block_float.quantise(
        data_ + block * numel_,
        n,
        numel_,
        &exponents_[block % lanes_],
        bits_,
        elements);
  }
  std::fill(elements + n, elements + numel_, 0);
  exponent = kernels::kZeroBlock;
  if (packet < blocks_) {
    kernels_.block_float.exponents(
        data_ + packet * numel_, size(packet), numel_, &exponent);
  }
}

void Floats::take(uint32_t packet, const int32_t* elements, int32_t exponent) {
  int32_t& known = exponents_[packet % lanes_];
  if (packet >= lanes_) {
    const uint32_t block = packet - lanes_;
    kernels_.block_float.dequantise(
        data_ + block * numel_,
        elements,
        size(block),
        numel_,
        &known,
        bits_,
        1);
  }
  known = exponent;
}

Stream::Stream(const Config& config)
    : config_(config),
      key_(session_key(config.secret, config.session)),
      packet_(packet_bytes(config.numel)),
      lanes_(config.slots),
      elements_(config.numel),
      patience_(config.timeout) {}

void Stream::begin(Payload& payload, Clock::time_point now, const Out& out) {
  unfinished_ = payload.packets();
  if (done()) {
    return; // the aggregator hears nothing of it
  }
  payload_ = &payload;
  ++operation_;
  position_ = behind_;
  behind_ += unfinished_;
  heard_ = progress_ = measured_ = now;
  missing_ = 0;
  sent_.clear();
  newest_ = {};
  for (uint32_t lane = 0; lane < payload.lanes(); ++lane) {
    send_next(lanes_[lane], lane, now, out);
  }
}

uint16_t Stream::pool_of(uint32_t packet) const {
  const uint64_t place = (position_ + packet) % (uint64_t{2} * config_.slots);
  return static_cast<uint16_t>(
      place < config_.slots ? place : (place - config_.slots) | kSecondSet);
}

void Stream::send_next(
    Lane& lane,
    uint32_t packet,
    Clock::time_point now,
    const Out& out) {
  lane.packet = packet;
  lane.out = true;
  lane.again = false;
  lane.sent = now;
  sent_.emplace_back(now, static_cast<uint32_t>(&lane - lanes_.data()));
  lane.patience = asked_for(packet) ? 2 * patience_ : patience_;
  lane.due = now + lane.patience;
  lane.bytes.resize(packet_ + kSealRoom);
  uint8_t* to = lane.bytes.data();
  Header header;
  header.type_and_size = Header::type_and_size_of(config_.numel);
  header.job = static_cast<uint8_t>(operation_);
  header.packet = packet;
  header.pool = pool_of(packet);
  header.put(to);
  int32_t exponent = 0;
  payload_->fill(packet, elements_.data(), exponent);
  const Exponents two = Exponents::of(exponent);
  to[kHeaderBytes] = static_cast<uint8_t>(two.first);
  to[kHeaderBytes + 1] = static_cast<uint8_t>(two.second);
  for (size_t i = 0; i < config_.numel; ++i) {
    put_big_endian(
        to + kHeaderBytes + kExponentBytes + 4 * i,
        static_cast<uint32_t>(elements_[i]));
  }
  if (config_.with_seal) {
    seal(key_, to, packet_, operation_, config_.rank);
  }
  lane.bytes.resize(packet_ + (config_.with_seal ? kSealBytes : 0));
  out(lane.bytes.data(), lane.bytes.size());
  ++stats_.packets_sent;
  stats_.bytes_sent += lane.bytes.size();
}

void Stream::take(
    uint8_t* bytes,
    size_t size,
    Clock::time_point now,
    const Out& out) {
  if (size == sizeof(Control) &&
      (bytes[0] == static_cast<uint8_t>(Kind::kWaiting) ||
       bytes[0] == static_cast<uint8_t>(Kind::kNext))) {
    Control said;
    std::memcpy(&said, bytes, sizeof said);
    if (said.proved(config_.secret) && said.session == config_.session) {
      heard_ = now;
      if (said.operation != operation_ || done()) {
        return;
      }
      Lane& lane = lanes_[said.packet % payload_->lanes()];
      if (said.kind == Kind::kNext) {
        if (lane.out && lane.packet == said.packet) {
          said.kind = Kind::kResult;
          said.slots = pool_of(said.packet);
          said.prove(config_.secret);
          out(reinterpret_cast<const uint8_t*>(&said), sizeof said);
          lane.again = true;
        } else if (lane.out && now - lane.sent > least_ / 2) {
          send_again(lane, now, out); // else it may be on its way
        }
      } else {
        missing_ = said.missing;
        left_ = said.left;
        if (lane.out && lane.packet == said.packet) {
          // It is waited for another worker's. So this is not sent again as
          // overtaken, but when the time is up: the sum may get lost.
          lane.again = true; // or the network has doubled it
          lane.sent = now;
          lane.due = now + lane.patience;
        }
      }
      return;
    }
  }
  const Header header = size >= kHeaderBytes ? Header::of(bytes) : Header{};
  // A seal proves the whole number of the operation: this one's, or what comes
  // late.
  const uint64_t operation = operation_ +
      static_cast<uint64_t>(static_cast<int64_t>(
          static_cast<int8_t>(static_cast<uint8_t>(header.job - operation_))));
  if (size != packet_ + (config_.with_seal ? kSealBytes : 0) ||
      header.type_and_size != Header::type_and_size_of(config_.numel) ||
      (config_.with_seal &&
       !sealed(key_, bytes, packet_, operation, kFromAggregator))) {
    ++stats_.wrong;
    return;
  }
  heard_ = now;
  if (done() || operation != operation_) {
    ++stats_.repeated;
    return;
  }
  if (header.packet >= payload_->packets() ||
      header.pool != pool_of(header.packet)) {
    ++stats_.wrong;
    return;
  }
  Lane& lane = lanes_[header.packet % payload_->lanes()];
  if (!lane.out || lane.packet != header.packet) {
    // One that was not sent yet has no result.
    ++(header.packet > lane.packet ? stats_.wrong : stats_.repeated);
    return;
  }
  const auto* exponents = reinterpret_cast<const int8_t*>(bytes + kHeaderBytes);
  for (size_t i = 0; i < config_.numel; ++i) {
    elements_[i] = static_cast<int32_t>(
        big_endian(bytes + kHeaderBytes + kExponentBytes + 4 * i));
  }
  payload_->take(
      header.packet,
      elements_.data(),
      Exponents{exponents[0], exponents[1]}.exponent());
  ++stats_.packets_received;
  lane.out = false;
  --unfinished_;
  missing_ = 0;
  const bool stalled = now - progress_ > 4 * patience_;
  measure(lane, now);
  if (stalled) {
    // Somebody was late, and here is the result: what was lost meanwhile is
    // wanted soon.
    for (Lane& one : lanes_) {
      one.patience = std::min(one.patience, patience_);
      one.due = std::min(one.due, now + patience_);
    }
  }
  progress_ = now;
  const uint32_t next = header.packet + payload_->lanes();
  if (next < payload_->packets()) {
    send_next(lane, next, now, out);
  }
  send_overtaken(now, out);
}

// It knows that a packet is missing by those that follow, and that there is one
// by what other workers send.
bool Stream::asked_for(uint32_t packet) const {
  return config_.with_seal && config_.workers > 1 &&
      packet >= payload_->lanes() &&
      packet < payload_->packets() - payload_->lanes();
}

// Any other packet is taken for lost when one that was sent a while later has
// its result (as RFC 8985 does for TCP). That needs no guess of how long it
// takes.
void Stream::send_overtaken(Clock::time_point now, const Out& out) {
  while (!sent_.empty()) {
    const auto [when, index] = sent_.front();
    Lane& lane = lanes_[index];
    if (lane.out && lane.sent == when && !asked_for(lane.packet)) {
      if (when + mean_ / 4 >= newest_) {
        return;
      }
      send_again(lane, now, out);
    }
    sent_.pop_front();
  }
}

void Stream::send_again(Lane& lane, Clock::time_point now, const Out& out) {
  lane.again = true;
  lane.sent = now;
  lane.due = now + lane.patience;
  sent_.emplace_back(now, static_cast<uint32_t>(&lane - lanes_.data()));
  out(lane.bytes.data(), lane.bytes.size());
  ++stats_.packets_sent;
  ++stats_.retransmissions;
  stats_.bytes_sent += lane.bytes.size();
}

// As TCP does (RFC 6298), but bounded by the mean: what waits for another
// worker's packet takes long, too.
void Stream::measure(const Lane& lane, Clock::time_point now) {
  const auto trip = std::chrono::ceil<Micros>(now - lane.sent);
  if (lane.again) { // the result may be that of an earlier sending
    if (now - measured_ > 4 * lane.patience) {
      // Nothing is measured, as it takes longer than that.
      patience_ = std::max(patience_, lane.patience);
    }
    return;
  }
  measured_ = now;
  newest_ = std::max(newest_, lane.sent);
  least_ = std::min(trip, least_ + least_ / 64 + Micros(1));
  if (mean_ == Micros(0)) {
    least_ = mean_ = trip;
    deviation_ = trip / 2;
  } else {
    deviation_ =
        (3 * deviation_ + Micros(std::abs((mean_ - trip).count()))) / 4;
    mean_ = (7 * mean_ + trip) / 8;
  }
  patience_ = std::clamp(
      mean_ + std::clamp(4 * deviation_, mean_ / 2, 3 * mean_),
      kLeastPatience,
      kMostPatience);
}

void Stream::tick(Clock::time_point now, const Out& out) {
  if (done()) {
    return;
  }
  for (Lane& lane : lanes_) {
    if (!lane.out || lane.due > now) {
      continue;
    }
    lane.patience = std::min(2 * lane.patience, kMostPatience);
    send_again(lane, now, out);
  }
}

Clock::time_point Stream::next_due() const {
  Clock::time_point due = Clock::time_point::max();
  for (const Lane& lane : lanes_) {
    if (!done() && lane.out) {
      due = std::min(due, lane.due);
    }
  }
  return due;
}

} // namespace fusedpg::aggregate::udp
