// The watchdog of the CUDA engine, and what ranks tell each other of a failure.

#include <cstring>

#include "base/error.hpp"
#include "cuda/engine.hpp"

namespace fusedpg::cuda {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLook{2}; // between looks at outstanding operations
// An operation that takes longer makes the watchdog look for other ranks'
// failures, which costs a message to the store.
constexpr milliseconds kSuspicious{1000};
constexpr milliseconds kAskRanks{2000};
// Longer than an answer of a store that works takes.
constexpr milliseconds kStorePatience{1000};

constexpr char kSaidEnd = '\n';
const char* const kFailedKey = "cuda/failed";
const char* const kFailures = "cuda/failures"; // how many

} // namespace

void CudaEngine::publish(ErrorKind kind, const std::string& message) const {
  // Of one failure all ranks hear from the rank that had it.
  if (size_ > 1 && kind != ErrorKind::kAborted &&
      kind != ErrorKind::kPeerFailed) {
    tell_failure(store_, rank_, message);
  }
}

void CudaEngine::tell_failure(
    const std::shared_ptr<Rendezvous>& store,
    int rank,
    const std::string& message) {
  // The store may have gone with its host.
  ask(store,
      [text = formatted("rank {}: {}", rank, message)](Rendezvous& there) {
        // The first cause is the one to hear of.
        if (there.add(kFailures, 1) == 1) {
          there.set(kFailedKey, text);
        }
        return std::string();
      })
      .wait_for(kStorePatience);
}

std::future<std::string> CudaEngine::ask(
    const std::shared_ptr<Rendezvous>& store,
    Question question) {
  std::packaged_task<std::string()> task(
      [store, question = std::move(question)] { return question(*store); });
  std::future<std::string> answer = task.get_future();
  std::thread(std::move(task)).detach();
  return answer;
}

std::optional<std::string> CudaEngine::ask_within(
    milliseconds patience,
    Question question) {
  const auto answered = [this](milliseconds within) {
    return asked_.wait_for(within) == std::future_status::ready;
  };
  if (asked_.valid() && !answered(milliseconds(0))) {
    return std::nullopt;
  }
  asked_ = ask(store_, std::move(question));
  return answered(patience) ? std::optional(asked_.get()) : std::nullopt;
}

// A rank's facts, and what it calls them.
CudaEngine::Said CudaEngine::tell_ranks(
    uint64_t sequence,
    const OpDescriptor& mine,
    const std::string& summary) {
  std::string text(sizeof mine, '\0');
  std::memcpy(text.data(), &mine, sizeof mine);
  text += summary;
  const auto tell = [=, size = size_, me = rank_](Rendezvous& store) {
    const auto key = [&](int p) {
      return formatted("cuda/said/{}/{}", sequence, p);
    };
    store.set(key(me), text);
    const Deadline deadline(kAskRanks);
    std::string all;
    std::string first;
    for (int p = 0; p < size; ++p) {
      std::string said = "does not answer";
      try {
        const std::string theirs = store.get(key(p), deadline);
        OpDescriptor there;
        if (theirs.size() >= sizeof there) {
          std::memcpy(&there, theirs.data(), sizeof there);
          said = theirs.substr(sizeof there);
          const bool known =
              mine.op != OpCode::kNone && there.op != OpCode::kNone;
          const std::string what = known ? difference(mine, there) : "";
          if (first.empty() && !what.empty()) {
            first = formatted(
                ", rank {} (here) and rank {} (there) in {}", me, p, what);
          }
        }
      } catch (const std::exception&) {
      }
      all += formatted("{}rank {}: {}", p == 0 ? "" : "; ", p, said);
    }
    return first + kSaidEnd + all;
  };
  const auto answer = ask_within(kAskRanks + kStorePatience, tell);
  if (!answer) {
    return {"unknown, the store does not answer", ""};
  }
  const size_t end = answer->find(kSaidEnd);
  return {answer->substr(end + 1), answer->substr(0, end)};
}

void CudaEngine::look_at_peers(const std::string& waiting) {
  if (check_peers_) {
    check_peers_(waiting);
  }
  if (size_ == 1) {
    return;
  }
  const auto failed = ask_within(kLook * 50, [](Rendezvous& store) {
    return store.has(kFailedKey) ? store.get(kFailedKey, Deadline(kAskRanks))
                                 : std::string();
  });
  if (failed && !failed->empty()) {
    fail(
        ErrorKind::kPeerFailed,
        "fused: {}: another rank has failed: {}",
        waiting,
        *failed);
  }
}

milliseconds CudaEngine::look() {
  OperationPtr first;
  {
    std::lock_guard<std::mutex> lock(watch_mutex_);
    if (in_flight_.empty()) {
      return milliseconds(0);
    }
    first = in_flight_.front();
  }
  const std::string where = formatted(
      "{} (sequence {}) on rank {} of {}",
      first->summary,
      first->sequence,
      rank_,
      size_);
  // Before the flag, which an operation sets before it ends.
  const bool ends = first->enqueued_.load(std::memory_order_acquire) &&
      !first->captured_ && !first->broken_;
  const int state = ends ? cuda_.event_query(first->end_.get()) : kNotReady;
  const uint64_t disagreed =
      __atomic_load_n(&flags_->mismatch, __ATOMIC_ACQUIRE);
  // Not if the first one is only about to be completed.
  const bool later = state == kSuccess && disagreed > first->sequence;
  if (disagreed != 0 && !later) {
    // Of what a graph holds, the facts are not known any more.
    OpDescriptor facts;
    std::string summary = first->summary;
    {
      std::lock_guard<std::mutex> lock(watch_mutex_);
      for (const OperationPtr& one : in_flight_) {
        if (one->sequence == disagreed) {
          facts = one->facts();
          summary = one->summary;
        }
      }
    }
    const Said said = tell_ranks(disagreed, facts, summary);
    fail_engine(
        ErrorKind::kMismatch,
        formatted(
            "fused: ranks disagree about operation {} of the group{}; {}. "
            "Every rank must call the same operations in the same order "
            "with the same sizes, types and hyperparameters",
            disagreed,
            said.difference,
            said.all));
    return kLook;
  }
  const std::string news = comm_ ? comm_->async_error() : "";
  if (!news.empty()) {
    fail_engine(
        ErrorKind::kPeerDead,
        formatted("fused: {}: NCCL reports: {}", where, news));
    return kLook;
  }
  if (state == kSuccess) {
    {
      std::lock_guard<std::mutex> lock(watch_mutex_);
      if (in_flight_.empty() || in_flight_.front() != first) {
        return kLook; // failed meanwhile
      }
      in_flight_.pop_front();
    }
    first->complete(nullptr);
    return kLook / kLook.count();
  }
  if (state != kNotReady) {
    fail_engine(
        ErrorKind::kSystem,
        formatted(
            "fused: {}: CUDA error: {}", where, cuda_.error_string(state)));
    return kLook;
  }
  const milliseconds timeout = first->deadline_.timeout();
  if (first->deadline_.expired()) {
    {
      // A captured one is ours no more when the capture has it.
      std::lock_guard<std::mutex> lock(watch_mutex_);
      if (in_flight_.empty() || in_flight_.front() != first) {
        return kLook;
      }
    }
    fail_engine(
        ErrorKind::kTimeout,
        formatted(
            "fused: {} did not finish within {} ms. Where ranks are: {}",
            where,
            timeout.count(),
            tell_ranks(first->sequence, first->facts(), first->summary).all));
    return kLook;
  }
  const auto waited = Clock::now() - first->begun_;
  if (waited > kSuspicious) {
    try {
      look_at_peers(where);
    } catch (const Error& error) {
      fail_engine(error.kind(), error.what());
      return kLook;
    }
  }
  return waited > kSuspicious ? kLook * 50 : kLook;
}

void CudaEngine::watch() {
  cuda_.set_device(device_);
  std::unique_lock<std::mutex> lock(watch_mutex_);
  while (!stopping_) {
    if (in_flight_.empty()) {
      watch_changed_.wait(
          lock, [this] { return stopping_ || !in_flight_.empty(); });
      continue;
    }
    lock.unlock();
    milliseconds pause = kLook;
    try {
      pause = look();
    } catch (const std::exception& error) {
      fail_engine(
          ErrorKind::kSystem, formatted("fused: watchdog: {}", error.what()));
    }
    lock.lock();
    if (!stopping_ && pause.count() > 1) {
      watch_changed_.wait_for(lock, pause, [this] { return stopping_; });
    }
  }
}

} // namespace fusedpg::cuda
