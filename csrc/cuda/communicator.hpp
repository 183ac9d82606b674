#pragma once

#include <functional>
#include <mutex>
#include <string>

#include "base/deadline.hpp"
#include "cuda/nccl_api.hpp"

namespace fusedpg::cuda {

// One NCCL communicator. Its calls never block longer than their deadline,
// since NCCL is asked to work in the background (config.blocking = 0).
//
// Thread-safe; abort() may come from any thread at any time and makes the
// calls of others throw.
class Communicator {
 public:
  // Collective. `id` comes from rank 0's make_id().
  Communicator(
      const NcclApi& api,
      const NcclUniqueId& id,
      int rank,
      int size,
      const Deadline& deadline);
  ~Communicator(); // aborts unless finish() has been called
  Communicator(const Communicator&) = delete;

  static NcclUniqueId make_id(const NcclApi& api);

  // Enqueues one collective; `call` gets the communicator.
  void enqueue(
      const char* what,
      const Deadline& deadline,
      const std::function<NcclResult(NcclComm)>& call);

  // For what belongs to the communicator and goes with it.
  void if_alive(const std::function<NcclResult(NcclComm)>& call);

  // The communicator's own news of an error; empty: none.
  std::string async_error();
  void abort();
  // Collective: lets outstanding work end, then frees the communicator.
  void finish(const Deadline& deadline);

  const NcclApi& api() const {
    return api_;
  }

 private:
  // Waits until a call that runs in the background has ended.
  void settle(const char* what, NcclResult result, const Deadline& deadline);
  [[noreturn]] void fail_nccl(const char* what, NcclResult result);
  std::string describe(NcclResult result);

  const NcclApi& api_;
  std::mutex mutex_; // of the handle and of calls on it
  NcclComm comm_ = nullptr;
  bool aborted_ = false;
};

} // namespace fusedpg::cuda
