// SwitchML's protocol over a network in memory that loses, doubles and delays
// datagrams by a seed, in a time of its own; and over sockets.
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "aggregate/udp_client.hpp"
#include "aggregate/udp_server.hpp"
#include "base/error.hpp"
#include "check.hpp"

using namespace fusedpg;
using namespace fusedpg::aggregate::udp;
using namespace fusedpg::test;
using namespace std::chrono_literals;

namespace {

const Key128 kKey{1, 2, 3};
using Bytes = std::vector<uint8_t>;
using Micros = std::chrono::microseconds;

struct Faults {
  double lost = 0;
  double doubled = 0;
  double late = 0; // by up to kLate
};
constexpr Micros kLate{5'000};
constexpr Faults kBad{.lost = 0.05, .doubled = 0.05, .late = 0.05};

Address address_of(int worker) {
  Address address;
  address.length = 16;
  address.bytes[0] = static_cast<uint8_t>(worker + 1);
  return address;
}

// Workers and an aggregator whose links take `kWire` and then carry a byte in
// `kByte` ns each way.
class World {
 public:
  static constexpr Micros kWire{50};
  static constexpr int64_t kByte = 8; // ns: 1 Gbit/s

  World(
      int workers,
      const Faults& faults,
      size_t numel = kSmallNumel,
      bool with_seal = true,
      uint32_t slots = 32,
      uint64_t seed = 20)
      : faults_(faults),
        draw_(seed),
        sums_(kKey, [](uint32_t) { return kMostSlots; }),
        links_(2 * static_cast<size_t>(workers)) {
    for (int r = 0; r < workers; ++r) {
      Stream::Config config;
      config.secret = kKey;
      config.session = Key128{7};
      config.rank = static_cast<uint8_t>(r);
      config.workers = static_cast<uint8_t>(workers);
      config.numel = numel;
      config.with_seal = with_seal;
      config.slots = slots;
      join(config);
      streams_.push_back(std::make_unique<Stream>(config));
      begins_.push_back(now_);
    }
  }

  // Until all are done, or for so long.
  bool run(std::vector<std::unique_ptr<Payload>>& payloads, Micros most) {
    const auto end = now_ + most;
    const auto workers = static_cast<int>(streams_.size());
    for (int r = 0; r < workers; ++r) {
      now_ = std::max(now_, begins_[r]);
      streams_[r]->begin(*payloads[r], now_, out(r));
    }
    while (now_ < end) {
      bool done = true;
      auto next = end;
      for (const auto& stream : streams_) {
        done = done && stream->done();
        next = std::min(next, stream->next_due());
      }
      if (done) {
        return true;
      }
      if (!flying_.empty()) {
        next = std::min(next, flying_.begin()->first);
      }
      now_ = std::max(now_, next);
      while (!flying_.empty() && flying_.begin()->first <= now_) {
        Datagram one = std::move(flying_.begin()->second);
        flying_.erase(flying_.begin());
        deliver(one);
      }
      for (int r = 0; r < workers; ++r) {
        streams_[r]->tick(now_, out(r));
      }
    }
    return false;
  }

  // Something that nobody has sent.
  void to_aggregator(int as, Bytes bytes) {
    deliver({as, true, std::move(bytes)});
  }
  void to_worker(int worker, Bytes bytes) {
    deliver({worker, false, std::move(bytes)});
  }
  // What workers send (true) or are sent goes through this first; false: it is
  // lost.
  std::function<bool(int worker, bool up, Bytes& bytes)> watch;

  Sums& sums() {
    return sums_;
  }
  Stream& stream(int worker) {
    return *streams_[worker];
  }
  Clock::time_point now() const {
    return now_;
  }
  void forget_faults() {
    faults_ = {};
  }
  uint64_t retransmissions() const {
    uint64_t all = 0;
    for (const auto& one : streams_) {
      all += one->stats().retransmissions;
    }
    return all;
  }

 private:
  struct Datagram {
    int worker;
    bool up; // to the aggregator
    Bytes bytes;
  };

  Stream::Out out(int worker) {
    return [this, worker](const uint8_t* bytes, size_t size) {
      post({worker, true, Bytes(bytes, bytes + size)});
    };
  }

  void post(Datagram one) {
    if (watch && !watch(one.worker, one.up, one.bytes)) {
      return;
    }
    // What is lost has used the link, too.
    auto& free = links_[2 * one.worker + (one.up ? 1 : 0)];
    const std::chrono::nanoseconds takes{
        kByte * static_cast<int64_t>(one.bytes.size() + 46)};
    free = std::max(free, now_) + takes;
    std::uniform_real_distribution<double> any(0, 1);
    if (any(draw_) < faults_.lost) {
      return;
    }
    const int copies = any(draw_) < faults_.doubled ? 2 : 1;
    for (int i = 0; i < copies; ++i) {
      auto at = free + kWire;
      if (any(draw_) < faults_.late) {
        at += Micros(draw_() % static_cast<uint64_t>(kLate.count()));
      }
      flying_.emplace(at, one);
    }
  }

  void deliver(const Datagram& one) {
    Bytes bytes = one.bytes;
    bytes.resize(one.bytes.size() + kSealRoom);
    if (one.up) {
      sums_.take(
          address_of(one.worker),
          bytes.data(),
          one.bytes.size(),
          now_,
          [this](const Address& to, const uint8_t* data, size_t size) {
            post({to.bytes[0] - 1, false, Bytes(data, data + size)});
          });
    } else if (static_cast<size_t>(one.worker) < streams_.size()) {
      streams_[one.worker]->take(
          bytes.data(), one.bytes.size(), now_, out(one.worker));
    }
  }

  void join(const Stream::Config& config) {
    Control said;
    said.rank = config.rank;
    said.workers = config.workers;
    said.with_seal = config.with_seal ? 1 : 0;
    said.numel = static_cast<uint16_t>(config.numel);
    said.slots = static_cast<uint16_t>(config.slots);
    said.session = config.session;
    for (const Kind wanted : {Kind::kChallenge, Kind::kWelcome}) {
      said.kind = Kind::kJoin;
      said.prove(kKey);
      Bytes bytes(sizeof said + kSealRoom);
      std::memcpy(bytes.data(), &said, sizeof said);
      sums_.take(
          address_of(config.rank),
          bytes.data(),
          sizeof said,
          now_,
          [&](const Address&, const uint8_t* data, size_t size) {
            CHECK_EQ(size, sizeof said);
            std::memcpy(&said, data, sizeof said);
          });
      CHECK(said.kind == wanted);
    }
  }

  Faults faults_;
  std::mt19937_64 draw_;
  Clock::time_point now_{Clock::time_point(std::chrono::hours(1))};
  Sums sums_;
  std::vector<Clock::time_point> links_; // when they are free
  std::multimap<Clock::time_point, Datagram> flying_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<Clock::time_point> begins_;
};

const kernels::Table& table() {
  return *kernels::table();
}

// Operations of random integers: right sums, bit for bit.
template <class A, class B>
bool same_bits(const std::vector<A>& a, const std::vector<B>& b) {
  static_assert(sizeof(A) == sizeof(B));
  return a.size() == b.size() &&
      (a.empty() || std::memcmp(a.data(), b.data(), sizeof(A) * a.size()) == 0);
}

void add_integers(
    World& world,
    int workers,
    size_t count,
    size_t numel,
    uint32_t slots,
    Micros most = 60s) {
  std::mt19937 draw(static_cast<unsigned>(count));
  std::vector<std::vector<int32_t>> data(workers);
  std::vector<uint32_t> want(count);
  std::vector<std::unique_ptr<Payload>> payloads;
  for (auto& mine : data) {
    for (size_t i = 0; i < count; ++i) {
      mine.push_back(static_cast<int32_t>(draw()));
      want[i] += static_cast<uint32_t>(mine[i]);
    }
    payloads.push_back(
        std::make_unique<Integers>(mine.data(), count, numel, slots));
  }
  CHECK(world.run(payloads, most));
  for (const auto& mine : data) {
    CHECK(same_bits(mine, want));
  }
}

void add_floats(
    World& world,
    int workers,
    size_t count,
    size_t numel,
    uint32_t slots) {
  std::mt19937 draw(static_cast<unsigned>(count));
  std::vector<std::vector<float>> data(workers);
  for (auto& mine : data) {
    for (size_t i = 0; i < count; ++i) {
      const int scale = static_cast<int>(draw() % 200) - 120;
      mine.push_back(
          std::ldexp(static_cast<float>(draw() % 2001) - 1000, scale));
    }
  }
  if (count > 3 * numel) { // blocks of zeros, denormals, and with a NaN
    for (auto& mine : data) {
      std::fill_n(mine.begin(), numel, 0.0F);
      std::fill_n(mine.begin() + numel, numel, 1e-44F);
    }
    data[0][2 * numel + 1] = std::nanf("");
    data[0][3 * numel] = 3e38F;
  }
  // The same by kernels alone.
  const size_t blocks = (count + numel - 1) / numel;
  const int bits = kernels::block_float_bits(static_cast<uint32_t>(workers));
  std::vector<int32_t> most(blocks, kernels::kZeroBlock), sums(count);
  for (const auto& mine : data) {
    std::vector<int32_t> exponents(blocks);
    table().block_float.exponents(mine.data(), count, numel, exponents.data());
    for (size_t b = 0; b < blocks; ++b) {
      most[b] = std::max(most[b], exponents[b]);
    }
  }
  for (const auto& mine : data) {
    std::vector<int32_t> codes(count);
    table().block_float.quantise(
        mine.data(), count, numel, most.data(), bits, codes.data());
    for (size_t i = 0; i < count; ++i) {
      sums[i] += codes[i];
    }
  }
  std::vector<float> want(count);
  table().block_float.dequantise(
      want.data(), sums.data(), count, numel, most.data(), bits, 1);
  std::vector<std::unique_ptr<Payload>> payloads;
  for (auto& mine : data) {
    payloads.push_back(
        std::make_unique<Floats>(
            mine.data(),
            count,
            numel,
            slots,
            static_cast<uint32_t>(workers),
            table()));
  }
  CHECK(world.run(payloads, 60s));
  for (const auto& mine : data) {
    CHECK(same_bits(mine, want));
  }
}

} // namespace

TEST(udp_packets_are_those_of_switchml) {
  Header header;
  header.type_and_size = Header::type_and_size_of(kLargeNumel);
  header.job = 0x5a;
  header.packet = 0x01020304;
  header.pool = kSecondSet | 0x123;
  uint8_t bytes[8];
  header.put(bytes);
  const uint8_t want[] = {0x13, 0x5a, 4, 3, 2, 1, 0x81, 0x23};
  CHECK(std::memcmp(bytes, want, sizeof want) == 0);
  CHECK_EQ(Header::of(bytes).packet, header.packet);
  CHECK_EQ(Header::of(bytes).pool, header.pool);
  CHECK_EQ(Header::type_and_size_of(kSmallNumel), 0x11);
  CHECK_EQ(packet_bytes(kLargeNumel), 8U + 2U + 1024U);
}

// The original's overflow: fault 6.
TEST(udp_exponents_keep_their_order) {
  std::vector<int32_t> all{kernels::kZeroBlock};
  for (int32_t e = -148; e <= 128; ++e) {
    all.push_back(e);
  }
  all.push_back(kernels::kNotFiniteBlock);
  for (const int32_t a : all) {
    CHECK_EQ(Exponents::of(a).exponent(), a);
    for (const int32_t b : all) {
      const Exponents x = Exponents::of(a), y = Exponents::of(b);
      const Exponents most{
          std::max(x.first, y.first), std::max(x.second, y.second)};
      CHECK_EQ(most.exponent(), std::max(a, b));
    }
  }
}

TEST(udp_sums_are_exact) {
  for (const int workers : {1, 2, 5}) {
    for (const bool with_seal : {true, false}) {
      for (const Faults& faults : {Faults{}, kBad}) {
        for (const size_t numel : {kSmallNumel, kLargeNumel}) {
          World world(workers, faults, numel, with_seal);
          for (const size_t count : {1U, 64U, 0U, 1000U, 40'003U, 0U, 0U, 5U}) {
            add_integers(world, workers, count, numel, 32);
            add_floats(world, workers, count, numel, 32);
          }
          CHECK_EQ(world.retransmissions() > 0, faults.lost > 0);
          CHECK_EQ(world.sums().stats().wrong, 0U);
        }
      }
    }
  }
}

// More operations than 8 bits count, of few packets, so that places are used
// again after many: fault 3.
TEST(udp_sums_are_exact_after_many_operations) {
  World world(3, kBad, kSmallNumel, true, 4);
  for (size_t n = 0; n < 700; ++n) {
    add_integers(world, 3, 1 + n * 37 % 400, kSmallNumel, 4);
    add_floats(world, 3, 1 + n * 53 % 500, kSmallNumel, 4);
  }
  CHECK(world.sums().stats().stale > 0);
  CHECK_EQ(world.sums().stats().wrong, 0U);
}

// Fault 1: the first packets are lost.
TEST(udp_first_packets_are_sent_again) {
  World world(2, {});
  std::map<uint32_t, int> seen;
  world.watch = [&](int worker, bool up, const Bytes& bytes) {
    return !up || worker != 0 || ++seen[Header::of(bytes.data()).packet] > 1;
  };
  add_floats(world, 2, 10'000, kSmallNumel, 32);
  CHECK(world.retransmissions() >= 32);
  for (const auto& [packet, times] : seen) {
    CHECK(times >= 2);
  }
}

// All results are lost once, for one worker.
TEST(udp_results_are_kept) {
  World world(3, {});
  std::map<std::pair<int, Bytes>, int> seen;
  world.watch = [&](int worker, bool up, const Bytes& bytes) {
    return up || worker != 1 || ++seen[{worker, bytes}] > 1;
  };
  add_floats(world, 3, 20'000, kSmallNumel, 32);
  add_integers(world, 3, 20'000, kSmallNumel, 32);
  CHECK(world.sums().stats().resent >= 20'000 / 64 * 2);
}

// Everything that was ever sent comes again, at any time.
TEST(udp_old_packets_change_nothing) {
  World world(2, {}, kSmallNumel, true, 4);
  std::vector<std::pair<int, Bytes>> up, down;
  std::mt19937 draw(3);
  int depth = 0;
  world.watch = [&](int worker, bool to, const Bytes& bytes) {
    auto& all = to ? up : down;
    all.emplace_back(worker, bytes);
    for (int i = 0; i < 3 && depth == 0; ++i) {
      ++depth;
      const auto [whose, old] = all[draw() % all.size()];
      if (to) {
        world.to_aggregator(whose, old);
      } else {
        world.to_worker(whose, old);
      }
      --depth;
    }
    return true;
  };
  for (size_t n = 0; n < 40; ++n) {
    add_floats(world, 2, 1 + n * 97 % 1500, kSmallNumel, 4);
  }
  CHECK(world.sums().stats().stale > 100);
  CHECK(world.stream(0).stats().repeated > 100);
}

// Fault 2, and whatever else is no packet of this session.
TEST(udp_strangers_change_nothing) {
  World world(2, {});
  std::mt19937 draw(5);
  int depth = 0;
  world.watch = [&](int worker, bool to, const Bytes& bytes) {
    if (depth != 0) {
      return true;
    }
    ++depth;
    std::vector<Bytes> wrong(8, bytes);
    wrong[0][2] ^= 1; // packets, slots, jobs and sets of others
    wrong[1][6] = 0xff;
    wrong[2][1] += 1;
    wrong[3][0] = 0x11 ^ 2;
    wrong[4].resize(draw() % bytes.size());
    wrong[5][10 + draw() % (bytes.size() - 10)] ^= 1; // and data
    wrong[6][8] = 127;
    for (uint8_t& byte : wrong[7]) {
      byte = static_cast<uint8_t>(draw());
    }
    for (Bytes& one : wrong) {
      if (to) {
        world.to_aggregator(worker, one);
        world.to_aggregator(40, one); // from elsewhere
      } else {
        world.to_worker(worker, one);
      }
    }
    if (to) {
      world.to_aggregator(1 - worker, bytes); // another worker's
    }
    --depth;
    return true;
  };
  for (int n = 0; n < 3; ++n) {
    add_floats(world, 2, 5'000, kSmallNumel, 32);
    add_integers(world, 2, 5'000, kSmallNumel, 32);
  }
  CHECK(world.sums().stats().wrong > 1000);
  CHECK(world.stream(1).stats().wrong > 1000);
  CHECK_EQ(world.sums().stats().sessions, 1U);
}

// Without a seal, too, no number leads out of the memory.
TEST(udp_numbers_out_of_range) {
  World world(2, {}, kSmallNumel, false);
  std::mt19937 draw(6);
  for (int n = 0; n < 20'000; ++n) {
    Bytes bytes(packet_bytes(kSmallNumel));
    for (uint8_t& byte : bytes) {
      byte = static_cast<uint8_t>(draw());
    }
    bytes[0] = 0x11;
    if (n % 2 == 0) {
      world.to_aggregator(0, bytes);
    }
    world.to_worker(0, bytes);
  }
  CHECK(world.sums().stats().wrong > 1000);
}

TEST(udp_goodput_with_losses) {
  constexpr uint32_t kWindow = 256;
  // One thread in a time of its own: sanitizers see all of it in one run.
  constexpr size_t kCount = 3'000'000;
  constexpr int kTimes = kSanitized ? 1 : 3;
  std::vector<std::pair<int, unsigned>> cases{{2, 20}};
  if (!kSanitized) {
    cases.insert(cases.end(), {{4, 20}, {4, 21}});
  }
  for (const auto& [workers, seed] : cases) {
    double took[2] = {};
    for (const bool bad : {false, true}) {
      World world(
          workers, bad ? kBad : Faults{}, kLargeNumel, true, kWindow, seed);
      const auto begin = world.now();
      for (int n = 0; n < kTimes; ++n) {
        add_integers(world, workers, kCount, kLargeNumel, kWindow);
      }
      took[bad ? 1 : 0] =
          std::chrono::duration<double>(world.now() - begin).count();
      std::cout << "  " << workers << " workers, seed " << seed << ", "
                << (bad ? "bad" : "good") << ": "
                << 32e-9 * kCount * kTimes / took[bad ? 1 : 0] << " Gbit/s, "
                << world.retransmissions() << " retransmissions\n";
    }
    CHECK(took[0] >= 0.7 * took[1]);
  }
}

namespace {

// Sums, and sessions of one worker whose datagrams a test gives them.
struct Door {
  Sums sums{kKey, [](uint32_t) { return 8; }, 2};
  Clock::time_point now = Clock::now();

  Control say(uint8_t session, Control said) {
    said.proof = {};
    said.prove(kKey);
    Bytes bytes(sizeof said + kSealRoom);
    std::memcpy(bytes.data(), &said, sizeof said);
    sums.take(
        address_of(session),
        bytes.data(),
        sizeof said,
        now,
        [&](const Address&, const uint8_t* data, size_t size) {
          CHECK_EQ(size, sizeof said);
          std::memcpy(&said, data, sizeof said);
        });
    return said;
  }
  // The answer to the second question, which has the cookie.
  Control join(uint8_t session, uint8_t workers = 1) {
    question = {};
    question.workers = workers;
    question.numel = kSmallNumel;
    question.slots = 8;
    question.session = Key128{session};
    question.cookie = say(session, question).cookie;
    return say(session, question);
  }
  void leave(uint8_t session) {
    Control said;
    said.kind = Kind::kLeave;
    said.session = Key128{session};
    say(session, said);
  }
  Control question; // the latest
};

} // namespace

TEST(udp_silent_sessions_make_room) {
  Door door;
  CHECK(door.join(1).refusal == Refusal::kNone);
  door.now += 5min;
  CHECK(door.join(2).refusal == Refusal::kNone);
  CHECK(door.join(3).refusal == Refusal::kFull);
  door.now += 6min;
  CHECK(door.join(3).refusal == Refusal::kNone);
  CHECK(door.join(4).refusal == Refusal::kFull);
  door.sums.drain();
  CHECK(door.join(4).refusal == Refusal::kDrains);
  door.sums.tick(door.now);
  CHECK_EQ(door.sums.stats().active, 2U);
  door.now += 6min;
  door.sums.tick(door.now);
  CHECK_EQ(door.sums.stats().active, 1U);
  CHECK_EQ(door.sums.stats().sessions, 3U);
}

// A join that comes once more, when its session is over, begins none: nobody
// would leave it.
TEST(udp_joins_that_come_late) {
  Door door;
  CHECK(door.join(1).kind == Kind::kWelcome);
  door.leave(1);
  CHECK_EQ(door.sums.stats().active, 0U);
  CHECK(door.say(1, door.question).refusal == Refusal::kOver);
  CHECK_EQ(door.sums.stats().active, 0U);
  CHECK_EQ(door.sums.stats().sessions, 1U);
  // One whose other worker's leaving was lost.
  CHECK(door.join(2, 2).kind == Kind::kWelcome);
  door.leave(2);
  door.sums.drain();
  door.now += 2s;
  door.sums.tick(door.now);
  CHECK_EQ(door.sums.stats().active, 1U);
  door.now += 1s;
  door.sums.tick(door.now);
  CHECK_EQ(door.sums.stats().active, 0U);
}

TEST(udp_nothing_comes_through) {
  World world(2, {.lost = 1});
  std::vector<int32_t> data(100, 1);
  std::vector<std::unique_ptr<Payload>> payloads;
  for (int r = 0; r < 2; ++r) {
    payloads.push_back(
        std::make_unique<Integers>(data.data(), 100, kSmallNumel, 32));
  }
  CHECK(!world.run(payloads, 10s));
  // Each waits longer than the last one, up to a bound.
  CHECK(world.retransmissions() > 2 * 2 * 15);
  CHECK(world.retransmissions() < 2 * 2 * 40);
}

TEST(udp_a_worker_is_missing) {
  World world(3, {});
  world.watch = [](int worker, bool up, const Bytes&) {
    return !up || worker != 2;
  };
  std::vector<int32_t> data(100, 1);
  std::vector<std::unique_ptr<Payload>> payloads;
  for (int r = 0; r < 3; ++r) {
    payloads.push_back(
        std::make_unique<Integers>(data.data(), 100, kSmallNumel, 32));
  }
  CHECK(!world.run(payloads, 3s));
  CHECK_EQ(world.stream(0).missing(), 4U);
  CHECK_EQ(world.stream(0).left(), 0U);
}

namespace {

std::string place_of(const Server& server) {
  const std::string text = server.address();
  const size_t space = text.find(' ');
  return text.substr(0, space) + ":" + text.substr(space + 1);
}

SocketAddress any() {
  return SocketAddress::of("127.0.0.1 0");
}

Stream::Config worker(int rank, int workers, uint8_t session = 1) {
  Stream::Config config;
  config.secret = kKey;
  config.session = Key128{session};
  config.rank = static_cast<uint8_t>(rank);
  config.workers = static_cast<uint8_t>(workers);
  return config;
}

std::string what(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  const bool found = text.find(part) != std::string::npos;
  if (!found) {
    std::cout << "  found: " << text << "\n";
  }
  return found;
}

} // namespace

TEST(udp_by_sockets) {
  Server server(any(), kKey);
  const auto body = [&](int rank) {
    Client client(place_of(server), worker(rank, 3), Deadline(20s));
    for (int round = 0; round < 5; ++round) {
      std::vector<int32_t> whole(100'003, rank + 1);
      client.all_reduce(whole.data(), whole.size(), Deadline(20s));
      std::vector<float> parts(100'003, 0.5F * static_cast<float>(rank + 1));
      client.all_reduce(parts.data(), parts.size(), table(), Deadline(20s));
      for (size_t i = 0; i < whole.size(); ++i) {
        if (!CHECK(whole[i] == 6 && parts[i] == 3.0F)) {
          return;
        }
      }
    }
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back(body, r);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  const Deadline deadline(10s);
  while (server.stats().active != 0 && !deadline.expired()) {
    std::this_thread::sleep_for(1ms);
  }
  CHECK_EQ(server.stats().active, 0U);
  CHECK_EQ(server.stats().wrong, 0U);
}

namespace {

// A way to an aggregator that loses, doubles and delays datagrams.
class BadWay {
 public:
  BadWay(const SocketAddress& to, const Faults& faults)
      : faults_(faults),
        to_(to),
        door_(open_socket()),
        thread_([this] { run(); }) {}
  ~BadWay() {
    ends_ = true;
    thread_.join();
  }
  std::string place() const {
    const std::string text = bound_address(door_).text();
    return "127.0.0.1:" + text.substr(text.find(' ') + 1);
  }

 private:
  struct One {
    Clock::time_point at;
    int from;
    SocketAddress to;
    Bytes bytes;
  };
  static Fd open_socket() {
    Fd fd = Fd::opened([] {
      return socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    });
    const int room = 8 << 20;
    setsockopt(fd.get(), SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof room);
    CHECK_EQ(bind(fd.get(), any().get(), any().length), 0);
    return fd;
  }
  void pass(int from, const SocketAddress& to, const Bytes& bytes) {
    std::uniform_real_distribution<double> any(0, 1);
    if (any(draw_) < faults_.lost) {
      return;
    }
    for (int n = any(draw_) < faults_.doubled ? 2 : 1; n > 0; --n) {
      if (any(draw_) < faults_.late) {
        const Micros late(draw_() % static_cast<uint64_t>(kLate.count()));
        late_.push_back({Clock::now() + late, from, to, bytes});
      } else {
        sendto(from, bytes.data(), bytes.size(), 0, to.get(), to.length);
      }
    }
  }
  void drain(
      int fd,
      const std::function<void(SocketAddress, const Bytes&)>& take) {
    Bytes bytes(2000);
    for (int n = 0; n < 64; ++n) {
      SocketAddress from;
      from.length = sizeof from.storage;
      const auto got = recvfrom(
          fd,
          bytes.data(),
          bytes.size(),
          0,
          reinterpret_cast<sockaddr*>(&from.storage),
          &from.length);
      if (got < 0) {
        return;
      }
      take(from, Bytes(bytes.begin(), bytes.begin() + got));
    }
  }
  void run() {
    while (!ends_) {
      std::vector<pollfd> all{{door_.get(), POLLIN, 0}};
      for (const auto& [worker, way] : ways_) {
        all.push_back({way.get(), POLLIN, 0});
      }
      poll(all.data(), all.size(), 1);
      drain(door_.get(), [&](SocketAddress from, const Bytes& bytes) {
        Fd& way = ways_[from.text()];
        if (!way) {
          way = open_socket();
          workers_[from.text()] = from;
        }
        pass(way.get(), to_, bytes);
      });
      for (const auto& [worker, way] : ways_) {
        drain(way.get(), [&](SocketAddress, const Bytes& bytes) {
          pass(door_.get(), workers_[worker], bytes);
        });
      }
      const auto now = Clock::now();
      std::erase_if(late_, [&](const One& one) {
        const bool due = one.at <= now;
        if (due) {
          sendto(
              one.from,
              one.bytes.data(),
              one.bytes.size(),
              0,
              one.to.get(),
              one.to.length);
        }
        return due;
      });
    }
  }

  const Faults faults_;
  const SocketAddress to_;
  std::mt19937_64 draw_{21};
  Fd door_;
  std::map<std::string, Fd> ways_;
  std::map<std::string, SocketAddress> workers_;
  std::vector<One> late_;
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

} // namespace

// Prints what part of the goodput is left, which depends on the machine.
TEST(udp_by_sockets_with_losses) {
  Server server(any(), kKey);
  double took[2] = {};
  for (const bool bad : {false, true}) {
    BadWay way(SocketAddress::of(server.address()), bad ? kBad : Faults{});
    std::atomic<uint64_t> again{0};
    const auto body = [&](int rank) {
      Stream::Config config = worker(rank, 2, bad ? 2 : 1);
      config.slots = 256;
      Client client(way.place(), config, Deadline(20s));
      constexpr size_t kCount = kSanitized ? 100'003 : 4'000'003;
      std::vector<float> data(kCount, 0.25F * static_cast<float>(rank + 1));
      const auto begin = Clock::now();
      client.all_reduce(data.data(), kCount, table(), Deadline(60s));
      if (rank == 0) {
        took[bad ? 1 : 0] =
            std::chrono::duration<double>(Clock::now() - begin).count();
      }
      again += client.stats().retransmissions;
      CHECK(std::all_of(data.begin(), data.end(), [](float x) {
        return x == 0.75F;
      }));
    };
    std::thread other(body, 1);
    body(0);
    other.join();
    CHECK(!bad || again > 0);
    std::cout << "  " << (bad ? "bad" : "good") << ": "
              << 4'000'003 * 32e-9 / took[bad ? 1 : 0] << " Gbit/s, " << again
              << " retransmissions\n";
  }
}

TEST(udp_who_does_not_get_in) {
  auto server = std::make_unique<Server>(any(), kKey);
  const std::string place = place_of(*server);
  Client first(place, worker(0, 2), Deadline(10s));
  const auto tries = [&](const Stream::Config& config) {
    return what([&] { Client(place, config, Deadline(10s)); });
  };
  CHECK(contains(tries(worker(0, 2)), "another one has joined"));
  CHECK(contains(tries(worker(1, 3)), "or are another number"));
  CHECK(contains(tries(worker(0, 33)), "at most 32 workers"));
  Stream::Config odd = worker(1, 2);
  odd.numel = 100;
  CHECK(contains(tries(odd), "64 or 256"));
  Stream::Config other = worker(1, 2);
  other.secret[0] = 9;
  const std::string text = what([&] { Client(place, other, Deadline(200ms)); });
  CHECK(contains(text, "another key"));
  CHECK(contains(text, place));
  server->drain();
  CHECK(contains(tries(worker(0, 2, 2)), "takes nobody in any more"));
  Client second(place, worker(1, 2), Deadline(10s)); // it has begun
  CHECK_EQ(server->stats().active, 1U);
  server.reset();
  const std::string nobody =
      what([&] { Client(place, worker(0, 2, 3), Deadline(200ms)); });
  CHECK(contains(nobody, "nobody listens there"));
}

TEST(udp_errors_name_who_is_missing) {
  auto server = std::make_unique<Server>(any(), kKey);
  const std::string place = place_of(*server);
  const auto add = [](Client& client, Deadline deadline) {
    return what([&] {
      std::vector<int32_t> data(5000, 1);
      client.all_reduce(data.data(), data.size(), deadline);
    });
  };
  {
    Client client(place, worker(0, 3, 1), Deadline(10s));
    const std::string text = add(client, Deadline(300ms));
    CHECK(contains(text, "it waits for ranks 1, 2"));
    CHECK(contains(text, place));
    CHECK(contains(add(client, Deadline(10s)), "has ended its session"));
  }
  {
    Client client(place, worker(0, 2, 2), Deadline(10s));
    Client other(place, worker(1, 2, 2), Deadline(10s));
    other.end();
    CHECK(contains(add(client, Deadline(20s)), "rank 1 left the session"));
  }
  {
    Client client(place, worker(0, 2, 3), Deadline(10s));
    std::thread ends([&] {
      std::this_thread::sleep_for(100ms);
      client.end();
    });
    CHECK(contains(add(client, Deadline(20s)), "this rank has ended"));
    ends.join();
  }
  Client one(place, worker(0, 2, 4), Deadline(10s));
  Client two(place, worker(0, 2, 5), Deadline(10s));
  const SocketAddress address = SocketAddress::of(server->address());
  server.reset();
  CHECK(contains(add(one, Deadline(20s)), "nobody listens there"));
  Server again(address, kKey);
  CHECK(contains(add(two, Deadline(20s)), "it was started again"));
}
