#include "cuda/communicator.hpp"

#include <thread>

#include "base/error.hpp"

namespace fusedpg::cuda {
namespace {
constexpr std::chrono::microseconds kPoll{50};
} // namespace

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
    const NcclApi& api,
    const NcclUniqueId& id,
    int rank,
    int size,
    const Deadline& deadline)
    : api_(api) {
  NcclConfig config;
  const NcclResult result =
      api.comm_init_rank_config(&comm_, size, id, rank, &config);
  try {
    settle("ncclCommInitRank", result, deadline);
  } catch (const Error&) {
    abort();
    throw;
  }
}

Communicator::~Communicator() {
  abort();
}

void Communicator::settle(
    const char* what,
    NcclResult result,
    const Deadline& deadline) {
  while (result == kNcclInProgress) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (aborted_) {
        fail(ErrorKind::kAborted, "fused: {}: communicator aborted", what);
      }
      const NcclResult asked = api_.comm_get_async_error(comm_, &result);
      result = asked == kNcclSuccess ? result : asked;
    }
    if (result != kNcclInProgress) {
      break;
    }
    if (deadline.expired()) {
      fail(
          ErrorKind::kTimeout,
          "fused: {} did not return within {} ms; is every rank of the group "
          "alive and in the same call?",
          what,
          deadline.timeout().count());
    }
    std::this_thread::sleep_for(kPoll);
  }
  if (result != kNcclSuccess) {
    fail_nccl(what, result);
  }
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

void Communicator::fail_nccl(const char* what, NcclResult result) {
  fail(
      result == kNcclRemoteError ? ErrorKind::kPeerDead : ErrorKind::kSystem,
      "fused: {}: NCCL {}.{}.{} says: {}; NCCL_DEBUG=INFO tells more",
      what,
      api_.version / 10000,
      api_.version / 100 % 100,
      api_.version % 100,
      describe(result));
}

void Communicator::enqueue(
    const char* what,
    const Deadline& deadline,
    const std::function<NcclResult(NcclComm)>& call) {
  NcclResult result;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (aborted_) {
      fail(ErrorKind::kAborted, "fused: {}: communicator aborted", what);
    }
    result = call(comm_);
  }
  settle(what, result, deadline);
}

void Communicator::if_alive(const std::function<NcclResult(NcclComm)>& call) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!aborted_) {
    call(comm_);
  }
}

std::string Communicator::async_error() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (aborted_) {
    return "";
  }
  NcclResult error = kNcclSuccess;
  const NcclResult asked = api_.comm_get_async_error(comm_, &error);
  error = asked == kNcclSuccess ? error : asked;
  return error == kNcclSuccess || error == kNcclInProgress ? ""
                                                           : describe(error);
}

void Communicator::abort() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!aborted_) {
    aborted_ = true;
    if (comm_ != nullptr) {
      api_.comm_abort(comm_);
    }
  }
}

void Communicator::finish(const Deadline& deadline) {
  enqueue("ncclCommFinalize", deadline, api_.comm_finalize);
  std::lock_guard<std::mutex> lock(mutex_);
  if (!aborted_) {
    aborted_ = true; // gone
    api_.comm_destroy(comm_);
  }
}

} // namespace fusedpg::cuda
