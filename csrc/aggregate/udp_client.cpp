#include "aggregate/udp_client.hpp"

#include <sys/socket.h>

#include <algorithm>

#include "aggregate/protocol.hpp"
#include "base/error.hpp"

namespace fusedpg::aggregate::udp {
namespace {

using namespace std::chrono_literals;

constexpr auto kAskAgain = 50ms;
// Silent for so long, it is asked whether it still knows this session; and
// where nobody listens, it has ended.
constexpr auto kSilent = 1000ms;

} // namespace

Client::Client(
    const std::string& place,
    const Stream::Config& config,
    const Deadline& deadline)
    : place_(place),
      config_(config),
      socket_(Datagrams::to(front_door(place, config.secret).socket)) {
  if (config.workers > kMostWorkers) {
    fail(
        ErrorKind::kInvalid,
        "fused: aggregators by UDP add up for at most {} workers, not {}",
        kMostWorkers,
        config.workers);
  }
  if (config.numel != kSmallNumel && config.numel != kLargeNumel) {
    fail(
        ErrorKind::kInvalid,
        "fused: packets of aggregators by UDP have {} or {} elements, not {}",
        kSmallNumel,
        kLargeNumel,
        config.numel);
  }
  join(deadline);
  stream_ = std::make_unique<Stream>(config_);
}

Client::~Client() {
  end();
}

void Client::end() noexcept {
  if (ended_.exchange(true)) {
    return;
  }
  const Control leave = asked(Kind::kLeave);
  for (int i = 0; i < 3; ++i) { // one may be lost
    ::send(socket_.fd(), &leave, sizeof leave, MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  signal_.set();
}

Control Client::asked(Kind kind, const Key128& cookie) const {
  Control control;
  control.kind = kind;
  control.rank = config_.rank;
  control.workers = config_.workers;
  control.with_seal = config_.with_seal ? 1 : 0;
  control.numel = static_cast<uint16_t>(config_.numel);
  control.slots =
      static_cast<uint16_t>(std::clamp<uint32_t>(config_.slots, 1, kMostSlots));
  control.session = config_.session;
  control.nonce = nonce_;
  control.cookie = cookie;
  control.prove(config_.secret);
  return control;
}

std::optional<Control> Client::answered(const uint8_t* bytes, size_t size)
    const {
  auto answer = Control::of(bytes, size, config_.secret);
  const bool mine = answer && answer->nonce == nonce_ &&
      answer->session == config_.session && answer->rank == config_.rank;
  return mine ? answer : std::nullopt;
}

void Client::ask_to_join(const Key128& cookie) {
  const Control question = asked(Kind::kJoin, cookie);
  socket_.send({}, question.data(), sizeof question);
}

void Client::join(const Deadline& deadline) {
  Key128 cookie{};
  bool welcome = false;
  while (!welcome) {
    ask_to_join(cookie);
    socket_.flush();
    const auto again = Clock::now() + kAskAgain;
    bool ask = false;
    while (!welcome && !ask && Clock::now() < again) {
      socket_.wait(signal_, again - Clock::now());
      socket_.receive([&](const Address&, uint8_t* bytes, size_t size) {
        const auto answer = answered(bytes, size);
        if (welcome || !answer) {
          return;
        }
        if (answer->kind == Kind::kChallenge) {
          ask = true;
          cookie = answer->cookie;
        } else if (answer->kind == Kind::kWelcome) {
          welcome = true;
          config_.slots = answer->slots;
        } else if (answer->kind == Kind::kRefused) {
          fail(
              ErrorKind::kSystem,
              "fused: aggregator {} (UDP) takes rank {} not in: {}",
              place_,
              config_.rank,
              refusal_text(answer->refusal));
        }
      });
    }
    if (!welcome && deadline.expired()) {
      fail(
          ErrorKind::kTimeout,
          "fused: aggregator {} (UDP) does not answer within {} ms{}",
          place_,
          deadline.timeout().count(),
          socket_.refusals() != 0
              ? ": nobody listens there"
              : ": it does not run, is out of reach, or has another key");
    }
  }
}

void Client::all_reduce(int32_t* data, size_t count, const Deadline& deadline) {
  Integers payload(data, count, config_.numel, config_.slots);
  run(payload, deadline);
}

void Client::all_reduce(
    float* data,
    size_t count,
    const kernels::Table& kernels,
    const Deadline& deadline) {
  Floats payload(
      data, count, config_.numel, config_.slots, config_.workers, kernels);
  run(payload, deadline);
}

void Client::run(Payload& payload, const Deadline& deadline) {
  const Stream::Out out = [this](const uint8_t* bytes, size_t size) {
    socket_.send({}, bytes, size);
  };
  try {
    asked_ = Clock::now();
    stream_->begin(payload, asked_, out);
    socket_.flush();
    while (!stream_->done()) {
      // It sleeps until something is due, but looks now and then.
      const auto until =
          std::min(stream_->next_due(), Clock::now() + kAskAgain);
      socket_.wait(signal_, until - Clock::now());
      socket_.receive([&](const Address&, uint8_t* bytes, size_t size) {
        if (size == sizeof(Control) &&
            bytes[0] == static_cast<uint8_t>(Kind::kWelcome)) {
          return; // it still knows this session
        }
        if (const auto answer = answered(bytes, size);
            answer && answer->kind == Kind::kChallenge) {
          fail(
              ErrorKind::kPeerFailed,
              "fused: aggregator {} (UDP) does not know this session any "
              "more: it was started again",
              place_);
        }
        stream_->take(bytes, size, Clock::now(), out);
      });
      const auto now = Clock::now();
      stream_->tick(now, out);
      look(now, deadline);
      socket_.flush();
    }
  } catch (const Error&) {
    end();
    throw;
  }
}

void Client::look(Clock::time_point now, const Deadline& deadline) {
  if (ended_) {
    fail(
        ErrorKind::kAborted,
        "fused: this rank has ended its session at aggregator {} (UDP)",
        place_);
  }
  const uint32_t gone = stream_->missing() & stream_->left();
  if (gone != 0) {
    fail(
        ErrorKind::kPeerFailed,
        "fused: {} left the session at aggregator {} (UDP)",
        ranks(gone),
        place_);
  }
  const auto silent = now - stream_->heard();
  const auto ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(silent).count();
  if (silent < kSilent) {
    refusals_ = socket_.refusals();
  } else if (socket_.refusals() > refusals_ + 2) {
    fail(
        ErrorKind::kPeerFailed,
        "fused: aggregator {} (UDP) has ended: nobody listens there, and it "
        "has not answered for {} ms",
        place_,
        ms);
  } else if (config_.with_seal && now - asked_ > kSilent) {
    asked_ = now;
    ask_to_join();
  }
  if (!deadline.expired()) {
    return;
  }
  // A rank that it named before it fell silent may have come since.
  if (stream_->missing() != 0 && silent < kSilent) {
    fail(
        ErrorKind::kTimeout,
        "fused: no sum from aggregator {} (UDP) within {} ms: it waits for {}",
        place_,
        deadline.timeout().count(),
        ranks(stream_->missing()));
  }
  fail(
      ErrorKind::kTimeout,
      "fused: no sum from aggregator {} (UDP) within {} ms, and no answer for "
      "{} ms: it has ended, is stopped or out of reach{}",
      place_,
      deadline.timeout().count(),
      ms,
      config_.with_seal ? "" : ", or waits for another rank");
}

std::string Client::ranks(uint32_t bits) const {
  std::string text;
  int number = 0;
  for (uint32_t r = 0; r < kMostWorkers; ++r) {
    if ((bits >> r & 1) != 0) {
      text += formatted("{}{}", text.empty() ? "" : ", ", r);
      ++number;
    }
  }
  return (number == 1 ? "rank " : "ranks ") + text;
}

} // namespace fusedpg::aggregate::udp
