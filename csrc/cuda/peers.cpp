// What the ranks of an engine tell each other by the store, and calls of NCCL,
// which may hang where another rank has died.

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/error.hpp"
#include "cuda/engine.hpp"

namespace fusedpg::cuda {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kAskRanks{2000};
// Longer than an answer of a store that works takes.
constexpr milliseconds kStorePatience{1000};
// Between looks at the store.
constexpr milliseconds kFirstPause{1};
constexpr milliseconds kLongestPause{50};
// Between looks at the other ranks while a call does not return.
constexpr milliseconds kWatch{100};
// Between looks at a communicator that does not block.
constexpr std::chrono::microseconds kPoll{50};

constexpr char kSaidEnd = '\n';
const char* const kFailedKey = "cuda/failed";
const char* const kFailures = "cuda/failures"; // how many
const char* const kDiffers = "differs"; // no rank's failure

NcclResult finish_call(
    const NcclApi& nccl,
    NcclComm comm,
    const std::function<NcclResult(NcclComm)>& call) {
  NcclResult result = call(comm);
  while (result == kNcclInProgress) {
    std::this_thread::sleep_for(kPoll);
    const NcclResult asked = nccl.comm_get_async_error(comm, &result);
    result = asked == kNcclSuccess ? result : asked;
  }
  return result;
}

void check_nccl(const NcclApi& nccl, const char* what, NcclResult result) {
  if (result == kNcclSuccess) {
    return;
  }
  const char* detail =
      nccl.get_last_error != nullptr ? nccl.get_last_error(nullptr) : nullptr;
  fail(
      result == kNcclRemoteError ? ErrorKind::kPeerDead : ErrorKind::kSystem,
      "fused: {}: NCCL {}.{}.{} says: {}{}; NCCL_DEBUG=INFO tells more",
      what,
      nccl.version / 10000,
      nccl.version / 100 % 100,
      nccl.version % 100,
      nccl.get_error_string(result),
      detail != nullptr && *detail != '\0' ? formatted(" ({})", detail)
                                           : std::string());
}

} // namespace

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
  const std::lock_guard<std::mutex> lock(asking_);
  const auto answered = [this](milliseconds within) {
    return asked_.wait_for(within) == std::future_status::ready;
  };
  if (asked_.valid() && !answered(milliseconds(0))) {
    return std::nullopt;
  }
  asked_ = ask(store_, std::move(question));
  return answered(patience) ? std::optional(asked_.get()) : std::nullopt;
}

std::vector<std::string> CudaEngine::tell_all(
    const char* key,
    const std::string& mine,
    const Deadline& deadline,
    const char* waiting) {
  store_->set(formatted("{}{}", key, rank_), mine);
  std::vector<std::string> all;
  for (int p = 0; p < size_; ++p) {
    all.push_back(hear(formatted("{}{}", key, p), p, deadline, waiting));
  }
  return all;
}

std::string CudaEngine::hear(
    const std::string& key,
    int rank,
    const Deadline& deadline,
    const char* waiting) {
  for (milliseconds pause = kFirstPause;;
       pause = std::min(2 * pause, kLongestPause)) {
    const auto text = ask_within(kLongestPause, [key](Rendezvous& store) {
      return store.has(key) ? '+' + store.get(key, Deadline(kLongestPause))
                            : std::string();
    });
    if (text && !text->empty()) {
      return text->substr(1);
    }
    look_at_peers(waiting);
    if (deadline.expired()) {
      fail(
          ErrorKind::kTimeout,
          "fused: rank {} has not come to {} on a GPU within {} ms",
          rank,
          waiting,
          deadline.timeout().count());
    }
    std::this_thread::sleep_for(pause);
  }
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
  std::optional<std::string> answer;
  try {
    answer = ask_within(kAskRanks + kStorePatience, tell);
  } catch (const std::exception&) { // the failure at hand says more
  }
  if (!answer) {
    return {"unknown, the store does not answer", ""};
  }
  const size_t end = answer->find(kSaidEnd);
  return {answer->substr(end + 1), answer->substr(0, end)};
}

void CudaEngine::look_at_peers(
    const std::string& waiting,
    const Operation* operation) {
  if (check_peers_) {
    check_peers_(waiting);
  }
  if (size_ == 1) {
    return;
  }
  std::string turn;
  std::string mine;
  if (operation != nullptr) {
    turn = formatted("{} ", operation->sequence);
    mine = formatted("{}{}", turn, hash_of(operation->facts()));
  }
  const auto look = [turn,
                     mine,
                     known = known_calls_,
                     me = rank_,
                     next = (rank_ + 1) % size_](Rendezvous& store) {
    if (store.has(kFailedKey)) {
      return store.get(kFailedKey, Deadline(kAskRanks));
    }
    std::string& theirs = known->next;
    if (mine.empty()) {
      return std::string();
    }
    const auto key = [](int rank) { return formatted("cuda/call/{}", rank); };
    if (known->mine != mine) {
      store.set(key(me), mine);
      known->mine = mine;
    }
    // Once they have agreed about an operation there is nothing to ask.
    if (theirs != mine && (!theirs.empty() || store.has(key(next)))) {
      theirs = store.get(key(next), Deadline(kAskRanks));
    }
    const bool differs = theirs.starts_with(turn) && theirs != mine;
    return std::string(differs ? kDiffers : "");
  };
  const auto found = ask_within(kWatch, look);
  if (found == kDiffers) {
    fail_mismatch(operation->sequence, operation->facts(), operation->summary);
  } else if (found && !found->empty()) {
    fail(
        ErrorKind::kPeerFailed,
        "fused: {}: another rank has failed: {}",
        waiting,
        *found);
  }
}

void CudaEngine::call_nccl(const char* what, const NcclCall& call) const {
  check_nccl(nccl_, what, finish_call(nccl_, comm_, call));
}

void CudaEngine::call_nccl_within(
    const char* what,
    const Deadline& deadline,
    const NcclCall& call) {
  const NcclResult result = call_watched<NcclResult>(
      [&cuda = cuda_,
       &nccl = nccl_,
       device = device_,
       comm = comm_,
       keep = carrier_->keep(),
       call] {
        cuda.set_device(device);
        return finish_call(nccl, comm, call);
      },
      kWatch,
      [&] {
        if (deadline.expired()) {
          fail(
              ErrorKind::kTimeout,
              "fused: {} did not return within {} ms; is every rank of the "
              "group alive and in the same call?",
              what,
              deadline.timeout().count());
        }
        look_at_peers(what);
      });
  check_nccl(nccl_, what, result);
}

} // namespace fusedpg::cuda
