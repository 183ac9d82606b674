#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>

#include "messages/mailbox.hpp"
#include "ranks.hpp"

namespace fusedpg::test {

// How one send or receive ended. Holds no exception: who frees the last
// reference to one is decided inside libstdc++, where TSan cannot look.
struct Outcome {
  int peer;
  std::optional<ErrorKind> error;
  std::string text;
};

class Pending {
 public:
  Mailbox::Done done() {
    return [promise = promise_](std::exception_ptr error, int peer) {
      Outcome outcome{peer, std::nullopt, ""};
      try {
        if (error) {
          std::rethrow_exception(error);
        }
      } catch (const Error& e) {
        outcome.error = e.kind();
        outcome.text = e.what();
      }
      promise->set_value(outcome); // throws if called twice
    };
  }
  // Who waits moves messages by this.
  using Move =
      std::function<void(const std::function<bool()>& done, const Deadline&)>;
  void set_move(Move move) {
    move_ = std::move(move);
  }
  // Waits for the end; throws its error; returns the peer.
  int wait() {
    std::future<Outcome> future = promise_->get_future();
    if (move_) {
      const auto done = [&] {
        return future.wait_for(milliseconds(0)) == std::future_status::ready;
      };
      move_(done, Deadline(kLong));
    }
    if (future.wait_for(kLong) != std::future_status::ready) {
      throw std::runtime_error("a message was never completed");
    }
    const Outcome outcome = future.get();
    if (outcome.error) {
      throw Error(*outcome.error, outcome.text);
    }
    return outcome.peer;
  }

 private:
  Move move_;
  std::shared_ptr<std::promise<Outcome>> promise_ =
      std::make_shared<std::promise<Outcome>>();
};

struct Post {
  Member member;
  Mailbox mailbox;
  std::atomic<unsigned> posts{0};

  Post(int rank, int size, Store& store, Settings settings = test_settings())
      : member(rank, size, store, settings),
        mailbox(member.domain, *kernels::table()) {}

  Pending send(
      const PlacedMemory& b,
      int to,
      int tag = 0,
      milliseconds timeout = kLong) {
    Pending pending = moved();
    mailbox.send(b.data(), b.bytes(), to, tag, timeout, pending.done());
    return pending;
  }
  Pending receive(
      const PlacedMemory& b,
      int from,
      int tag = 0,
      milliseconds timeout = kLong) {
    Pending pending = moved();
    mailbox.receive(b.data(), b.bytes(), from, tag, timeout, pending.done());
    return pending;
  }
  PlacedMemory buffer(size_t bytes, bool in_arena = false) {
    return PlacedMemory(member.domain, bytes, in_arena);
  }
  // Two of four are moved by who waits, the others by the mailbox's thread.
  Pending moved() {
    Pending pending;
    if (posts++ / 2 % 2 == 0) {
      pending.set_move([this](const auto& done, const Deadline& deadline) {
        mailbox.move_until(done, deadline);
      });
    }
    return pending;
  }
  void barrier() {
    member.domain.barrier(OpDescriptor{}, Deadline(kLong));
  }
};

} // namespace fusedpg::test
