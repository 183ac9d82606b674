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

// The packet 2 * slots later uses the same place of a slot again. This is safe
// only if packet p + slots goes out after the result of packet p. So the window
// divides the slots, or no two packets of the operation are as far apart.

Payload::Payload(size_t count, size_t numel)
    : count_(count),
      numel_(numel),
      blocks_(blocks_of(count, numel)),
      packets_(blocks_) {}

size_t Payload::size(uint32_t block) const {
  return std::min(numel_, count_ - block * numel_);
}

Integers::Integers(int32_t* data, size_t count, size_t numel, uint32_t slots)
    : Payload(count, numel),
      data_(data) {
  window_ = std::min(blocks_, slots);
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
    : Payload(count, numel),
      data_(data),
      bits_(kernels::block_float_bits(workers)),
      kernels_(kernels) {
  window_ = std::bit_floor(std::min(blocks_, slots));
  packets_ += window_;
  exponents_.assign(window_, kernels::kZeroBlock);
}

void Floats::fill(uint32_t packet, int32_t* elements, int32_t& exponent) {
  size_t n = 0;
  if (packet >= window_) {
    const uint32_t block = packet - window_;
    n = size(block);
    kernels_.block_float.quantise(
        data_ + block * numel_,
        n,
        numel_,
        &exponents_[block % window_],
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
  int32_t& known = exponents_[packet % window_];
  if (packet >= window_) {
    const uint32_t block = packet - window_;
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
      format_{
          session_key(config.secret, config.session),
          config.numel,
          config.with_seal},
      in_flight_(config.slots),
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
  for (uint32_t packet = 0; packet < payload.window(); ++packet) {
    send_next(in_flight_[packet], packet, now, out);
  }
}

uint16_t Stream::pool_of(uint32_t packet) const {
  const uint64_t place = (position_ + packet) % (uint64_t{2} * config_.slots);
  return static_cast<uint16_t>(
      place < config_.slots ? place : (place - config_.slots) | kSecondSet);
}

void Stream::send_next(
    InFlight& entry,
    uint32_t packet,
    Clock::time_point now,
    const Out& out) {
  entry.packet = packet;
  entry.out = true;
  entry.resent = false;
  entry.sent = now;
  sent_.emplace_back(now, static_cast<uint32_t>(&entry - in_flight_.data()));
  entry.patience = asked_for(packet) ? 2 * patience_ : patience_;
  entry.due = now + entry.patience;
  int32_t exponent = 0;
  payload_->fill(packet, elements_.data(), exponent);
  format_.write(
      {operation_,
       packet,
       pool_of(packet),
       config_.rank,
       Exponents::of(exponent)},
      reinterpret_cast<const uint32_t*>(elements_.data()),
      entry.bytes);
  out(entry.bytes.data(), entry.bytes.size());
  ++stats_.packets_sent;
  stats_.bytes_sent += entry.bytes.size();
}

void Stream::take(
    uint8_t* bytes,
    size_t size,
    Clock::time_point now,
    const Out& out) {
  if (const auto said = Control::of(bytes, size, config_.secret); said &&
      (said->kind == Kind::kWaiting || said->kind == Kind::kNext) &&
      said->session == config_.session) {
    heard_ = now;
    if (said->operation == operation_ && !done()) {
      hear(*said, now, out);
    }
    return;
  }
  // A seal proves the whole number of the operation: this one's, or what comes
  // late.
  const auto result = format_.read(bytes, size, operation_, kFromAggregator);
  if (!result) {
    ++stats_.wrong;
    return;
  }
  heard_ = now;
  if (done() || result->operation != operation_) {
    ++stats_.repeated;
    return;
  }
  if (result->number >= payload_->packets() ||
      result->pool != pool_of(result->number)) {
    ++stats_.wrong;
    return;
  }
  InFlight& entry = in_flight_[result->number % payload_->window()];
  if (!entry.out || entry.packet != result->number) {
    // One that was not sent yet has no result.
    ++(result->number > entry.packet ? stats_.wrong : stats_.repeated);
    return;
  }
  for (size_t i = 0; i < config_.numel; ++i) {
    elements_[i] = static_cast<int32_t>(PacketFormat::element(bytes, i));
  }
  payload_->take(
      result->number, elements_.data(), result->exponents.exponent());
  ++stats_.packets_received;
  entry.out = false;
  --unfinished_;
  missing_ = 0;
  const bool stalled = now - progress_ > 4 * patience_;
  measure(entry, now);
  if (stalled) {
    // Somebody was late, and here is the result: what was lost meanwhile is
    // wanted soon.
    for (InFlight& one : in_flight_) {
      one.patience = std::min(one.patience, patience_);
      one.due = std::min(one.due, now + patience_);
    }
  }
  progress_ = now;
  const uint32_t next = result->number + payload_->window();
  if (next < payload_->packets()) {
    send_next(entry, next, now, out);
  }
  send_overtaken(now, out);
}

// The aggregator answers a packet of this operation.
void Stream::hear(Control said, Clock::time_point now, const Out& out) {
  InFlight& entry = in_flight_[said.packet % payload_->window()];
  const bool same = entry.out && entry.packet == said.packet;
  if (said.kind == Kind::kNext) {
    if (same) {
      said.kind = Kind::kResult;
      said.slots = pool_of(said.packet);
      said.prove(config_.secret);
      out(said.data(), sizeof said);
      entry.resent = true;
    } else if (entry.out && now - entry.sent > least_ / 2) {
      send_again(entry, now, out); // else it may be on its way
    }
    return;
  }
  missing_ = said.missing;
  left_ = said.left;
  if (same) {
    // The aggregator waits for another worker's packet. So this one is not sent
    // again as overtaken, but when its time is up: the sum may get lost.
    entry.resent = true; // or the network has doubled it
    entry.sent = now;
    entry.due = now + entry.patience;
  }
}

// It knows that a packet is missing by those that follow, and that there is one
// by what other workers send.
bool Stream::asked_for(uint32_t packet) const {
  return config_.with_seal && config_.workers > 1 &&
      packet >= payload_->window() &&
      packet < payload_->packets() - payload_->window();
}

// Any other packet is taken for lost when one that was sent a while later has
// its result (as RFC 8985 does for TCP). So nobody has to guess how long a
// packet takes.
void Stream::send_overtaken(Clock::time_point now, const Out& out) {
  while (!sent_.empty()) {
    const auto [when, index] = sent_.front();
    InFlight& entry = in_flight_[index];
    if (entry.out && entry.sent == when && !asked_for(entry.packet)) {
      if (when + mean_ / 4 >= newest_) {
        return;
      }
      send_again(entry, now, out);
    }
    sent_.pop_front();
  }
}

void Stream::send_again(
    InFlight& entry,
    Clock::time_point now,
    const Out& out) {
  entry.resent = true;
  entry.sent = now;
  entry.due = now + entry.patience;
  sent_.emplace_back(now, static_cast<uint32_t>(&entry - in_flight_.data()));
  out(entry.bytes.data(), entry.bytes.size());
  ++stats_.packets_sent;
  ++stats_.retransmissions;
  stats_.bytes_sent += entry.bytes.size();
}

// As TCP does (RFC 6298), but bounded by the mean: what waits for another
// worker's packet takes long, too.
void Stream::measure(const InFlight& entry, Clock::time_point now) {
  const auto trip = std::chrono::ceil<Micros>(now - entry.sent);
  if (entry.resent) { // the result may be that of an earlier sending
    if (now - measured_ > 4 * entry.patience) {
      // Nothing is measured, as it takes longer than that.
      patience_ = std::max(patience_, entry.patience);
    }
    return;
  }
  measured_ = now;
  newest_ = std::max(newest_, entry.sent);
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
  for (InFlight& entry : in_flight_) {
    if (!entry.out || entry.due > now) {
      continue;
    }
    entry.patience = std::min(2 * entry.patience, kMostPatience);
    send_again(entry, now, out);
  }
}

Clock::time_point Stream::next_due() const {
  Clock::time_point due = Clock::time_point::max();
  for (const InFlight& entry : in_flight_) {
    if (!done() && entry.out) {
      due = std::min(due, entry.due);
    }
  }
  return due;
}

} // namespace fusedpg::aggregate::udp
