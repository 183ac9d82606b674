// Aggregators and their workers in one process, and insiders that lie.
#include <poll.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "aggregate/blocks.hpp"
#include "aggregate/client.hpp"
#include "aggregate/server.hpp"
#include "base/error.hpp"
#include "check.hpp"
#include "collectives/hosts_way.hpp"
#include "net/tcp_dial.hpp"
#include "net_wire.hpp"

using namespace fusedpg;
using namespace fusedpg::aggregate;
using namespace fusedpg::test;
using namespace std::chrono_literals;

namespace {

const Key128 kKey{1, 2, 3};
const auto kNothing = [] {};

Deadline soon() {
  return Deadline(20s);
}

std::string place_of(const Server& server) {
  const std::string text = server.address();
  const size_t space = text.find(' ');
  return text.substr(0, space) + ":" + text.substr(space + 1);
}

TcpAddress any_door() {
  return front_door("127.0.0.1:0", kKey);
}

// The workers of one job.
struct Crew {
  Crew(int workers, const std::vector<std::string>& places) {
    std::vector<std::unique_ptr<TcpEndpoint>> endpoints;
    Request request;
    request.aggregators = places.size();
    for (int r = 0; r < workers; ++r) {
      endpoints.push_back(
          std::make_unique<TcpEndpoint>(
              TcpListener::at(SocketAddress::of("127.0.0.1 0")),
              r,
              workers + static_cast<int>(places.size())));
      request.workers.push_back(endpoints.back()->address());
    }
    std::vector<std::string> jobs;
    for (size_t a = 0; a < places.size(); ++a) {
      request.index = a;
      jobs.push_back(open_job(places[a], kKey, request, soon(), kNothing));
    }
    for (int r = 0; r < workers; ++r) {
      TcpTransport::Config config;
      config.spin = 0us;
      auto transport =
          std::make_unique<TcpTransport>(config, std::move(endpoints[r]));
      for (size_t a = 0; a < places.size(); ++a) {
        transport->connect(workers + static_cast<int>(a), jobs[a]);
      }
      transports.push_back(transport.get());
      clients.push_back(
          std::make_unique<Client>(places, std::move(transport), workers));
    }
  }

  // The sum of 1, 2, ... by worker, as often as that; how many raised.
  int add_up(size_t count, int rounds) {
    const auto size = static_cast<int>(clients.size());
    std::atomic<int> raised{0};
    std::atomic<int> wrong{0};
    on_threads(size, [&](int r, Store& /* store */) {
      try {
        for (int round = 0; round < rounds; ++round) {
          std::vector<float> data(count, static_cast<float>(r + 1));
          OpStats moved;
          clients[r]->all_reduce(
              {data.data(),
               count,
               {},
               static_cast<uint64_t>(round),
               soon(),
               moved});
          for (const float x : data) {
            wrong += x == static_cast<float>(size * (size + 1) / 2) ? 0 : 1;
          }
        }
      } catch (const Error&) {
        ++raised;
      }
    });
    CHECK_EQ(wrong.load(), 0);
    return raised;
  }

  std::vector<std::unique_ptr<Client>> clients;
  std::vector<TcpTransport*> transports; // of these
};

void until(const std::function<bool()>& holds) {
  const Deadline deadline = soon();
  while (!holds() && !deadline.expired()) {
    std::this_thread::sleep_for(5ms);
  }
  CHECK(holds());
}

} // namespace

TEST(aggregators_add_up) {
  Server first(any_door());
  Server second(any_door());
  for (const int workers : {1, 2, 5}) {
    Crew one(workers, {place_of(first)});
    Crew both(workers, {place_of(first), place_of(second)});
    // Less than a segment, several rounds of the slots, and none.
    for (const size_t count : {size_t{1}, size_t{2'000'003}, size_t{0}}) {
      CHECK_EQ(one.add_up(count, 2), 0);
      CHECK_EQ(both.add_up(count, 2), 0);
    }
  }
  until([&] { return first.stats().active == 0; });
  CHECK_EQ(first.stats().jobs, 6U);
  CHECK_EQ(first.stats().failed, 0U);
}

TEST(aggregated_reductions_have_the_bits_of_those_from_rank_to_rank) {
  constexpr int kRanks = 3;
  // Several segments, of whole elements of each type.
  constexpr size_t kBytes = (size_t{kSanitized ? 300 : 1024} << 10) + 48;
  Server first(any_door());
  Server second(any_door());
  Crew crew(kRanks, {place_of(first), place_of(second)});
  const auto body = [&](int rank, NetContext& ctx) {
    // Small integers: of floats, which NaN comes out is open.
    std::vector<uint8_t> values(kBytes);
    for (size_t i = 0; i < kBytes; ++i) {
      values[i] =
          static_cast<uint8_t>((i * 7 + static_cast<size_t>(rank)) % 60);
    }
    for (int t = 0; t < static_cast<int>(DType::kOpaque); ++t) {
      for (int op = 0; op <= static_cast<int>(RedOp::kPremulSum); ++op) {
        kernels::ReduceArgs args;
        args.dtype = static_cast<DType>(t);
        args.op = static_cast<RedOp>(op);
        args.divisor = kRanks;
        args.factor = 0.3;
        if (!reduction_supported(args.dtype, args.op)) {
          continue;
        }
        std::vector<uint8_t> mine = values, other = values;
        const size_t count = kBytes / dtype_size(args.dtype);
        ctx.aggregators = nullptr;
        HostsWay plain(ctx);
        all_reduce(plain, {{mine.data(), count}}, args);
        CHECK(!ctx.aggregated);
        ctx.aggregators = crew.clients[rank].get();
        ctx.moved = {};
        HostsWay way(ctx);
        all_reduce(way, {{other.data(), count}}, args);
        CHECK(ctx.aggregated);
        CHECK(ctx.moved.bytes_received > kBytes);
        CHECK(ctx.moved.bytes_received < kBytes + 10'000);
        CHECK(mine == other);
        ctx.aggregated = false;
      }
    }
  };
  // A hundred operations and more.
  on_wire(kRanks, body, 10 * kLong);
}

TEST(blocks_of_aggregators) {
  Head head;
  head.count = 1000;
  head.dtype = static_cast<uint32_t>(DType::kFloat32);
  head.block = 10;
  head.stripe = 4;
  const BlockLayout layout(head, 3);
  CHECK_EQ(layout.blocks(), 100U);
  for (const uint64_t pattern :
       {uint64_t{0},
        ~uint64_t{0},
        uint64_t{0x8000000000000001},
        uint64_t{0x12}}) {
    const uint64_t bits[2] = {pattern, pattern & ((uint64_t{1} << 36) - 1)};
    for (size_t a = 0; a < 3; ++a) {
      for (uint32_t from = 0; from <= 100; ++from) {
        uint32_t found = kNoBlock;
        for (uint32_t b = from; b < 100 && found == kNoBlock; ++b) {
          const bool set = (bits[b / 64] >> (b % 64) & 1) != 0;
          found = set && b / 4 % 3 == a ? b : kNoBlock;
        }
        CHECK_EQ(layout.next(bits, from, a), found);
      }
    }
  }
}

TEST(aggregators_merge_blocks) {
  constexpr int kRanks = 3;
  constexpr size_t kCount = 30'011;
  Server first(any_door());
  Server second(any_door());
  Crew crew(kRanks, {place_of(first), place_of(second)});
  const auto body = [&](int rank, NetContext& ctx) {
    for (const DType type :
         {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kInt64}) {
      for (const size_t block : {32, 100, 4096, 65536}) {
        for (const uint32_t share : {0U, 3U, 50U, 100U}) { // percent
          // Small integers in the low bytes: no float is a NaN.
          const size_t element = dtype_size(type);
          std::vector<uint8_t> mine(kCount * element);
          uint32_t draw = 7 * share + static_cast<uint32_t>(rank) + 1;
          for (size_t b = 0; b * block < kCount; ++b) {
            draw = draw * 1664525U + 1013904223U;
            if ((draw >> 8) % 100 >= share) {
              continue;
            }
            const size_t end = std::min(kCount, (b + 1) * block) * element;
            for (size_t i = b * block * element; i < end; ++i) {
              mine[i] = static_cast<uint8_t>(1 + (i + draw) % 50);
            }
          }
          std::vector<uint8_t> other = mine;
          kernels::ReduceArgs args;
          args.dtype = type;
          args.op = share == 50 ? RedOp::kAvg : RedOp::kSum;
          args.divisor = kRanks;
          ctx.aggregators = nullptr;
          HostsWay plain(ctx);
          all_reduce(plain, {{mine.data(), kCount}}, args);
          ctx.aggregators = crew.clients[rank].get();
          HostsWay way(ctx);
          sparse_all_reduce(way, {{other.data(), kCount}}, args, {block});
          CHECK(ctx.aggregated);
          CHECK(mine == other);
          ctx.aggregated = false;
        }
      }
    }
  };
  on_wire(kRanks, body, 10 * kLong);
}

TEST(aggregators_end_jobs_whose_blocks_make_no_sense) {
  Server server(any_door());
  Crew others(2, {place_of(server)});
  Head good;
  good.count = 1000;
  good.segment = 10;
  good.dtype = static_cast<uint32_t>(DType::kFloat32);
  good.block = 32;
  good.stripe = 4;
  struct Lie {
    Head head;
    BlockHeader word; // then so many elements, and
    std::vector<uint32_t> blocks;
  };
  std::vector<Lie> lies;
  const auto head = [&](uint32_t block, uint32_t stripe, uint64_t count) {
    Head other = good;
    other.block = block;
    other.stripe = stripe;
    other.count = count;
    lies.push_back({other, {}, {}});
  };
  head(32, 0, 1000);
  head(32, 1U << 30, 1000);
  head(1U << 30, 1, 1000);
  head(32, 4, 0);
  head(1, 1, uint64_t{1} << 40);
  const auto word = [&](BlockHeader said, std::vector<uint32_t> blocks) {
    lies.push_back({good, said, std::move(blocks)});
  };
  word({5, 160, kNoBlock, 0}, {}); // more than a stripe
  word({1, 0, kNoBlock, 0}, {});
  word({0, 32, kNoBlock, 0}, {});
  word({1, 33, kNoBlock, 0}, {});
  word({0, 0, 3, 0}, {});
  word({1, 31, kNoBlock, 0}, {0}); // another length
  word({2, 64, kNoBlock, 0}, {1, 1});
  word({2, 64, kNoBlock, 0}, {2, 1});
  word({1, 32, kNoBlock, 0}, {32}); // there are 32
  word({1, 32, kNoBlock, 0}, {kNoBlock});
  word({2, 64, 2, 0}, {1, 2}); // not before the next one
  for (const Lie& lie : lies) {
    Crew liar(1, {place_of(server)});
    TcpTransport& transport = *liar.transports[0];
    const auto send = [&](Tag tag, const void* data, size_t bytes) {
      NetBuffer message(bytes);
      std::memcpy(message.data(), data, bytes);
      transport.send(1, static_cast<uint32_t>(tag), message);
    };
    expect_error(ErrorKind::kPeerFailed, {}, [&] {
      send(Tag::kHead, &lie.head, sizeof lie.head);
      send(Tag::kBlockHeader, &lie.word, sizeof lie.word);
      if (!lie.blocks.empty()) {
        std::vector<uint32_t> body(lie.word.elements);
        body.insert(body.end(), lie.blocks.begin(), lie.blocks.end());
        send(Tag::kBlocks, body.data(), body.size() * sizeof body[0]);
      }
      NetBuffer said(sizeof(BlockHeader));
      transport.receive(1, static_cast<uint32_t>(Tag::kBlockHeader), said)
          ->wait(soon());
    });
  }
  until([&] { return server.stats().failed == lies.size(); });
  CHECK_EQ(others.add_up(500'000, 2), 0);
}

TEST(aggregators_outlive_a_worker) {
  Server server(any_door());
  Crew others(2, {place_of(server)});
  CHECK_EQ(others.add_up(1000, 1), 0);
  {
    Crew crew(3, {place_of(server)});
    CHECK_EQ(crew.add_up(1000, 1), 0);
    crew.clients[1]->end();
    CHECK_EQ(crew.add_up(500'000, 1), 3);
  }
  CHECK_EQ(others.add_up(500'000, 1), 0);
}

TEST(aggregators_end_jobs_that_make_no_sense) {
  Server server(any_door());
  const TcpAddress door = front_door(place_of(server), kKey);
  Crew others(2, {place_of(server)});
  // At the front door, with the key.
  for (const char* text :
       {"",
        "fusedpg-aggregator 1\n1 1 0\nx\n",
        "fusedpg-aggregator 2\n",
        "fusedpg-aggregator 2\n0 1 0\n",
        "fusedpg-aggregator 2\n3 1 0\nx\n",
        "fusedpg-aggregator 2\n1 1 1\nx\n",
        "fusedpg-aggregator 2\n1 1 0\nx\n",
        "fusedpg-aggregator 2\n99999999999 1 0\nx\n",
        "fusedpg-aggregator 2\n-1 1 0\nx\n"}) {
    const Fd socket = tcp::dial(door, 0, 0, soon(), kNothing);
    tcp::say(socket, text, soon(), kNothing);
    CHECK(
        tcp::hear(socket, kMostRequestBytes, soon(), kNothing)
            .starts_with("! "));
  }
  {
    const Fd socket = tcp::dial(door, 0, 0, soon(), kNothing);
    const uint32_t long_word = 0xffffffffU;
    CHECK_EQ(send(socket.get(), &long_word, 4, MSG_NOSIGNAL), 4);
    CHECK(
        tcp::hear(socket, kMostRequestBytes, soon(), kNothing)
            .starts_with("! "));
  }
  CHECK_EQ(server.stats().refused, 10U);
  // And in a job.
  Head good;
  good.count = 10;
  good.segment = 10;
  good.dtype = static_cast<uint32_t>(DType::kFloat32);
  std::vector<Head> heads(7, good);
  heads[0].dtype = 200;
  heads[1].op = 99;
  heads[2].segment = 0;
  heads[3].segment = kSegmentBytes;
  heads[4].divisor = 0;
  heads[5].dtype = static_cast<uint32_t>(DType::kOpaque);
  heads[6].op = static_cast<uint32_t>(RedOp::kBxor); // of floats
  for (const Head& head : heads) {
    Crew liar(1, {place_of(server)});
    NetBuffer said(sizeof head);
    std::memcpy(said.data(), &head, sizeof head);
    NetBuffer result(40);
    TcpTransport& transport = *liar.transports[0];
    transport.send(1, static_cast<uint32_t>(Tag::kHead), said);
    expect_error(ErrorKind::kPeerFailed, {}, [&] {
      transport.receive(1, static_cast<uint32_t>(Tag::kResult), result)
          ->wait(soon());
    });
  }
  until([&] { return server.stats().failed == heads.size(); });
  CHECK_EQ(others.add_up(500'000, 2), 0);
}

TEST(aggregators_let_nobody_in_without_the_key) {
  Server server(any_door());
  Key128 other = kKey;
  other[15] = 9;
  const auto refuses = [&](const Key128& key, const std::string& why) {
    CHECK_THROWS(
        open_job(place_of(server), key, {{"x"}, 1, 0}, soon(), kNothing),
        Error,
        why);
  };
  refuses(other, "has another key");
  refuses(other, place_of(server));
  CHECK_EQ(server.stats().jobs, 0U);
  server.drain();
  refuses(kKey, "takes nobody in any more");
}

TEST(places_and_keys_of_aggregators) {
  for (const char* place :
       {"",
        ":1",
        "host",
        "1.2.3.4:",
        "1.2.3.4:x",
        "1.2.3.4:70000",
        "1.2.3.4:-1"}) {
    expect_error(ErrorKind::kInvalid, {}, [&] { front_door(place, kKey); });
  }
  CHECK_EQ(front_door("127.0.0.1:80", kKey).socket.text(), "127.0.0.1 80");
  CHECK_EQ(front_door("[::1]:80", kKey).socket.text(), "::1 80");
  for (const char* key :
       {"",
        "0",
        "0011223344556677889900112233445g",
        "001122334455667788990011223344556"}) {
    expect_error(ErrorKind::kInvalid, {}, [&] { key_of(key); });
  }
  const Key128 key = key_of("00ff0000000000000000000000000010");
  CHECK_EQ(key[1], 255);
  CHECK_EQ(key[15], 16);
}
