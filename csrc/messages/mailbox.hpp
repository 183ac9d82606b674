#pragma once

#include <atomic>
#include <bitset>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "base/fork.hpp"
#include "host/domain.hpp"
#include "kernels/kernels.hpp"
#include "messages/matching.hpp"

namespace fusedpg {

// Point to point inside a machine.
//
// The thread that holds `mutex_` moves messages: a thread that posts a small
// one, a thread that waits for one (move_until()), or the mailbox's own, which
// does what is left while nobody waits. Peers ring the thread that waits if
// there is one, and the mailbox's own only while it is concerned(): a wake-up
// costs more than a small message.
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
class Mailbox : public Messages {
 public:
  Mailbox(Domain& domain, const kernels::Table& kernels);
  ~Mailbox() override;

  enum Kind : uint32_t { kOffer, kPart, kTake, kAck, kNack }; // of Message

  // Calls no Done under a lock. Throws Error(kInvalid) in a forked child.
  void move_until(const std::function<bool()>& done, const Deadline& deadline)
      override;
  bool poll() override;
  void move_promptly() override;
  void stop() override;

 private:
  struct Send : PostedSend {
    bool offered = false;
    bool whole = false; // the receiver can read all of it from the offer
    bool taken = false; // the receiver waits for parts
    size_t offset = 0; // of the next part
    size_t acknowledged = 0;
    std::deque<std::pair<void*, size_t>> parts{}; // in flight: blocks, bytes
  };
  struct Receive : PostedReceive<Message> {
    size_t received = 0;
  };
  struct Peer {
    std::deque<Message> replies; // not yet written for want of room
    size_t staged = 0; // bytes of all parts in flight
  };
  struct Ended {
    Done done;
    std::exception_ptr error;
    int peer;
  };
  using SendAt = Matching<Send, Receive>::SendAt;
  using ReceiveAt = Matching<Send, Receive>::ReceiveAt;

  using Lock = std::unique_lock<std::mutex>;

  void post(MessagePost&& post) override;
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
  void wait_for_bell(
      const std::function<bool()>& done,
      const Deadline& deadline);
  void wake_thread();
  bool take_posts();
  ReceiveAt know_taken();
  void give_up(const Error& error);
  bool progress();
  bool poll_inbox(int peer);
  void on_part(int peer, const Message& part);
  void on_reply(int peer, const Message& reply);
  void accept(ReceiveAt receive);
  void copy(ReceiveAt receive, const Message& part);
  void finish_receive(ReceiveAt receive, std::exception_ptr error);
  void check_source(const MessagePost& post, int peer);
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
  void finish_send(int peer, SendAt send, std::exception_ptr error);
  void release_part(int peer, Send& send);
  void release_parts(int peer, Send& send);
  bool pending() const;
  bool concerned() const;
  bool unsent_replies() const;
  bool news(bool of_peers);
  bool unread(int peer);
  void sleep(Lock& lock);
  void check();
  void check(const MessagePost& post, int peer, const std::vector<bool>& gone);
  void fail_all(const Error& error);

  Domain& domain_;
  const kernels::Table& kernels_;
  const int me_;
  const Origin origin_{};

  PostQueue posts_; // closed: the domain may be gone
  std::atomic<bool> stop_{false};
  std::atomic<bool> prompt_{false}; // see move_promptly()
  std::atomic<bool> helped_{false}; // a thread is in move_until()

  // All below belongs to whoever holds this.
  std::mutex mutex_;
  std::vector<Ended> finished_; // their Done is to be called without it
  bool ended_ = false; // nothing here touches the domain any more
  bool announced_ = false; // peers are to ring the thread
  bool idle_ = false; // the thread sleeps for long
  std::vector<MessagePost> taken_; // posts, from the queue
  Clock::time_point last_post_ = Clock::now();
  Clock::time_point checked_ = Clock::now();
  Matching<Send, Receive> matching_;
  std::vector<Peer> peers_;
  int turn_ = 0; // the peer that progress() begins with
  bool reserve_used_ = false;
  std::bitset<kMailSlots> slots_used_;
  std::thread thread_;
};

} // namespace fusedpg
