#include "collectives/engine.hpp"

#include <algorithm>

#include "base/topology.hpp"

namespace fusedpg {
namespace {

// A share of the cores this process may use: the launcher knows how many ranks
// there are on this host, of which the group may hold only some.
int default_threads(int ranks, const Settings& settings) {
  return std::max(
      1, available_cpus() / std::max(ranks, settings.local_world_size));
}

} // namespace

const kernels::Table& select_kernels(const Settings& settings) {
  const std::string& isa = settings.isa;
  const kernels::Table* table =
      kernels::table(isa.empty() ? nullptr : isa.c_str());
  if (table == nullptr) {
    fail(
        ErrorKind::kInvalid,
        "fused: FUSEDPG_ISA={} names no instruction set of this build and CPU",
        isa);
  }
  return *table;
}

Engine::Engine(
    int rank,
    Bootstrap& bootstrap,
    const Settings& settings,
    Stats& stats,
    const Deadline& deadline)
    : kernels_(select_kernels(settings)),
      domain_(rank, bootstrap, settings, deadline),
      pool_(
          settings.threads > 0 ? settings.threads
                               : default_threads(domain_.size(), settings)),
      nan_check_(settings.nan_check),
      skip_{settings.block_skip, settings.block_size, {}},
      stats_(stats) {}

void Engine::check_failed() {
  if (domain_.failed()) {
    domain_.detach(); // another thread may still be at it; see mark_failed()
    fail(
        domain_.failure_kind(),
        "fused: this group has failed and must be destroyed; the failure was: "
        "{}",
        domain_.failure_reason());
  }
}

void Engine::execute(
    const Operation& op,
    uint64_t sequence,
    std::chrono::milliseconds timeout) {
  check_failed();
  Context ctx{
      {kernels_, pool_, Deadline(timeout), sequence, nan_check_, skip_, stats_},
      domain_};
  bool refused = false;
  try {
    try {
      domain_.prepare();
      op(ctx);
    } catch (const std::exception& error) {
      if (!ctx.entered) {
        refuse(ctx, describe_(error)); // throws on the peers only
        refused = true;
      }
      throw;
    }
    // Point to point may have failed meanwhile and given back the peers'
    // memory, which was being read or written.
    check_failed();
  } catch (const Error& error) {
    if (!refused && error.kind() != ErrorKind::kInvalid &&
        error.kind() != ErrorKind::kMismatch) {
      domain_.mark_failed(error);
    }
    throw;
  } catch (const std::exception& error) {
    if (!refused) {
      // Not foreseen (no memory, no thread): the peers are somewhere inside the
      // operation that this rank has left.
      domain_.mark_failed(Error(ErrorKind::kSystem, describe_(error)));
    }
    throw;
  }
}

void Engine::abort(Executor& executor) {
  domain_.request_abort();
  executor.run_unnumbered([this] {
    domain_.mark_failed(Error(
        ErrorKind::kAborted,
        formatted("fused: the group was aborted on rank {}", domain_.rank())));
  });
}

} // namespace fusedpg
