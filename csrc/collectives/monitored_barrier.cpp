#include "collectives/monitored_barrier.hpp"

#include <vector>

namespace fusedpg {
namespace {

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
  } catch (const Error&) {
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
    std::ostringstream text;
    text << "fused: [Rank 0]: " << (wait_all_ranks ? "Ranks " : "Rank ");
    for (size_t i = 0; i < missing.size(); ++i) {
      text << (i ? ", " : "") << missing[i];
    }
    text << " failed to pass monitoredBarrier in " << deadline.timeout().count()
         << " ms: Rank 0 timed out in monitoredBarrier";
    throw Error(ErrorKind::kTimeout, text.str());
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
    fail(
        ErrorKind::kTimeout,
        "fused: Rank {} successfully reached monitoredBarrier, but received "
        "errors while waiting for send/recv from rank 0. Please check rank 0 "
        "logs for faulty rank.",
        domain.rank());
  }
}

} // namespace

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
