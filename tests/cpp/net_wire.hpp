#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>

#include "collective_cases.hpp"
#include "collectives/net_exchange.hpp"

// A transport that is a table in memory.
namespace fusedpg::test {

// Messages under way between all ranks.
class Wire {
 public:
  using Key = std::tuple<int, int, uint32_t>; // from, to, tag

  void put(const Key& key, Bytes message) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++messages_;
    waiting_[key].push_back(std::move(message));
    changed_.notify_all();
  }
  // Empty: not within the deadline.
  Bytes take(const Key& key, const Deadline& deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    const bool there = changed_.wait_for(
        lock, deadline.remaining(), [&] { return !waiting_[key].empty(); });
    if (!there) {
      return {};
    }
    Bytes message = std::move(waiting_[key].front());
    waiting_[key].pop_front();
    return message;
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
  std::map<Key, std::deque<Bytes>> waiting_;
  size_t messages_ = 0;
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
    // At the latest when it is waited for: until then nobody may write there.
    return std::make_unique<Done>([this, to, tag, message](const Deadline&) {
      const auto* begin = reinterpret_cast<const uint8_t*>(message.data());
      wire_.put({rank_, to, tag}, Bytes(begin, begin + message.bytes()));
    });
  }
  RequestPtr receive(int from, uint32_t tag, const NetBuffer& into) override {
    CHECK(into.bytes() != 0);
    return std::make_unique<Request>(*this, from, tag, into);
  }
  void abort() override {}

 private:
  // Runs at once; sends never wait.
  class Done : public Transport::Request {
   public:
    explicit Done(const std::function<void(const Deadline&)>& call) {
      call(Deadline(kLong));
    }
    void wait(const Deadline&) override {}
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
};

inline NetContext net_context(
    Transport& transport,
    Pool& pool,
    SkipState& skip,
    Stats& stats,
    milliseconds timeout = kLong) {
  return {
      {*kernels::table(), pool, Deadline(timeout), 5, false, skip, stats},
      transport};
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
      NetContext ctx = net_context(transport, pool, skip, stats, timeout);
      body(rank, ctx);
    });
  }
  for (std::thread& t : threads) {
    t.join();
  }
  if (timeout == kLong) {
    CHECK_EQ(wire.left(), size_t{0});
  }
}

} // namespace fusedpg::test
