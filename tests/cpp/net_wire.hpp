#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <tuple>

#include "collective_cases.hpp"
#include "collectives/net_exchange.hpp"
#include "collectives/selector.hpp"

// A transport that is a table in memory.
namespace fusedpg::test {

// A message that is read as late as a network may do it: when it is received,
// or when its send is waited for.
struct Letter {
  NetBuffer from;
  std::optional<Bytes> text;

  void read() {
    if (!text) {
      const auto* begin = reinterpret_cast<const uint8_t*>(from.data());
      text.emplace(begin, begin + from.bytes());
    }
  }
};

// Messages under way between all ranks.
class Wire {
 public:
  using Key = std::tuple<int, int, uint32_t>; // from, to, tag

  void put(const Key& key, std::shared_ptr<Letter> letter) {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_[key].push_back(std::move(letter));
    changed_.notify_all();
  }
  void send(Letter& letter) {
    std::lock_guard<std::mutex> lock(mutex_);
    letter.read();
  }
  // Nothing is read any more of what a rank has sent.
  void close(int from) noexcept {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [key, letters] : waiting_) {
      for (auto& letter : letters) {
        if (std::get<0>(key) == from) {
          letter->read();
        }
      }
    }
  }
  // Empty: not within the deadline.
  Bytes take(const Key& key, const Deadline& deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool there = changed_.wait_for(
        lock, deadline.remaining(), [&] { return !waiting_[key].empty(); });
    if (!there) {
      return {};
    }
    const std::shared_ptr<Letter> letter = std::move(waiting_[key].front());
    waiting_[key].pop_front();
    letter->read();
    return *letter->text;
  }
  size_t left() {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t sum = 0;
    for (const auto& [key, messages] : waiting_) {
      sum += messages.size();
    }
    return sum;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, std::deque<std::shared_ptr<Letter>>> waiting_;
};

class WireTransport : public Transport {
 public:
  WireTransport(Wire& wire, int rank, int size)
      : wire_(wire),
        rank_(rank),
        size_(size) {}
  int rank() const override {
    return rank_;
  }
  int size() const override {
    return size_;
  }
  RequestPtr send(int to, uint32_t tag, const NetBuffer& message) override {
    CHECK(message.bytes() != 0);
    CHECK(to != rank_);
    auto letter = std::make_shared<Letter>(Letter{message, {}});
    wire_.put({rank_, to, tag}, letter);
    return std::make_unique<Sent>(wire_, std::move(letter));
  }
  RequestPtr receive(int from, uint32_t tag, const NetBuffer& into) override {
    CHECK(into.bytes() != 0);
    return std::make_unique<Request>(*this, from, tag, into);
  }
  void abort() override {
    end();
  }
  void end() noexcept override {
    closed_ = true;
    wire_.close(rank_);
  }
  // Whether its peers hear that this rank has given up.
  bool closed() const {
    return closed_;
  }

 private:
  class Sent : public Transport::Request {
   public:
    Sent(Wire& wire, std::shared_ptr<Letter> letter)
        : wire_(wire),
          letter_(std::move(letter)) {}
    ~Sent() override {
      // An operation that has not failed must know that its buffers are free.
      CHECK(waited_ || std::uncaught_exceptions() > 0);
    }
    void wait(const Deadline&) override {
      wire_.send(*letter_);
      waited_ = true;
    }

   private:
    Wire& wire_;
    const std::shared_ptr<Letter> letter_;
    bool waited_ = false;
  };
  class Request : public Transport::Request {
   public:
    Request(WireTransport& transport, int from, uint32_t tag, NetBuffer into)
        : transport_(transport),
          key_(from, transport.rank_, tag),
          into_(std::move(into)) {}
    void wait(const Deadline& deadline) override {
      const Bytes message = transport_.wire_.take(key_, deadline);
      if (message.empty()) {
        fail(ErrorKind::kTimeout, "no message from rank {}", std::get<0>(key_));
      }
      if (CHECK_EQ(message.size(), into_.bytes())) {
        std::memcpy(into_.data(), message.data(), message.size());
      }
    }

   private:
    WireTransport& transport_;
    const Wire::Key key_;
    const NetBuffer into_;
  };

  Wire& wire_;
  const int rank_;
  const int size_;
  bool closed_ = false;
};

// The transport of an operation that has failed, and what is left of its
// rank's host.
inline void check_told(const NetContext& ctx) {
  CHECK(static_cast<const WireTransport&>(ctx.transport).closed());
  CHECK(ctx.domain == nullptr || ctx.domain->failed());
}

inline NetContext net_context(
    Transport& transport,
    Pool& pool,
    SkipState& skip,
    Stats& stats,
    const HostMap& hosts,
    milliseconds timeout = kLong) {
  return {
      {*kernels::table(), pool, Deadline(timeout), 5, false, skip, stats},
      transport,
      &hosts};
}

// Calls body(rank, context, wire) on a thread a rank.
template <typename Body>
void on_wire(int size, const Body& body, milliseconds timeout = kLong) {
  Wire wire;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      WireTransport transport(wire, rank, size);
      Pool pool(1);
      SkipState skip;
      Stats stats;
      const HostMap hosts = HostMap::apart(size);
      NetContext ctx =
          net_context(transport, pool, skip, stats, hosts, timeout);
      body(rank, ctx);
    });
  }
  for (std::thread& t : threads) {
    t.join();
  }
  if (timeout >= kLong) {
    CHECK_EQ(wire.left(), size_t{0});
  }
}

// The ranks of every host.
using Layout = std::vector<std::vector<int>>;

inline std::vector<Layout> layouts() {
  return kSanitized ? std::vector<Layout>{{{0, 2}, {1, 3}}, {{0, 1}, {2}}}
                    : std::vector<Layout>{
                          {{0}, {1}},
                          {{0, 1}, {2}},
                          {{0}, {1, 2}},
                          {{0, 1}, {2, 3}},
                          {{0, 2}, {1, 3}},
                          {{0, 1, 3}, {2}},
                          {{0, 3}, {1}, {2, 4}}};
}

inline int size_of(const Layout& layout) {
  size_t size = 0;
  for (const auto& ranks : layout) {
    size += ranks.size();
  }
  return static_cast<int>(size);
}

// What the ranks of one host share.
class Neighbours {
 public:
  Neighbours(int rank, const Layout& layout, Store& store)
      : map_(layout),
        settings_(settings(map_, rank)),
        bootstrap_(rank, size_of(layout), settings_) {
    bootstrap_.meet(store, Deadline(kLong));
    CHECK(bootstrap_.hosts() == layout);
    if (map_.ranks(map_.host(rank)).size() > 1) {
      domain_.emplace(
          rank,
          bootstrap_,
          settings_,
          Deadline(kLong),
          net_stage_bytes(size_of(layout)));
    }
  }
  const HostMap& map() const {
    return map_;
  }
  Domain* domain() {
    return domain_ ? &*domain_ : nullptr;
  }

 private:
  static Settings settings(const HostMap& map, int rank) {
    Settings s = test_settings();
    s.host_id = formatted("host {}", map.host(rank));
    return s;
  }

  const HostMap map_;
  const Settings settings_;
  Bootstrap bootstrap_;
  std::optional<Domain> domain_;
};

// Calls body(rank, context) on a thread a rank; those of one host share memory.
template <typename Body>
void on_hosts(
    const Layout& layout,
    const Body& body,
    milliseconds timeout = kLong) {
  Wire wire;
  on_threads(size_of(layout), [&](int rank, Store& store) {
    Neighbours neighbours(rank, layout, store);
    WireTransport transport(wire, rank, size_of(layout));
    Pool pool(1);
    SkipState skip;
    Stats stats;
    NetContext ctx =
        net_context(transport, pool, skip, stats, neighbours.map(), timeout);
    ctx.domain = neighbours.domain();
    body(rank, ctx);
    store.meet("end", size_of(layout));
  });
  if (timeout == kLong) {
    CHECK_EQ(wire.left(), size_t{0});
  }
}

// What all ranks' contributions come to, in the order that docs/reference/numerics.md
// promises: a host's in rank order, then the hosts'. Real types and sums are
// folded by the definition in the wide type, for everything else the order of
// one machine gives the same.
inline Bytes hosts_reference(
    const ReduceArgs& args,
    const Layout& layout,
    const std::vector<const void*>& srcs,
    size_t count) {
  const bool shared = static_cast<size_t>(size_of(layout)) != layout.size();
  const bool sums = args.op == RedOp::kSum || args.op == RedOp::kAvg ||
      args.op == RedOp::kPremulSum || args.op == RedOp::kProduct;
  const bool half =
      args.dtype == DType::kFloat16 || args.dtype == DType::kBFloat16;
  const bool real =
      half || args.dtype == DType::kFloat32 || args.dtype == DType::kFloat64;
  if (!shared || !sums || !real) {
    return reference(args, srcs, count);
  }
  const auto fold = [&]<typename T>(T, auto value, auto store) {
    Bytes out(count * dtype_size(args.dtype));
    for (size_t i = 0; i < count; ++i) {
      const auto join = [&](bool first, T acc, T x) {
        // volatile: every product is rounded.
        const volatile T joined = first  ? x
            : args.op == RedOp::kProduct ? acc * x
                                         : acc + x;
        return T(joined);
      };
      T all = 0;
      for (size_t h = 0; h < layout.size(); ++h) {
        T sum = 0;
        for (size_t k = 0; k < layout[h].size(); ++k) {
          const int p = layout[h][k];
          volatile T x = value(srcs[p], i);
          if (args.op == RedOp::kPremulSum) {
            x = x *
                static_cast<T>(
                    args.weights != nullptr ? args.weights[p] : args.factor);
          }
          sum = join(k == 0, sum, x);
        }
        all = join(h == 0, all, sum);
      }
      if (args.op == RedOp::kAvg) {
        const auto divisor = static_cast<T>(args.divisor);
        all = args.reciprocal ? all * (T(1) / divisor) : all / divisor;
      }
      store(out, i, all);
    }
    return out;
  };
  const auto put = [](Bytes& out, size_t i, auto x) {
    std::memcpy(out.data() + i * sizeof x, &x, sizeof x);
  };
  switch (args.dtype) {
    case DType::kFloat16:
      return fold(
          0.0F,
          [](const void* x, size_t i) {
            return half_value(static_cast<const uint16_t*>(x)[i]);
          },
          [&](Bytes& out, size_t i, float x) { put(out, i, nearest_half(x)); });
    case DType::kBFloat16:
      return fold(
          0.0F,
          [](const void* x, size_t i) {
            return bfloat_value(static_cast<const uint16_t*>(x)[i]);
          },
          [&](Bytes& out, size_t i, float x) {
            put(out, i, nearest_bfloat(x));
          });
    case DType::kFloat32:
      return fold(
          0.0F,
          [](const void* x, size_t i) {
            return static_cast<const float*>(x)[i];
          },
          put);
    default:
      return fold(
          0.0,
          [](const void* x, size_t i) {
            return static_cast<const double*>(x)[i];
          },
          put);
  }
}

} // namespace fusedpg::test
