// What many ranks say to each other through a store.

#include "net/exchange_words.hpp"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <mutex>

#include "ranks.hpp"

namespace {

using namespace fusedpg;
using namespace fusedpg::test;

// A store in this process.
struct Board {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::string> values;
};

// One rank's client, which counts its requests.
class Client : public Rendezvous {
 public:
  explicit Client(Board& board) : board_(board) {}
  void set(const std::string& key, const std::string& value) override {
    ++requests;
    std::unique_lock<std::mutex> lock(board_.mutex);
    CHECK(board_.values.emplace(key, value).second);
    board_.changed.notify_all();
    CHECK(board_.changed.wait_for(
        lock, kLong, [&] { return board_.values.size() >= together; }));
  }
  std::string get(const std::string& key, const Deadline& deadline) override {
    return get_all({key}, deadline.left())->front();
  }
  std::optional<std::vector<std::string>> get_all(
      const std::vector<std::string>& keys,
      milliseconds /* most */) override {
    ++requests;
    keys_ = std::max(keys_, keys.size());
    std::unique_lock<std::mutex> lock(board_.mutex);
    const auto all = [&] {
      return std::all_of(keys.begin(), keys.end(), [&](const auto& key) {
        return board_.values.count(key) != 0;
      });
    };
    // So long that waiting is one request.
    if (!board_.changed.wait_for(lock, patience, all)) {
      return std::nullopt;
    }
    std::vector<std::string> values;
    for (const auto& key : keys) {
      values.push_back(board_.values[key]);
    }
    return values;
  }
  bool has(const std::string& key) override {
    ++requests;
    const std::lock_guard<std::mutex> lock(board_.mutex);
    return board_.values.count(key) != 0;
  }
  int64_t add(const std::string& /* key */, int64_t /* amount */) override {
    fail(ErrorKind::kInvalid, "nobody adds");
  }
  size_t keys() const {
    return keys_;
  }

  int requests = 0;
  milliseconds patience = kLong;
  size_t together = 0; // so many values are there before a set returns

 private:
  Board& board_;
  size_t keys_ = 0;
};

std::string word(int rank) {
  // Any bytes, and none.
  return std::string(rank % 5, '\0') + std::string(rank % 3, 'x');
}

TEST(exchange_words_asks_little_of_the_store) {
  // Requests of the busiest rank and of the others: a rank sets its word and gets
  // all; who collects asks for others' and sets them, once a level.
  const struct {
    int size, most;
  } rows[] = {{1, 0}, {2, 3}, {8, 3}, {32, 3}, {64, 5}, {512, 5}};
  for (const auto& [size, most] : rows) {
    Board board;
    std::atomic<int> busiest{0}, quiet{0};
    on_threads(size, [&, size = size](int rank, Store&) {
      Client client(board);
      const auto words = exchange_words(
          client, "words", rank, size, word(rank), Deadline(kLong), [] {});
      CHECK_EQ(words.size(), static_cast<size_t>(size));
      for (int p = 0; p < static_cast<int>(words.size()); ++p) {
        if (words[p] != word(p)) {
          CHECK_EQ(words[p], word(p));
        }
      }
      CHECK(client.keys() <= 32);
      quiet += client.requests <= 2 ? 1 : 0;
      for (int before = busiest; client.requests > before &&
           !busiest.compare_exchange_weak(before, client.requests);) {
      }
    });
    CHECK_EQ(busiest.load(), most);
    CHECK(quiet >= size - (size + 31) / 32);
  }
}

TEST(exchange_words_names_who_has_not_come) {
  Board board;
  on_threads(40, [&](int rank, Store&) {
    if (rank == 3 || rank == 32) {
      return; // one that says nothing, and one that was to collect
    }
    Client client(board);
    client.patience = milliseconds(20);
    client.together = 38;
    expect_error(ErrorKind::kTimeout, {"waiting for rank 3, 32,"}, [&] {
      exchange_words(
          client, "words", rank, 40, "x", Deadline(milliseconds(300)), [] {});
    });
  });
}

TEST(exchange_words_looks_whether_waiting_is_in_vain) {
  Board board;
  Client client(board);
  client.patience = milliseconds(5);
  int looks = 0;
  expect_error(ErrorKind::kAborted, {"aborted"}, [&] {
    exchange_words(client, "words", 1, 2, "x", Deadline(kLong), [&] {
      if (++looks == 3) {
        fail(ErrorKind::kAborted, "fused: aborted");
      }
    });
  });
}

} // namespace
