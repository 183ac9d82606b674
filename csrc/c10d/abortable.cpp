#include "c10d/abortable.hpp"

#include <algorithm>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>

#include "base/error.hpp"
#include "base/options.hpp"

namespace fusedpg {
namespace {

// A wait looks this often whether the group was aborted, and calls the watch.
constexpr std::chrono::milliseconds kLook{25};

[[noreturn]] void raise_aborted(int rank) {
  C10_THROW_ERROR(
      DistBackendError,
      formatted(
          "fused: the group was aborted on rank {} and must be destroyed",
          rank));
}

} // namespace

struct AbortableBackend::Flights {
  std::atomic<bool> aborted{false};
  // The limit of waits for messages: Gloo keeps the one it was connected with.
  std::atomic<std::chrono::milliseconds> timeout;
  std::mutex mutex;
  std::set<c10d::Work*> messages;
  std::mutex watch_mutex;
  std::function<void()> watch; // empty once the backend has gone

  void look() {
    std::lock_guard<std::mutex> lock(watch_mutex);
    if (watch) {
      watch();
    }
  }
};

namespace {

using Flights = AbortableBackend::Flights;

class AbortableWork : public c10d::Work {
 public:
  AbortableWork(
      c10::intrusive_ptr<c10d::Work> inner,
      std::shared_ptr<Flights> flights,
      int rank,
      bool message)
      : Work(rank, inner->retrieveOpType()),
        inner_(std::move(inner)),
        flights_(std::move(flights)),
        message_(message) {
    if (message_) {
      std::lock_guard<std::mutex> lock(flights_->mutex);
      flights_->messages.insert(inner_.get());
      if (flights_->aborted) {
        inner_->abort(); // its wait() returns at once
      }
    }
  }

  ~AbortableWork() override {
    if (message_) {
      std::lock_guard<std::mutex> lock(flights_->mutex);
      flights_->messages.erase(inner_.get());
    }
  }

  bool isCompleted() override {
    return inner_->isCompleted() || flights_->aborted;
  }
  bool isSuccess() const override {
    return inner_->isCompleted() && inner_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return inner_->exception();
  }
  int sourceRank() const override {
    return inner_->sourceRank();
  }
  std::vector<at::Tensor> result() override {
    return inner_->result();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return inner_->getFuture();
  }

  // Of a message: ends one wait, of now or later, which returns false. The
  // message goes on and can be waited for again.
  void abort() override {
    inner_->abort();
  }

  bool wait(std::chrono::milliseconds timeout) override {
    if (message_) {
      if (inner_->wait(
              timeout == kNoTimeout ? flights_->timeout.load() : timeout)) {
        return true;
      }
      if (flights_->aborted) {
        raise_aborted(rank_);
      }
      return false; // interrupted by abort() of this work
    }
    const auto end = std::chrono::steady_clock::now() + timeout;
    while (!inner_->isCompleted()) {
      if (flights_->aborted) {
        raise_aborted(rank_);
      }
      if (timeout != kNoTimeout) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(
            end - std::chrono::steady_clock::now());
        if (left <= kLook) {
          return inner_->wait(std::max(left, std::chrono::milliseconds(1)));
        }
      }
      try {
        return inner_->wait(kLook);
      } catch (const std::exception&) {
        // Of the slice, or of the operation: which is seen below.
      }
      if (!inner_->isCompleted()) {
        flights_->look();
      }
    }
    return inner_->wait();
  }

 private:
  const c10::intrusive_ptr<c10d::Work> inner_;
  const std::shared_ptr<Flights> flights_;
  const bool message_;
};

} // namespace

AbortableBackend::AbortableBackend(
    c10::intrusive_ptr<c10d::Backend> inner,
    std::chrono::milliseconds timeout,
    std::function<void()> watch)
    : Forwarding(inner->getRank(), inner->getSize()),
      name_(inner->getBackendName()),
      flights_(std::make_shared<Flights>()),
      inner_(std::move(inner)) {
  flights_->watch = std::move(watch);
  AbortableBackend::setTimeout(timeout);
}

// Works may be waited for after it.
AbortableBackend::~AbortableBackend() {
  std::lock_guard<std::mutex> lock(flights_->watch_mutex);
  flights_->watch = nullptr;
}

void AbortableBackend::abort() {
  std::lock_guard<std::mutex> lock(flights_->mutex);
  if (flights_->aborted.exchange(true)) {
    return;
  }
  for (c10d::Work* work : flights_->messages) {
    work->abort();
  }
  // Gloo's end waits for the end of what has begun, which may be its timeout.
  // Where there is no thread left for that it stays open.
  c10d::Backend* inner = inner_.release();
  try {
    std::thread([inner] {
      c10::intrusive_ptr<c10d::Backend>::reclaim(inner).reset();
    }).detach();
  } catch (const std::system_error& error) {
    log_line(formatted(
        "Gloo's connections stay open after an abort: {}", error.what()));
  }
}

void AbortableBackend::shutdown() {
  c10::intrusive_ptr<c10d::Backend> inner;
  {
    std::lock_guard<std::mutex> lock(flights_->mutex);
    inner = inner_;
  }
  if (inner) {
    inner->shutdown();
  }
}

void AbortableBackend::setTimeout(std::chrono::milliseconds timeout) {
  std::lock_guard<std::mutex> lock(flights_->mutex);
  flights_->timeout = timeout;
  if (inner_) {
    inner_->setTimeout(timeout);
  }
}

c10d::ErrorType AbortableBackend::getError() {
  return flights_->aborted ? c10d::ErrorType::COMM_ERROR
                           : c10d::ErrorType::SUCCESS;
}

c10::intrusive_ptr<c10d::Backend> AbortableBackend::inner() const {
  std::lock_guard<std::mutex> lock(flights_->mutex);
  if (!inner_) {
    raise_aborted(rank_);
  }
  return inner_;
}

WorkPtr AbortableBackend::wrap(WorkPtr work, bool message) const {
  if (!work) {
    return work;
  }
  return c10::make_intrusive<AbortableWork>(
      std::move(work), flights_, rank_, message);
}

} // namespace fusedpg
