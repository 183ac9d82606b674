#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "net/tcp_listener.hpp"
#include "net/transport.hpp"

namespace fusedpg {

// Messages over sockets of TCP.
//
// A rank connects to another one when it first sends to it; what comes back has
// a connection of its own. A message is a header and its bytes, which are read
// where the receive wants them. One that comes before its receive stays in the
// connection, or in memory if what somebody waits for is behind it. A thread
// that waits moves all messages; nobody else does. After a failure all
// connections are closed before the error is thrown, so nothing writes to a
// buffer any more, and peers hear of it.
class TcpTransport : public Transport {
 public:
  struct Config {
    // Before a wait sleeps: what a peer takes between two messages of a large
    // operation, as waking up takes longer.
    std::chrono::microseconds spin{200};
    std::chrono::milliseconds farewell{
        2000}; // for what is under way at the end
  };

  // `addresses` are those of all ranks' endpoints. Connects to nobody.
  TcpTransport(
      const Config& config,
      std::unique_ptr<TcpEndpoint> endpoint,
      const std::vector<std::string>& addresses);
  // Knows nobody: see connect().
  TcpTransport(const Config& config, std::unique_ptr<TcpEndpoint> endpoint);
  TcpTransport(const TcpTransport&) = delete;
  // Returns when all that was sent is on its way, or after Config::farewell.
  ~TcpTransport() override;

  int rank() const override {
    return endpoint_->rank();
  }
  int size() const override {
    return endpoint_->size();
  }
  RequestPtr send(int to, uint32_t tag, const NetBuffer& message) override;
  RequestPtr receive(int from, uint32_t tag, const NetBuffer& into) override;
  void flush(const Deadline& deadline) override;
  bool progress() override;
  void set_watch(std::function<void()> watch) override {
    watch_ = std::move(watch);
  }
  void abort() override;
  void end() noexcept override;

  // --- for who connects to others as messages need them, and looks at requests
  // instead of waiting for them

  // This rank's endpoint, to which peers connect. They may do so whether or not
  // this rank connects to them.
  std::string address() const {
    return endpoint_->address();
  }
  void connect(int peer, const std::string& address);
  bool connected(int peer) const {
    return outs_[peer].address.has_value();
  }
  // Between true and false what is sent to this peer may be kept, to travel in
  // one go.
  void cork(int peer, bool on);
  // Nothing will come from this peer any more.
  bool lost(int peer);
  // Nothing can be sent to it.
  bool send_closed(int peer) const {
    return outs_[peer].state == Out::State::kLost;
  }
  // How the connections to this peer are, for an error: what was tried, what has
  // become of it, and what to look at. Empty: nothing to say.
  std::string describe(int peer) const;
  enum class State { kUnderWay, kDone, kLost };
  State state(const Request& request);
  // How to sleep until there may be something to do, while another thread uses
  // the transport: until the descriptor can be read, for at most so long. No
  // descriptor: there is something to do now.
  struct Sleep {
    int descriptor = -1;
    std::chrono::microseconds most{0};
    void run() const;
  };
  Sleep sleep(std::chrono::milliseconds most);
  // From any thread: ends such a sleep, now or the next one, until awake().
  void wake();
  void awake();
  // For one thread that uses the transport alone: sleeps so, and moves on.
  void wait_briefly(std::chrono::milliseconds most);

 private:
  struct Header {
    uint64_t bytes;
    uint32_t tag;
    uint32_t magic;
  };
  struct Operation {
    const int peer;
    const bool sends;
    const Header header;
    const NetBuffer buffer;
    bool done = false;
    uint64_t came = 0; // bytes of the message, where they differ
  };
  using OperationPtr = std::shared_ptr<Operation>;
  class TcpRequest;

  // Messages to a peer.
  struct Out {
    enum class State { kNone, kConnecting, kHandshake, kOpen, kLost };
    State state = State::kNone;
    std::optional<TcpAddress> address; // once it is known
    Fd socket;
    tcp::Hello hello{};
    tcp::Challenge challenge{};
    size_t heard = 0; // of the challenge
    std::string rest; // of the handshake, to be sent
    std::deque<OperationPtr> queue;
    size_t written = 0; // of the first one, with its header
    bool corked = false;
    bool polled_to_write = false;
    std::optional<Deadline> patience{}; // with a peer that is not there
    Clock::time_point retry_at{};
    Clock::time_point tried{}; // when it connected last
    Clock::time_point said_hello{};
    bool answered = false; // the last attempt
    bool was_open = false;
    std::string why; // it is lost, or does not let us in
  };
  // Messages from a peer.
  struct In {
    Fd socket;
    bool ended = false; // nothing will come any more
    bool polled = false;
    bool drained = false; // the socket, when it was read last
    std::string why; // it has ended
    std::vector<char> ahead; // what was read together with a header
    size_t begin = 0, end = 0; // of what is left of it
    bool inside = false; // a message, whose header is the next member
    Header header{};
    size_t got = 0; // of its bytes
    OperationPtr into; // null: nobody has asked for it yet
    NetBuffer early; // its memory then
    std::map<uint32_t, std::deque<OperationPtr>> posted; // by tag
    std::map<uint32_t, std::deque<NetBuffer>> waiting; // by tag
    size_t num_posted = 0;
    bool wanted() const {
      return inside || num_posted != 0;
    }
  };

  // All return whether anything has moved.
  bool turn(int timeout_ms);
  bool take_arrived();
  bool write_to(int peer);
  bool handshake(int peer);
  bool write_messages(int peer);
  bool read_from(int peer);
  bool take_read(int peer);
  bool read_some(int peer);
  ssize_t read_socket(int peer, char* into, size_t bytes);
  bool begin_message(int peer);
  void end_message(int peer);
  bool retry_connecting();

  void reach(int peer);
  void start_connecting(int peer);
  void retry_or_lose(int peer, const std::string& why);
  void retry_with_new_patience(int peer, const std::string& why);
  void lose(int peer, const std::string& why);
  void in_ended(int peer, const std::string& why);
  void note_loss(int peer, const std::string& why);
  void complete(Operation& receive, uint64_t came);
  void poll_out(int peer, bool to_write);
  void poll_in(int peer, bool on);
  bool over(const Operation& operation);
  template <typename Done>
  bool progress_until(const Deadline& deadline, const Done& done);
  void wait(Operation& operation, const Deadline& deadline);
  [[noreturn]] void give_up(const Operation& operation, const Deadline&);
  std::string losses(int peer) const;
  void check_usable(const Operation& operation);

  const Config config_;
  const std::unique_ptr<TcpEndpoint> endpoint_;
  std::function<void()> watch_;
  Fd poll_;
  WakeSignal wake_signal_;
  std::atomic<bool> aborted_{false};
  bool failed_ = false;
  std::vector<Out> outs_;
  std::vector<In> ins_;
  std::vector<std::pair<int, std::string>> lost_; // and why, in this order
  size_t retries_ = 0; // connections that are tried again
};

} // namespace fusedpg
