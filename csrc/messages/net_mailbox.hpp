#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/timed_mutex.hpp"
#include "messages/matching.hpp"
#include "net/tcp_transport.hpp"

namespace fusedpg {

// Point to point between the ranks of a group that spans machines, as Mailbox
// is inside one: beside the collectives, with connections of its own. A thread
// that waits for a message moves all of them, and a thread that posts one sends
// at once if it can: to wake another thread takes longer than a small message.
// Messages that nobody waits for are moved by the mailbox's thread.
//
// A rank tells the receiver of a message before it sends it, and hears when it
// has arrived or is not as long as expected. A large message, or one more when
// many have not been received, is sent when the receiver asks for it, so a
// message that nobody receives costs the receiver little memory. It asks as
// soon as it posts a large receive from one rank, also before it knows of a
// message. A rank that asks has a receive of that length and says nothing else:
// the send is complete when the network has its bytes. It travels in pieces, of
// which few are under way, so that what a rank has to tell meanwhile, of a
// message the other way for example, does not wait for all of it. Nobody
// connects to more ranks than it has messages for, or waits for: to a rank that
// has none for this one too, so that its end shows.
class NetMailbox : public Messages {
 public:
  using Connect = std::function<std::unique_ptr<TcpTransport>()>;

  // `addresses`: of all ranks' mailboxes. `check` throws when waiting is in vain;
  // `gone` tells of a rank that this one is not connected to whether it has ended;
  // `failed` hears why the mailbox, and with it the group, has failed, and returns
  // what it has to say to that.
  NetMailbox(
      int rank,
      int size,
      Connect connect,
      std::vector<std::string> addresses,
      std::function<void()> check,
      std::function<bool(int)> gone,
      std::function<Error(const Error&)> failed);
  ~NetMailbox() override;

  // An empty message whose arrival nobody waits for. It has no deadline.
  void notify(int destination, int tag);
  // Receives of this tag that have met no message end with kAborted, and what is
  // still to be notified is not.
  void withdraw(int tag);

  // Calls every Done while it moves messages. Goes on beside other threads that wait.
  void move_until(const std::function<bool()>& done, const Deadline& deadline)
      override;

  // Has the thread look whether waiting is in vain.
  void wake();
  void stop() override;

 private:
  // kMessage: its bytes follow. kOffer: they wait for kRequest, or for
  // kReceivePosted: a receive of so many bytes, which the first message from this
  // id on will meet.
  enum Kind : uint32_t {
    kHello,
    kMessage,
    kOffer,
    kRequest,
    kReceivePosted,
    kAck,
    kUnexpected
  };
  struct Note {
    uint32_t kind;
    int32_t tag;
    uint64_t id; // counts the sender's messages to this receiver
    uint64_t bytes; // of the message; of kUnexpected, what was expected
    uint64_t spare = 0; // see below
  };
  // A note, its header and the header of the message that follows take 64 bytes.
  // AMD's `rep movsb` is a tenth as fast if a copy's destination lies 1 to 15
  // bytes further into its page than its source. Large tensors begin 64 bytes into
  // a page, and messages at the start of one.
  static_assert(sizeof(Note) == 32);
  struct Send : PostedSend {
    bool told = false;
    bool offered = false; // it is sent once it is requested
    bool asked = false; // for these bytes
    bool met = false; // a large receive that the other side has posted
    Clock::time_point posted = Clock::now();
    bool due = false; // bytes from `begun` on are to be sent
    size_t begun = 0;
    bool unasked = false; // counted in its peer's
    std::optional<Note> answer{};
    std::deque<Transport::RequestPtr> data{}; // pieces under way
  };
  struct Receive : PostedReceive<Note> {
    bool told = false; // the sender knows of it
    NetBuffer scratch{}; // of a message that is too long or too short
    std::deque<Transport::RequestPtr> data{}; // pieces that have not come
  };
  struct Peer {
    std::deque<Note> notes; // to be sent, before messages that are due
    NetBuffer note; // the next one
    Transport::RequestPtr listening;
    uint64_t heard = 0; // messages of which this rank knows
    std::deque<Note>
        posted; // large receives at the other side, without one yet
    size_t unasked = 0; // bytes sent that may not have been received yet
  };
  using What = MessagePost::What;

  void post(MessagePost&& post) override;
  void loop();
  void begin();
  // Moves what can be moved; whether there was anything. Only the thread connects.
  enum class By { kThread, kPoster, kWaiter };
  bool turn(By by);
  bool sleep(int before);
  bool take_posts();
  bool progress(By by);
  bool hear(int peer);
  void take(int peer, const Note& note);
  static void requested(Send& send);
  bool needs(int peer) const;
  bool reach(int peer);
  bool push(int peer, By by);
  bool awaits_large(int peer) const;
  void learn_of_receive(int peer, const Note& note);
  void announce(Receive& receive);
  void withdraw_now(int tag);
  void found(Receive& receive);
  // Drops the first ones that are done; returns whether none is left.
  bool drop_done(std::deque<Transport::RequestPtr>& pieces);
  bool finish_receives(By by);
  bool finish_sends(int peer);
  bool finish_notes();
  void check();
  void check(const MessagePost& post, int peer, bool to_be_sent);
  bool pending() const;
  bool owes() const;
  bool may_leave();
  void give_up(Error error, bool stopping);
  void end(const MessagePost& post, const Error& error) const;

  const int me_;
  const Connect connect_;
  const std::vector<std::string> addresses_;
  const std::function<void()> check_;
  const std::function<bool(int)> gone_;
  const std::function<Error(const Error&)> failed_;

  PostQueue posts_; // closed: everything has ended
  std::condition_variable called_changed_;
  std::mutex mutex_; // of the next two
  bool called_ = false; // the thread, from its sleep
  // The thread that holds `moving_` uses it; any thread may wake it.
  std::shared_ptr<TcpTransport> transport_;
  std::atomic<bool> stop_{false};

  // Held by the thread that moves messages; before the other mutex.
  TimedMutex moving_;
  std::atomic<int> waiters_{0}; // that move messages
  std::atomic<Clock::rep> waited_{0}; // when one of them did last
  std::atomic<bool> looks_soon_{false}; // the thread
  std::atomic<uint32_t> moves_{0}; // counts turns in which something moved
  std::atomic<bool> asks_{false}; // a rank is to be connected to
  // The first moment at which a large message is held back no longer.
  std::optional<Clock::time_point> held_{};
  std::exception_ptr trouble_; // that one of them has met: the thread's now
  bool open_ = false; // there is a transport, and no end yet
  std::optional<Deadline> patience_; // at the end
  Clock::time_point checked_ = Clock::now();
  std::vector<MessagePost> taken_; // posts, from the queue
  Matching<Send, Receive> matching_;
  std::vector<Peer> peers_;
  std::deque<Transport::RequestPtr> sent_notes_;
  std::thread thread_;
};

} // namespace fusedpg
