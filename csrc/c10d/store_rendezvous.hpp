#pragma once

#include <functional>
#include <future>
#include <thread>
#include <type_traits>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/error.hpp"
#include "base/rendezvous.hpp"

namespace fusedpg {

// A client of the same store that no other thread holds: whoever waits for a key
// keeps a client to itself for as long as that takes.
inline c10::intrusive_ptr<c10d::Store> own_client(
    const c10::intrusive_ptr<c10d::Store>& store) {
  try {
    return store->clone();
  } catch (const std::exception&) {
    return store; // written in Python, without clone()
  }
}

// c10d's store as the engines take it.
class StoreRendezvous : public Rendezvous {
 public:
  explicit StoreRendezvous(c10::intrusive_ptr<c10d::Store> store)
      : store_(std::move(store)) {}
  void set(const std::string& key, const std::string& value) override {
    store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
  }
  std::string get(const std::string& key, const Deadline& deadline) override {
    store_->wait({key}, deadline.left());
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

// The same where waits must end: a store that is out of reach or stopped answers
// nothing, and its client then waits without a limit. So each request has a thread
// of its own, which stays behind if need be.
class BoundedRendezvous : public Rendezvous {
 public:
  // `check` throws when waiting is in vain.
  BoundedRendezvous(
      c10::intrusive_ptr<c10d::Store> store,
      const Deadline& deadline,
      std::function<void()> check)
      : store_(std::move(store)),
        deadline_(deadline),
        check_(std::move(check)) {}
  void set(const std::string& key, const std::string& value) override {
    ask([=](StoreRendezvous& store) { store.set(key, value); }, deadline_);
  }
  std::string get(const std::string& key, const Deadline& deadline) override {
    return ask(
        [=](StoreRendezvous& store) { return store.get(key, deadline); },
        deadline);
  }
  bool has(const std::string& key) override {
    return ask(
        [=](StoreRendezvous& store) { return store.has(key); }, deadline_);
  }
  int64_t add(const std::string& key, int64_t amount) override {
    return ask(
        [=](StoreRendezvous& store) { return store.add(key, amount); },
        deadline_);
  }

 private:
  template <typename Call>
  std::invoke_result_t<Call, StoreRendezvous&> ask(
      const Call& call,
      const Deadline& deadline) {
    constexpr std::chrono::milliseconds kLook{20};
    using Answer = std::invoke_result_t<Call, StoreRendezvous&>;
    std::packaged_task<Answer()> task(
        [call, store = store_]() mutable { return call(store); });
    std::future<Answer> answer = task.get_future();
    std::thread(std::move(task)).detach();
    while (answer.wait_for(kLook) != std::future_status::ready) {
      check_();
      if (deadline.expired()) {
        fail(
            ErrorKind::kTimeout,
            "fused: timeout after {} ms: the store does not answer",
            deadline.timeout().count());
      }
    }
    return answer.get();
  }

  StoreRendezvous store_;
  const Deadline deadline_;
  const std::function<void()> check_;
};

} // namespace fusedpg
