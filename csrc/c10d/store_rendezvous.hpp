#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/rendezvous.hpp"

namespace fusedpg {

// c10d's store as the engines take it.
class StoreRendezvous : public Rendezvous {
 public:
  explicit StoreRendezvous(c10::intrusive_ptr<c10d::Store> store)
      : store_(std::move(store)) {}
  void set(const std::string& key, const std::string& value) override {
    store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
  }
  std::string get(const std::string& key, const Deadline& deadline) override {
    store_->wait(
        {key},
        std::max(
            std::chrono::duration_cast<std::chrono::milliseconds>(
                deadline.remaining()),
            std::chrono::milliseconds(1)));
    const auto bytes = store_->get(key);
    return std::string(bytes.begin(), bytes.end());
  }
  bool has(const std::string& key) override {
    return store_->check({key});
  }
  int64_t add(const std::string& key, int64_t amount) override {
    return store_->add(key, amount);
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

} // namespace fusedpg
