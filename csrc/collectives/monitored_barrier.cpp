#include "collectives/monitored_barrier.hpp"

#include <vector>

namespace fusedpg {
namespace {

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

// Waits for rank p; false when it did not come in time.
bool wait_for(
    Domain& domain,
    int p,
    const std::atomic<uint64_t>& counter,
    uint64_t target,
    const Deadline& deadline) {
  const auto ready = [&] {
    return counter.load(std::memory_order_acquire) >= target;
  };
  if (ready()) {
    return true;
  }
  try {
    domain.wait(
        domain.control(domain.rank()).mail_bell,
        descriptor(target),
        deadline,
        ready,
        [&](int q) { return q == p; });
    return true;
  } catch (const Error&) {
    return false;
  }
}

void lead(
    Domain& domain,
    uint64_t target,
    const Deadline& deadline,
    bool wait_all_ranks) {
  std::vector<int> missing;
  for (int p = 1; p < domain.size(); ++p) {
    if (wait_for(
            domain, p, domain.control(p).monitored_arrived, target, deadline)) {
      continue;
    }
    missing.push_back(p);
    if (!wait_all_ranks) {
      break;
    }
  }
  if (!missing.empty()) {
    std::ostringstream text;
    text << "fused: [Rank 0]: " << (wait_all_ranks ? "Ranks " : "Rank ");
    for (size_t i = 0; i < missing.size(); ++i) {
      text << (i ? ", " : "") << missing[i];
    }
    text << " failed to pass monitoredBarrier in " << deadline.timeout().count()
         << " ms";
    throw Error(ErrorKind::kTimeout, text.str());
  }
  domain.control(0).monitored_passed.store(target, std::memory_order_release);
  for (int p = 1; p < domain.size(); ++p) {
    ring(domain, p);
  }
}

} // namespace

void monitored_barrier(
    Domain& domain,
    std::chrono::milliseconds timeout,
    bool wait_all_ranks) {
  const Deadline deadline(timeout);
  RankControl& mine = domain.control(domain.rank());
  const uint64_t target =
      mine.monitored_arrived.fetch_add(1, std::memory_order_acq_rel) + 1;
  if (domain.rank() == 0) {
    lead(domain, target, deadline, wait_all_ranks);
    return;
  }
  ring(domain, 0);
  if (!wait_for(
          domain, 0, domain.control(0).monitored_passed, target, deadline)) {
    fail(
        ErrorKind::kTimeout,
        "fused: Rank ",
        domain.rank(),
        " successfully reached monitoredBarrier, but received errors while "
        "waiting for send/recv from rank 0. Please check rank 0 logs for "
        "faulty rank.");
  }
}

} // namespace fusedpg
