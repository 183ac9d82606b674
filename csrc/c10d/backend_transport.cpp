#include "c10d/backend_transport.hpp"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include <ATen/ATen.h>
#include <pthread.h>

#include "base/error.hpp"
#include "base/options.hpp"

namespace fusedpg {
namespace {

// The tensor keeps the bytes for as long as the backend keeps the tensor.
at::Tensor tensor_of(const NetBuffer& buffer) {
  return at::from_blob(
      buffer.data(),
      {static_cast<int64_t>(buffer.bytes())},
      [owner = buffer.owner()](void*) {},
      at::kByte);
}

} // namespace

// A thread that interrupts waits which take long, so that who waits looks
// around and waits again. A time limit would not do: Gloo closes all
// connections when one passes.
class BackendTransport::Interrupter {
 public:
  Interrupter() : thread_([this] { run(); }) {}

  ~Interrupter() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

  // False: interrupted.
  bool wait(c10d::Work& work, std::chrono::milliseconds timeout) {
    begin(work);
    try {
      const bool done = work.wait(timeout);
      end();
      return done;
    } catch (...) {
      end();
      throw;
    }
  }

 private:
  // Every wait is interrupted after one to two of these.
  static constexpr std::chrono::milliseconds kLook{20};

  void begin(c10d::Work& work) {
    bool wake = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      waiting_ = &work;
      ++begun_;
      wake = std::exchange(asleep_, false);
    }
    if (wake) {
      changed_.notify_one();
    }
  }

  void end() {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_ = nullptr;
  }

  void run() {
    pthread_setname_np(pthread_self(), "fusedpg-look");
    std::unique_lock<std::mutex> lock(mutex_);
    uint64_t seen = 0;
    while (!stopping_) {
      // Notified only when nobody has waited for a while: messages that are
      // quick pay for no system call.
      asleep_ = waiting_ == nullptr && begun_ == seen;
      changed_.wait(lock, [&] { return !asleep_ || stopping_; });
      seen = begun_;
      changed_.wait_for(lock, kLook, [&] { return stopping_; });
      if (waiting_ != nullptr && begun_ == seen) {
        waiting_->abort(); // of this wait; the message itself goes on
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  c10d::Work* waiting_ = nullptr;
  uint64_t begun_ = 0;
  bool asleep_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

class BackendTransport::Request : public Transport::Request {
 public:
  Request(
      c10::intrusive_ptr<c10d::Work> work,
      std::string what,
      const BackendTransport& transport)
      : work_(std::move(work)),
        what_(std::move(what)),
        transport_(transport) {}

  void wait(const Deadline& deadline) override {
    while (!wait_once(deadline)) {
      if (transport_.aborted_) {
        fail(ErrorKind::kAborted, "fused: {}: the group was aborted", what_);
      }
      transport_.watch_();
    }
  }

 private:
  bool wait_once(const Deadline& deadline) {
    try {
      if (transport_.interrupter_) {
        return transport_.interrupter_->wait(*work_, deadline.left());
      }
      work_->wait(deadline.left());
      return true;
    } catch (const std::exception& error) {
      const ErrorKind kind = transport_.aborted_ ? ErrorKind::kAborted
          : deadline.expired()                   ? ErrorKind::kTimeout
                                                 : ErrorKind::kPeerFailed;
      fail(
          kind,
          "fused: {}{}{}",
          what_,
          deadline.expired()
              ? formatted(
                    ": not done within {} ms: ", deadline.timeout().count())
              : ": ",
          error.what());
    }
  }

  c10::intrusive_ptr<c10d::Work> work_;
  const std::string what_;
  const BackendTransport& transport_;
};

BackendTransport::BackendTransport(c10::intrusive_ptr<c10d::Backend> backend)
    : backend_(std::move(backend)) {}

BackendTransport::~BackendTransport() = default;

Transport::RequestPtr BackendTransport::send(
    int to,
    uint32_t tag,
    const NetBuffer& message) {
  std::vector<at::Tensor> tensors{tensor_of(message)};
  return post(
      formatted("a message from rank {} (here) to rank {}", rank(), to),
      [&] { return backend_->send(tensors, to, static_cast<int>(tag)); });
}

Transport::RequestPtr BackendTransport::receive(
    int from,
    uint32_t tag,
    const NetBuffer& into) {
  std::vector<at::Tensor> tensors{tensor_of(into)};
  return post(
      formatted("a message from rank {} to rank {} (here)", from, rank()),
      [&] { return backend_->recv(tensors, from, static_cast<int>(tag)); });
}

// A connection that is known to have ended fails here, not in a wait.
template <typename Call>
Transport::RequestPtr BackendTransport::post(
    std::string what,
    const Call& call) {
  try {
    return std::make_unique<Request>(call(), what, *this);
  } catch (const std::exception& error) {
    fail(
        aborted_ ? ErrorKind::kAborted : ErrorKind::kPeerFailed,
        "fused: {}: {}",
        what,
        error.what());
  }
}

void BackendTransport::set_watch(std::function<void()> watch) {
  watch_ = std::move(watch);
  try {
    interrupter_ = std::make_unique<Interrupter>();
  } catch (const std::system_error& error) {
    log_line(formatted(
        "no thread to look after this host's ranks while Gloo waits: {}",
        error.what()));
  }
}

void BackendTransport::abort() {
  aborted_ = true;
  backend_->abort();
}

} // namespace fusedpg
