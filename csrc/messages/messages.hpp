#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.hpp"
#include "base/error.hpp"

namespace fusedpg {

// How often a mailbox checks whether waiting is in vain; how long its thread sleeps
// where nothing is pending; how long it stays at the end for what it owes to peers.
inline constexpr std::chrono::milliseconds kMailLook{20};
inline constexpr std::chrono::milliseconds kMailIdle{500};
inline constexpr std::chrono::milliseconds kMailStopPatience{1000};

// A send or a receive that a thread has posted.
struct MessagePost {
  // A mailbox calls it once, on a thread that moves messages: with the error or
  // null, and the rank at the other end.
  using Done = std::function<void(std::exception_ptr, int)>;
  static constexpr int kAnySource = -1;
  enum class What { kSend, kNotify, kReceive, kWithdraw }; // see NetMailbox

  What what;
  char* data;
  size_t bytes;
  int peer; // or kAnySource
  int tag;
  Deadline deadline;
  Done done;

  bool sends() const {
    return what == What::kSend || what == What::kNotify;
  }
  bool may_come_from(int rank) const {
    return peer == rank || peer == kAnySource;
  }
  // For errors: "recv(8 bytes, tag 0, from rank 1)".
  std::string name() const;
};

// The errors of messages, all on rank `me`.
Error receive_mismatch(const MessagePost&, int me, int from, size_t sent);
Error send_mismatch(const MessagePost&, int me, int to, size_t expected);
// `state`: what else is known of the other side, or empty.
Error late_message(const MessagePost&, int me, const std::string& state = "");
Error stopped_messages(int me);
// The error of another operation, or of the group, for this message.
std::exception_ptr error_of(const Error&, const MessagePost&, int me);

// The sends and receives of a rank, from any thread. A message goes to the first
// receive, in the order in which they were posted, of its tag and from its sender or
// from any rank. No post waits for one particular peer, so any order of posts that can
// make progress does.
class Messages {
 public:
  using Done = MessagePost::Done;
  static constexpr int kAnySource = MessagePost::kAnySource;

  virtual ~Messages() = default;

  // Throw where the mailbox takes no more posts, and call `done` then never. The data
  // must stay until `done` is called.
  void send(
      const void* data,
      size_t bytes,
      int destination,
      int tag,
      std::chrono::milliseconds timeout,
      Done done) {
    auto* from = static_cast<char*>(const_cast<void*>(data));
    const auto what = MessagePost::What::kSend;
    const Deadline deadline(timeout);
    post({what, from, bytes, destination, tag, deadline, std::move(done)});
  }
  void receive(
      void* data,
      size_t bytes,
      int source,
      int tag,
      std::chrono::milliseconds timeout,
      Done done) {
    auto* into = static_cast<char*>(data);
    const auto what = MessagePost::What::kReceive;
    const Deadline deadline(timeout);
    post({what, into, bytes, source, tag, deadline, std::move(done)});
  }

  // Moves messages on this thread until done() holds, which a Done brings about, or
  // until the deadline. Returns earlier where the mailbox has ended, or another thread
  // moves messages already.
  virtual void move_until(
      const std::function<bool()>& done,
      const Deadline& deadline) = 0;
  // Moves what can be moved now. False where another thread does, or nobody needs to.
  virtual bool poll() {
    return false;
  }
  // From now on the mailbox's thread ends messages as soon as they can, though nobody
  // calls move_until() for them.
  virtual void move_promptly() {}
  // Fails what is pending and ends the thread. Later calls do nothing.
  virtual void stop() = 0;

 protected:
  virtual void post(MessagePost&& post) = 0;
};

// Posts on their way from any thread to the one that moves messages.
class PostQueue {
 public:
  // Throws after close().
  void push(MessagePost&& post, int me);
  // Into a vector whose memory is used again: there are many posts of few.
  void take(std::vector<MessagePost>& posts);
  // Takes the last ones. `why` there are no more is told to whoever comes later.
  void close(const Error& why, std::vector<MessagePost>& posts);
  bool empty() const {
    return !any_.load(std::memory_order_acquire);
  }
  // Nobody closes it meanwhile.
  template <typename F>
  void if_open(const F& call) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_) {
      call();
    }
  }

 private:
  void take_locked(std::vector<MessagePost>& posts);

  std::mutex mutex_;
  std::vector<MessagePost> posts_;
  std::optional<Error> closed_;
  std::atomic<bool> any_{false};
};

} // namespace fusedpg
