#pragma once

#include <atomic>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "host/domain.hpp"
#include "kernels/kernels.hpp"

namespace fusedpg {

// Point to point inside a machine. A thread beside the collectives matches
// sends to receives by (source, tag) in the order they were posted; nothing it
// does waits for one particular peer, so any order of posts that can make
// progress does.
//
// A message travels in parts: in place when the sender's data lie in its arena,
// else through blocks of the arena, at most kWindow of them at a time. The
// receiver copies a part and acknowledges it.
class Mailbox {
 public:
  Mailbox(Domain& domain, const kernels::Table& kernels);
  ~Mailbox();

  static constexpr int kAnySource = -1;

  // Called once, from the mailbox's thread: the error or null, and the rank at
  // the other end.
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

  // Fails what is pending and ends the thread.
  void stop();

 private:
  enum Kind : uint32_t { kPart, kAck, kNack };

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
    size_t offset = 0; // of the next part
    size_t acknowledged = 0;
    bool started = false;
    std::deque<std::pair<void*, size_t>> parts{}; // in flight; null: in place
  };
  struct Receive {
    Post post;
    size_t received = 0;
    bool matched = false;
  };
  // A message whose first part has arrived.
  struct Incoming {
    uint64_t id;
    int tag;
    size_t total;
    std::deque<Message> parts;
    std::list<Receive>::iterator receive;
    bool matched = false;
  };
  struct Peer {
    std::list<Send> sends;
    std::list<Incoming> incoming;
    std::deque<Message> replies; // not yet written for want of room
    uint64_t next_id = 0;
  };

  void post(Post post);
  void loop();
  bool take_posts();
  std::vector<std::list<Receive>::iterator> collect_posts(bool last);
  bool give_up(const Error& error, bool stopping);
  bool progress();
  bool poll_inbox(int peer);
  void on_message(int peer, const Message& message);
  void on_reply(int peer, const Message& message);
  bool match(int peer, Incoming& incoming);
  bool match_receive(std::list<Receive>::iterator receive);
  void consume(int peer, std::list<Incoming>::iterator incoming);
  void check_source(const Post& post, int peer);
  bool push_sends(int peer);
  bool push_part(int peer, Send& send);
  void* allocate(uint64_t& bytes);
  void release(void* block);
  bool flush_replies(int peer);
  bool write(int peer, const Message& message);
  bool room(int peer);
  void finish_send(
      int peer,
      std::list<Send>::iterator send,
      std::exception_ptr error);
  void release_parts(Send& send);
  bool pending() const;
  bool unsent_replies() const;
  bool news();
  bool unread(int peer);
  void sleep();
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

  std::mutex posts_mutex_;
  std::deque<Post> posts_;
  bool closed_ = false; // the thread takes no more posts
  std::atomic<bool> have_posts_{false};
  std::atomic<bool> stop_{false};

  // Of the thread alone.
  Clock::time_point checked_ = Clock::now();
  std::vector<Peer> peers_;
  std::list<Receive> receives_; // posted and not yet complete, in order
  bool reserve_used_ = false;
  std::thread thread_;
};

} // namespace fusedpg
