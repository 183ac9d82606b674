#include "collectives/monitored_barrier.hpp"

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/while_waiting.hpp"

namespace fusedpg {
namespace {

// The texts are Gloo's, by which users know them.
[[noreturn]] void fail_without(
    const std::vector<int>& missing,
    const Deadline& deadline,
    bool wait_all_ranks) {
  std::ostringstream text;
  text << "fused: [Rank 0]: " << (wait_all_ranks ? "Ranks " : "Rank ");
  for (size_t i = 0; i < missing.size(); ++i) {
    text << (i ? ", " : "") << missing[i];
  }
  text << " failed to pass monitoredBarrier in " << deadline.timeout().count()
       << " ms: Rank 0 timed out in monitoredBarrier";
  throw Error(ErrorKind::kTimeout, text.str());
}

[[noreturn]] void fail_not_passed(int rank) {
  fail(
      ErrorKind::kTimeout,
      "fused: Rank {} successfully reached monitoredBarrier, but received "
      "errors while waiting for send/recv from rank 0. Please check rank 0 "
      "logs for faulty rank.",
      rank);
}

// --- inside of a machine -----------------------------------------------------

// A rank asks by raising its `monitored_arrived`; rank 0 answers by raising
// that rank's `monitored_passed` to it. A rank that gives up takes its question
// back, so a barrier that failed leaves nothing behind.

OpDescriptor descriptor(uint64_t sequence) {
  OpDescriptor d;
  d.op = OpCode::kBarrier;
  d.sequence = sequence;
  return d;
}

void ring(Domain& domain, int rank) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  domain.control(rank).mail_bell.ring();
}

bool asks(Domain& domain, int rank) {
  const RankControl& c = domain.control(rank);
  return c.monitored_arrived.load(std::memory_order_acquire) >
      c.monitored_passed.load(std::memory_order_acquire);
}

// Waits for something rank p does; false when it does not in time.
template <typename Ready>
bool wait_for(Domain& domain, int p, const Deadline& deadline, Ready ready) {
  if (ready()) {
    return true;
  }
  try {
    domain.wait(
        domain.control(domain.rank()).mail_bell,
        descriptor(0),
        deadline,
        ready,
        [&](int q) { return q == p; });
    return true;
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kAborted) {
      throw;
    }
    return false;
  }
}

void lead(Domain& domain, const Deadline& deadline, bool wait_all_ranks) {
  // Looks at everyone each time: while rank 0 waits for one rank, another may
  // come and, its own time being over, give up. It is not to be blamed then.
  std::vector<bool> came(domain.size());
  const auto look = [&](int p) {
    for (int q = 1; q < domain.size(); ++q) {
      came[q] = came[q] || asks(domain, q);
    }
    return came[p];
  };
  std::vector<int> missing;
  for (int p = 1; p < domain.size(); ++p) {
    if (!wait_for(domain, p, deadline, [&] { return look(p); })) {
      missing.push_back(p);
      if (!wait_all_ranks) {
        break;
      }
    }
  }
  for (int p = 1; p < domain.size() && missing.empty(); ++p) {
    if (!asks(domain, p)) {
      missing.push_back(p); // but here all others came
    }
  }
  if (!missing.empty()) {
    fail_without(missing, deadline, wait_all_ranks);
  }
  for (int p = 1; p < domain.size(); ++p) {
    RankControl& c = domain.control(p);
    c.monitored_passed.store(
        c.monitored_arrived.load(std::memory_order_acquire),
        std::memory_order_release);
    ring(domain, p);
  }
}

void follow(Domain& domain, const Deadline& deadline) {
  RankControl& mine = domain.control(domain.rank());
  const uint64_t question =
      mine.monitored_passed.load(std::memory_order_acquire) + 1;
  mine.monitored_arrived.store(question, std::memory_order_release);
  ring(domain, 0);
  const bool passed = wait_for(domain, 0, deadline, [&] {
    return mine.monitored_passed.load(std::memory_order_acquire) >= question;
  });
  if (!passed) {
    mine.monitored_arrived.store(question - 1, std::memory_order_release);
    fail_not_passed(domain.rank());
  }
}

// --- between machines --------------------------------------------------------

// Empty messages: to rank 0, and back from it. A rank that gives up withdraws
// what it waits for.
class RollCall {
 public:
  RollCall(NetMailbox& messages, int tag, int size)
      : messages_(messages),
        tag_(tag),
        came_(std::make_shared<Came>()) {
    came_->from.resize(size);
  }
  RollCall(const RollCall&) = delete;

  void notify(int to) {
    messages_.notify(to, tag_);
  }
  void give_up() {
    messages_.withdraw(tag_);
  }
  void receive(int from) {
    messages_.receive(
        nullptr,
        0,
        from,
        tag_,
        kLong,
        [came = came_, from](const std::exception_ptr& error, int) {
          std::lock_guard<std::mutex> lock(came->mutex);
          came->from[from] = !error;
          came->failed = came->failed || error;
          came->changed.notify_all();
        });
  }
  // False: not within the deadline, or never.
  bool await(int from, const Deadline& deadline) {
    std::unique_lock<std::mutex> lock(came_->mutex);
    const auto known = [&] { return came_->from[from] || came_->failed; };
    while (!came_->changed.wait_for(
               lock, std::min(WaitHook::kInterval, deadline.left()), known) &&
           !deadline.expired()) {
      lock.unlock();
      while_waiting();
      lock.lock();
    }
    return came_->from[from];
  }

 private:
  // The deadline is the barrier's: one of a message would end the group.
  static constexpr std::chrono::hours kLong{24 * 365};
  struct Came {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<bool> from;
    bool failed = false; // the mailbox, and the group with it
  };
  NetMailbox& messages_;
  const int tag_;
  const std::shared_ptr<Came> came_;
};

int tag_of(uint32_t number) {
  return -2 - static_cast<int>(number & 0x3fffffffU);
}

} // namespace

void monitored_barrier(
    NetMailbox& messages,
    int rank,
    int size,
    uint32_t number,
    std::chrono::milliseconds timeout,
    bool wait_all_ranks) {
  const Deadline deadline(timeout);
  RollCall call(messages, tag_of(number), size);
  if (rank != 0) {
    call.notify(0);
    call.receive(0);
    if (!call.await(0, deadline)) {
      call.give_up();
      fail_not_passed(rank);
    }
    return;
  }
  for (int p = 1; p < size; ++p) {
    call.receive(p);
  }
  std::vector<int> missing;
  for (int p = 1; p < size && (missing.empty() || wait_all_ranks); ++p) {
    if (!call.await(p, deadline)) {
      missing.push_back(p);
    }
  }
  if (!missing.empty()) {
    call.give_up();
    fail_without(missing, deadline, wait_all_ranks);
  }
  for (int p = 1; p < size; ++p) {
    call.notify(p);
  }
}

void monitored_barrier(
    Domain& domain,
    std::chrono::milliseconds timeout,
    bool wait_all_ranks) {
  const Deadline deadline(timeout);
  if (domain.rank() == 0) {
    lead(domain, deadline, wait_all_ranks);
  } else {
    follow(domain, deadline);
  }
}

} // namespace fusedpg
