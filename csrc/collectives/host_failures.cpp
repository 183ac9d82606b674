#include "collectives/host_failures.hpp"

#include <algorithm>
#include <future>
#include <system_error>
#include <thread>
#include <vector>

#include "base/deadline.hpp"

namespace fusedpg {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPatience{600}; // for what the others say
// The store may have gone with its host, or be out of reach: it is given up if it
// has not taken this rank's word by then. One that has may be slow.
constexpr milliseconds kStorePatience{500};
constexpr milliseconds kSlowStore{250};
constexpr milliseconds kLook{10};
// Of larger groups only so many are asked.
constexpr int kMostAsked = 64;
constexpr size_t kLongest = 600; // characters of a reason

struct Failure {
  char letter; // see letter_of()
  std::string text;

  // Of what another rank has done, or has not.
  bool consequence() const {
    return letter != 'o';
  }
};

// 'o': a reason of its own. 't': it has waited for others until its time was over.
// 'c': a connection has ended, as that of a rank does which has failed. Who hears
// of that may write it down first. kPeerDead is no consequence: a rank knows that a
// process of its own host has ended.
char letter_of(ErrorKind kind) {
  return kind == ErrorKind::kTimeout   ? 't'
      : kind == ErrorKind::kPeerFailed ? 'c'
                                       : 'o';
}

// One rank's word: "<rank> <letter> <text>".
struct Word {
  int rank;
  char letter; // see letter_of()
  std::string text;
};

Word word_of(const std::string& text) {
  const size_t first = text.find(' ');
  return {
      std::stoi(text.substr(0, first)),
      text[first + 1],
      text.substr(first + 3)};
}

// Says why this rank has failed, and returns the first cause, as far as the
// others know it. `heard` is set in between.
std::string report_cause(
    Rendezvous& board,
    int rank,
    int size,
    const Failure& mine,
    bool asks,
    std::promise<void> heard) {
  const auto key = [](int64_t n) { return formatted("failed/{}", n); };
  const int64_t place = board.add("failed", 1);
  board.set(
      key(place),
      formatted("{} {} {}", rank, mine.letter, mine.text.substr(0, kLongest)));
  heard.set_value();
  if (!asks) {
    return "";
  }
  const Deadline deadline(kPatience);
  const int most = std::min(size, kMostAsked);
  std::vector<Word> words;
  while (true) {
    // Whatever was said before a failure that has its cause here is all there is
    // to hear of.
    const int64_t said = mine.consequence()
        ? std::min<int64_t>(board.add("failed", 0), most)
        : std::min<int64_t>(place - 1, most);
    while (static_cast<int64_t>(words.size()) < said) {
      words.push_back(word_of(board.get(key(words.size() + 1), deadline)));
      const Word& last = words.back();
      if (last.letter == 'o' && last.rank != rank) {
        return formatted(
            "the first cause is rank {}: {}", last.rank, last.text);
      }
    }
    if (!mine.consequence()) {
      return "";
    }
    if (said == most || deadline.expired()) {
      break;
    }
    std::this_thread::sleep_for(kLook);
  }
  // Who failed first has waited for somebody, too.
  auto first = std::find_if(words.begin(), words.end(), [](const Word& word) {
    return word.letter == 't';
  });
  first = first == words.end() ? words.begin() : first;
  std::string text;
  if (first->rank != rank) {
    text = formatted(
        "the first to fail was rank {}: {}", first->rank, first->text);
  }
  std::string silent;
  for (int p = 0; p < size && size <= kMostAsked; ++p) {
    if (std::none_of(words.begin(), words.end(), [p](const Word& word) {
          return word.rank == p;
        })) {
      silent += formatted("{}rank {}", silent.empty() ? "" : ", ", p);
    }
  }
  if (!silent.empty()) {
    text += formatted(
        "{}nothing was heard since from {}: ended, stopped, out of reach or "
        "not "
        "in this operation",
        text.empty() ? "" : "; ",
        silent);
  }
  return text;
}

} // namespace

HostFailures::HostFailures(
    std::shared_ptr<Rendezvous> store,
    const GroupBase& group)
    : store_(std::move(store)),
      group_(group) {}

std::optional<Error> HostFailures::known() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!failed_) {
    return std::nullopt;
  }
  return Error(
      failed_->kind(),
      formatted(
          "fused: this group has failed and must be destroyed; the failure "
          "was: {}",
          failed_->what()));
}

void HostFailures::check() const {
  if (const auto failure = known()) {
    throw Error(*failure);
  }
}

std::optional<ErrorKind> HostFailures::kind() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failed_ ? std::optional(failed_->kind()) : std::nullopt;
}

Error HostFailures::handle(
    const Error& error,
    const char* title,
    uint64_t ticket,
    const std::function<void()>& close) {
  if (const auto failure = known()) {
    return *failure;
  }
  Failure mine{letter_of(error.kind()), error.what()};
  const std::string prefix = "fused: ";
  if (mine.text.starts_with(prefix)) {
    mine.text = mine.text.substr(prefix.size());
  }
  const bool asks = error.kind() != ErrorKind::kAborted;
  // A store that does not answer keeps its thread, and not this one.
  std::promise<void> heard;
  std::future<void> taken = heard.get_future();
  std::packaged_task<std::string()> task([store = store_,
                                          rank = group_.rank,
                                          size = group_.size,
                                          mine,
                                          asks,
                                          heard = std::move(heard)]() mutable {
    return report_cause(*store, rank, size, mine, asks, std::move(heard));
  });
  std::future<std::string> answer = task.get_future();
  const Deadline last(kPatience + kSlowStore);
  std::string cause;
  bool told = true;
  try {
    std::thread(std::move(task)).detach();
  } catch (const std::system_error& no_thread) {
    told = false;
    cause = formatted("the others are not told why: {}", no_thread.what());
  }
  close();
  if (asks && told) {
    cause = "the store does not answer";
    try {
      // Ready also where the store has failed.
      if (taken.wait_for(kStorePatience) == std::future_status::ready &&
          answer.wait_for(last.left()) == std::future_status::ready) {
        cause = answer.get();
      }
    } catch (const std::exception& of_store) {
      cause = formatted(
          "the store fails, too: {}", group_.error_of(of_store).what());
    }
  }
  const std::string op =
      std::string(title).substr(std::string("fused:").size());
  const Error whole(
      error.kind(),
      formatted(
          "fused: {}, sequence number {}, on rank {}: {}{}{}",
          op,
          ticket,
          group_.rank,
          mine.text,
          cause.empty() ? "" : "; ",
          cause));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // With a text of its own: copies of an exception share theirs by a counter
    // of libstdc++, which a sanitizer for threads does not see.
    failed_.emplace(whole.kind(), std::string(whole.what()));
  }
  return whole;
}

void HostFailures::say_exit(const std::string& how) noexcept {
  std::promise<void> heard;
  std::future<void> taken = heard.get_future();
  const Failure mine{'o', how};
  try {
    std::thread([store = store_,
                 rank = group_.rank,
                 size = group_.size,
                 mine,
                 heard = std::move(heard)]() mutable {
      try {
        report_cause(
            *store, rank, size, mine, /*asks=*/false, std::move(heard));
      } catch (const std::exception&) {
        // The store has gone: nobody can hear of it.
      }
    }).detach();
    taken.wait_for(kStorePatience);
  } catch (const std::system_error&) {
    // No thread: peers see that a connection has ended.
  }
}

} // namespace fusedpg
