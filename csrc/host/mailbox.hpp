#pragma once

#include <atomic>
#include <bitset>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "base/fork.hpp"
#include "host/domain.hpp"
#include "kernels/kernels.hpp"

namespace fusedpg {

// Point to point inside a machine: matches sends to receives by (source, tag) in
// the order they were posted. Nothing in it waits for one particular peer, so any
// order of posts that can make progress does.
//
// Whoever holds `mutex_` moves messages: a thread that posts a small one, a
// thread that waits for one (move_until()), or the mailbox's own, which does what is
// left while nobody waits. Peers ring the thread that waits if there is one, and
// the mailbox's own only while it is concerned(): a wake-up costs more than a
// small message.
//
// The sender offers a message. The offer says where its data are if the receiver
// can read them: in the sender's arena, or, for a small message, copied to
// slots of their own if enough are free. Once a receive matches, the receiver copies
// those data and asks for all others (kTake), which then travel in parts through
// blocks of the sender's arena, or through the reserve if the arena is full. The
// receiver copies and acknowledges a part as soon as it comes. So a message that
// nobody receives holds nothing that another one needs, and one that somebody
// receives gives back what it holds without waiting for anybody but the
// receiver's thread.
class Mailbox {
 public:
  Mailbox(Domain& domain, const kernels::Table& kernels);
  ~Mailbox();

  static constexpr int kAnySource = -1;

  enum Kind : uint32_t { kOffer, kPart, kTake, kAck, kNack }; // of Message

  // Called once, from any thread that moves messages and without a lock: the
  // error or null, and the rank at the other end.
  using Done = std::function<void(std::exception_ptr, int)>;

  void send(
      const void* data,
      size_t bytes,
      int destination,
      int tag,
      std::chrono::milliseconds timeout,
      Done done);
  void receive(
      void* data,
      size_t bytes,
      int source,
      int tag,
      std::chrono::milliseconds timeout,
      Done done);

  // Moves messages on this thread until done() holds, which a Done brings about,
  // or until the deadline. Returns at once where another thread does so already,
  // or the mailbox has ended. Throws Error(kInvalid) in a forked child.
  void move_until(const std::function<bool()>& done, const Deadline& deadline);
  // Moves what can be moved now. False where another thread is at it.
  bool poll();
  // From now on the thread ends messages as soon as they can, though nobody calls
  // move_until() for them.
  void hurry();

  // Fails what is pending and ends the thread. Later calls do nothing.
  void stop();

 private:
  struct Post {
    bool sends;
    char* data;
    size_t bytes;
    int peer; // or kAnySource
    int tag;
    Deadline deadline;
    Done done;
  };
  struct Send {
    Post post;
    uint64_t id;
    bool offered = false;
    bool whole = false; // the receiver can read all of it from the offer
    bool taken = false; // the receiver waits for parts
    size_t offset = 0; // of the next part
    size_t acknowledged = 0;
    std::deque<std::pair<void*, size_t>> parts{}; // in flight: blocks, bytes
  };
  struct Receive {
    Post post;
    size_t received = 0;
    bool matched = false;
  };
  // A message that has been offered to this rank.
  struct Incoming {
    Message offer;
    std::list<Receive>::iterator receive; // once matched
    bool matched = false;
  };
  struct Peer {
    std::list<Send> sends;
    std::list<Incoming> incoming;
    std::deque<Message> replies; // not yet written for want of room
    size_t staged = 0; // bytes of all parts in flight
    uint64_t next_id = 0;
  };

  using Lock = std::unique_lock<std::mutex>;

  void post(Post post);
  void loop();
  void end(Lock& lock);
  bool move_for_a_while(
      const std::function<bool()>& done,
      const Deadline& deadline);
  bool turn();
  void settle(Lock& lock);
  void ring_waiter();
  void enter();
  bool leave();
  void nap(const std::function<bool()>& done, const Deadline& deadline);
  void wake_thread();
  bool take_posts();
  std::vector<std::list<Receive>::iterator> collect_posts(bool last);
  void give_up(const Error& error);
  bool progress();
  bool poll_inbox(int peer);
  void on_offer(int peer, const Message& offer);
  void on_part(int peer, const Message& part);
  void on_reply(int peer, const Message& reply);
  void match_receive(std::list<Receive>::iterator receive);
  void accept(int peer, std::list<Incoming>::iterator incoming);
  void copy(
      int peer,
      std::list<Incoming>::iterator incoming,
      const Message& part);
  void finish_receive(
      int peer,
      std::list<Incoming>::iterator incoming,
      std::exception_ptr error);
  void finish(Done done, std::exception_ptr error, int peer);
  void check_source(const Post& post, int peer);
  bool push_sends(int peer);
  void push_offer(int peer, Send& send);
  bool push_part(int peer, Send& send);
  void* allocate(uint64_t& bytes);
  void* take_slots(size_t bytes);
  void mark_slots(size_t first, size_t count, bool used);
  uint64_t offset_of(const void* block) const;
  void add_part(int peer, Send& send, void* block, size_t bytes);
  bool flush_replies(int peer);
  bool write(int peer, const Message& message);
  bool room(int peer);
  void finish_send(
      int peer,
      std::list<Send>::iterator send,
      std::exception_ptr error);
  void release_part(int peer, Send& send);
  void release_parts(int peer, Send& send);
  bool pending() const;
  bool concerned() const;
  bool unsent_replies() const;
  bool news(bool of_peers);
  bool unread(int peer);
  void sleep(Lock& lock);
  void check();
  void check(const Post& post, const std::vector<bool>& gone);
  std::exception_ptr with_name(
      const std::exception_ptr& error,
      const Post& post) const;
  void fail_all(const std::exception_ptr& error);
  std::string name(const Post& post) const;

  Domain& domain_;
  const kernels::Table& kernels_;
  const int me_;
  const Origin origin_{};

  std::mutex posts_mutex_;
  std::deque<Post> posts_;
  bool closed_ = false; // no more posts, and the domain may be gone
  std::atomic<bool> have_posts_{false};
  std::atomic<bool> stop_{false};
  std::atomic<bool> prompt_{false}; // see hurry()
  std::atomic<bool> helped_{false}; // a thread is in move_until()

  // All below belongs to whoever holds this.
  std::mutex mutex_;
  std::vector<std::function<void()>> finished_; // to be called without it
  bool ended_ = false; // nothing here touches the domain any more
  bool announced_ = false; // peers are to ring the thread
  bool idle_ = false; // the thread sleeps for long
  Clock::time_point last_post_ = Clock::now();
  Clock::time_point checked_ = Clock::now();
  std::vector<Peer> peers_;
  std::list<Receive> receives_; // posted and not yet complete, in order
  int turn_ = 0; // the peer that progress() begins with
  bool reserve_used_ = false;
  std::bitset<kMailSlots> slots_used_;
  std::thread thread_;
};

} // namespace fusedpg
