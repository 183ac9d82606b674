#pragma once

#include <memory>
#include <string>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/error.hpp"
#include "base/rendezvous.hpp"
#include "base/while_waiting.hpp"

namespace fusedpg {

// A client of the same store that no other thread holds: whoever waits for a key
// keeps a client to itself for as long as that takes.
c10::intrusive_ptr<c10d::Store> own_client(
    const c10::intrusive_ptr<c10d::Store>& store);

// Such a client of a store without its prefixes, one for all groups of this process
// that have it: a store takes its time for each connection. No request by it waits
// for a key.
struct CommonClient {
  const c10::intrusive_ptr<c10d::Store> of;
  const c10::intrusive_ptr<c10d::Store> client;

  static std::shared_ptr<CommonClient> get(
      const c10::intrusive_ptr<c10d::Store>& store);
};

// Whether both are the same store, under whatever prefixes.
bool same_store(
    const c10::intrusive_ptr<c10d::Store>& one,
    const c10::intrusive_ptr<c10d::Store>& other);

// Whether the server of a TCPStore runs in this process.
bool store_is_here(const c10::intrusive_ptr<c10d::Store>& store);

// The host and port of a TCPStore's server, as its clients name it.
std::pair<std::string, uint16_t> store_address(
    const c10::intrusive_ptr<c10d::Store>& store);

// Waits, at most so long, until the server of a TCPStore has ended the connection
// of this store's client. Returns at once where that is another store's, or where
// something else than one group holds the store.
void await_store_end(
    const c10::intrusive_ptr<c10d::Store>& store,
    std::chrono::milliseconds most);

// c10d's store as the engines take it.
class StoreRendezvous : public Rendezvous {
 public:
  explicit StoreRendezvous(c10::intrusive_ptr<c10d::Store> store)
      : store_(std::move(store)) {}
  void set(const std::string& key, const std::string& value) override {
    store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
  }
  std::string get(const std::string& key, const Deadline& deadline) override {
    auto found = get_all({key}, deadline.left());
    if (!found) {
      fail(
          ErrorKind::kTimeout,
          "fused: timeout after {} ms waiting for a key of the store, {}",
          deadline.timeout().count(),
          key);
    }
    return std::move(found->front());
  }
  std::optional<std::vector<std::string>> get_all(
      const std::vector<std::string>& keys,
      std::chrono::milliseconds most) override {
    // It looks ever more rarely: c10d prints warnings for a store's own wait that
    // ends without the keys, and ranks may come minutes after each other.
    constexpr std::chrono::milliseconds kRarest{20};
    const Deadline until(most);
    for (std::chrono::microseconds pause(500); !store_->check(keys);
         pause = std::min<std::chrono::microseconds>(pause * 3 / 2, kRarest)) {
      if (until.expired()) {
        return std::nullopt;
      }
      while_waiting();
      std::this_thread::sleep_for(
          std::min<std::chrono::microseconds>(pause, until.left()));
    }
    std::vector<std::string> values;
    if (store_->hasExtendedApi()) {
      for (const auto& bytes : store_->multiGet(keys)) {
        values.emplace_back(bytes.begin(), bytes.end());
      }
    } else {
      for (const std::string& key : keys) {
        const auto bytes = store_->get(key);
        values.emplace_back(bytes.begin(), bytes.end());
      }
    }
    return values;
  }
  bool has(const std::string& key) override {
    return store_->check({key});
  }
  int64_t add(const std::string& key, int64_t amount) override {
    return store_->add(key, amount);
  }
  std::pair<std::string, uint16_t> address() const override {
    return store_address(store_);
  }
  bool is_here() const override {
    return store_is_here(store_);
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

} // namespace fusedpg
