#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "base/deadline.hpp"
#include "base/dtype.hpp"
#include "cuda/cuda_api.hpp"
#include "cuda/nccl_api.hpp"

namespace fusedpg::cuda {

NcclDataType nccl_type(DType type);

// One NCCL communicator, which blocks: a call returns when its work is
// enqueued. Non-blocking ones start a thread for every call.
//
// A call may hang, where ranks have yet to connect and one of them is dead, and
// so may the end of a communicator: NCCL waits for kernels and, for ever, for
// captured graphs. So everything that ends it happens on a thread that nobody
// waits for without a deadline.
//
// Thread-safe; abort() may come from any thread at any time and makes the calls
// of others throw.
class Communicator {
 public:
  // What a call that waits does now and then; what it throws ends the wait.
  using Watch = std::function<void()>;

  // Collective. `id` comes from rank 0's make_id(). `watch` is used by
  // call_within().
  Communicator(
      const CudaApi& cuda,
      const NcclApi& api,
      int device,
      const NcclUniqueId& id,
      int rank,
      int size,
      const Deadline& deadline,
      Watch watch);
  ~Communicator(); // aborts unless finish() has been called
  Communicator(const Communicator&) = delete;

  static NcclUniqueId make_id(const NcclApi& api);

  using Call = std::function<NcclResult(NcclComm)>;
  // Makes a call; blocks for as long as NCCL does, or until abort().
  void call(const char* what, const Call& call);
  // The same on a thread of its own, for at most as long as the deadline and
  // the watch say; a call that has not returned by then may do so later, and the
  // communicator is aborted.
  void call_within(const char* what, const Deadline& deadline, Call call);

  // The communicator's own news of an error; empty: none.
  std::string async_error();

  // Both return at once; the first of them counts. `before` is called with the
  // communicator, before anything else is done with it.
  using Before = std::function<void(NcclComm)>;
  void abort(Before before = nullptr);
  // Collective: frees the communicator when its work and graphs have ended.
  void finish(Before before = nullptr);
  // Whether it has gone by then, after one of them.
  bool ended(const Deadline& deadline);
  // Kept until it has gone.
  void keep(std::shared_ptr<void> what);

 private:
  struct State;

  static NcclResult made_call(State& state, const char* what, const Call& call);
  void end(bool clean, Before before);
  void check(const char* what, NcclResult result);
  std::string describe(NcclResult result);

  const NcclApi& api_;
  const Watch watch_;
  const std::shared_ptr<State> state_; // which threads share
};

} // namespace fusedpg::cuda
