#include "cuda/communicator.hpp"

#include <algorithm>
#include <future>
#include <thread>
#include <utility>

#include "base/error.hpp"

namespace fusedpg::cuda {
namespace {

// Between looks at a communicator that NCCL_COMM_BLOCKING has made
// non-blocking.
constexpr std::chrono::microseconds kPoll{50};
// For a caller to come out of NCCL before an abort, which frees what it may be
// using. One that hangs comes out only by the abort.
constexpr std::chrono::milliseconds kComeOut{1000};
// Between looks at the other ranks while a call does not return.
constexpr std::chrono::milliseconds kWatch{100};

} // namespace

struct Communicator::State {
  State(const CudaApi& cuda, const NcclApi& api, int device)
      : cuda(cuda),
        api(api),
        device(device) {}

  const CudaApi& cuda;
  const NcclApi& api;
  const int device;
  std::mutex mutex; // of what follows; never held in a call that may block
  std::condition_variable changed;
  NcclComm comm = nullptr; // NCCL sets it before init has ended
  int inside = 0; // calls under way
  bool ending = false; // no new ones
  bool ended = false;
  std::vector<std::shared_ptr<void>> kept;

  NcclComm handle() {
    return __atomic_load_n(&comm, __ATOMIC_ACQUIRE);
  }
};

NcclUniqueId Communicator::make_id(const NcclApi& api) {
  NcclUniqueId id;
  const NcclResult result = api.get_unique_id(&id);
  if (result != kNcclSuccess) {
    fail(
        ErrorKind::kSystem,
        "fused: ncclGetUniqueId: {}",
        api.get_error_string(result));
  }
  return id;
}

Communicator::Communicator(
    const CudaApi& cuda,
    const NcclApi& api,
    int device,
    const NcclUniqueId& id,
    int rank,
    int size,
    const Deadline& deadline,
    Watch watch)
    : api_(api),
      watch_(std::move(watch)),
      state_(std::make_shared<State>(cuda, api, device)) {
  try {
    call_within(
        "ncclCommInitRank",
        deadline,
        [state = state_, id, rank, size](NcclComm) {
          NcclConfig config;
          return state->api.comm_init_rank_config(
              &state->comm, size, id, rank, &config);
        });
  } catch (...) {
    abort();
    throw;
  }
}

Communicator::~Communicator() {
  abort();
}

NcclResult Communicator::made_call(
    State& state,
    const char* what,
    const Call& call) {
  const auto check_ending = [&] { // locked
    if (state.ending) {
      fail(ErrorKind::kAborted, "fused: {}: communicator aborted", what);
    }
  };
  struct Inside {
    State& state;
    explicit Inside(State& of) : state(of) {
      ++state.inside;
    }
    Inside(const Inside&) = delete;
    ~Inside() {
      const std::lock_guard<std::mutex> lock(state.mutex);
      --state.inside;
      state.changed.notify_all();
    }
  };
  std::unique_lock<std::mutex> lock(state.mutex);
  check_ending();
  const Inside inside(state);
  lock.unlock(); // and not held again where ~Inside runs, which takes it
  NcclResult result = call(state.handle());
  while (result == kNcclInProgress) {
    std::this_thread::sleep_for(kPoll);
    // NCCL ends jobs that are done in there: never two threads at once.
    const std::lock_guard<std::mutex> asking(state.mutex);
    check_ending();
    const NcclResult asked =
        state.api.comm_get_async_error(state.handle(), &result);
    result = asked == kNcclSuccess ? result : asked;
  }
  return result;
}

void Communicator::call(const char* what, const Call& call) {
  check(what, made_call(*state_, what, call));
}

void Communicator::call_within(
    const char* what,
    const Deadline& deadline,
    Call call) {
  std::packaged_task<NcclResult()> task(
      [state = state_, what, call = std::move(call)] {
        state->cuda.set_device(state->device);
        return made_call(*state, what, call);
      });
  std::future<NcclResult> result = task.get_future();
  std::thread(std::move(task)).detach();
  const auto returned = [&] {
    const auto left = std::min<Clock::duration>(deadline.remaining(), kWatch);
    return result.wait_for(left) == std::future_status::ready;
  };
  while (!returned()) {
    if (!deadline.expired()) {
      try {
        watch_();
      } catch (...) {
        abort();
        throw;
      }
      continue;
    }
    abort();
    fail(
        ErrorKind::kTimeout,
        "fused: {} did not return within {} ms; is every rank of the group "
        "alive and in the same call?",
        what,
        deadline.timeout().count());
  }
  check(what, result.get());
}

std::string Communicator::describe(NcclResult result) {
  std::string text = api_.get_error_string(result);
  if (api_.get_last_error != nullptr) {
    const char* detail = api_.get_last_error(nullptr);
    if (detail != nullptr && *detail != '\0') {
      text += formatted(" ({})", detail);
    }
  }
  return text;
}

void Communicator::check(const char* what, NcclResult result) {
  if (result == kNcclSuccess) {
    return;
  }
  fail(
      result == kNcclRemoteError ? ErrorKind::kPeerDead : ErrorKind::kSystem,
      "fused: {}: NCCL {}.{}.{} says: {}; NCCL_DEBUG=INFO tells more",
      what,
      api_.version / 10000,
      api_.version / 100 % 100,
      api_.version % 100,
      describe(result));
}

std::string Communicator::async_error() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->ending) {
    return "";
  }
  NcclResult error = kNcclSuccess;
  const NcclResult asked = api_.comm_get_async_error(state_->handle(), &error);
  error = asked == kNcclSuccess ? error : asked;
  return error == kNcclSuccess || error == kNcclInProgress ? ""
                                                           : describe(error);
}

void Communicator::end(bool clean, Before before) {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    if (std::exchange(state_->ending, true)) {
      return;
    }
  }
  std::thread([state = state_, clean, before = std::move(before)] {
    state->cuda.set_device(state->device);
    {
      std::unique_lock<std::mutex> lock(state->mutex);
      state->changed.wait_for(
          lock, kComeOut, [&] { return state->inside == 0; });
    }
    const NcclApi& api = state->api;
    if (const NcclComm comm = state->handle()) {
      if (before) {
        before(comm);
      }
      if (!clean) {
        api.comm_abort(comm);
      } else {
        NcclResult result = api.comm_finalize(comm);
        while (result == kNcclInProgress) {
          std::this_thread::sleep_for(kPoll);
          const NcclResult asked = api.comm_get_async_error(comm, &result);
          result = asked == kNcclSuccess ? result : asked;
        }
        if (result == kNcclSuccess) {
          api.comm_destroy(comm);
        } else {
          api.comm_abort(comm); // a peer has gone first
        }
      }
    }
    std::vector<std::shared_ptr<void>> kept; // freed without the lock
    const std::lock_guard<std::mutex> lock(state->mutex);
    state->ended = true;
    kept.swap(state->kept);
    state->changed.notify_all();
  }).detach();
}

void Communicator::abort(Before before) {
  end(false, std::move(before));
}

void Communicator::finish(Before before) {
  end(true, std::move(before));
}

bool Communicator::ended(const Deadline& deadline) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  return state_->changed.wait_for(
      lock, deadline.remaining(), [this] { return state_->ended; });
}

void Communicator::keep(std::shared_ptr<void> what) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (!state_->ended) {
    state_->kept.push_back(std::move(what));
  }
}

} // namespace fusedpg::cuda
