#include "base/fork.hpp"

#include <pthread.h>
#include <unistd.h>

#include <mutex>

#include "base/error.hpp"
#include "base/fd.hpp"

namespace fusedpg {
namespace {

constinit PerProcessBase* all_per_process = nullptr;
// Shared while a descriptor is opened or closed, exclusive while the process forks,
// which goes first: by default threads that keep opening some could hold it up.
constexpr pthread_rwlock_t kFreeGate =
    PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;
constinit pthread_rwlock_t fork_gate = kFreeGate;
thread_local int holds = 0; // of this thread
// Guards the list of open descriptors.
constinit std::mutex descriptors_mutex;

} // namespace

constinit std::atomic<uint64_t> fork_generation{0};
constinit Fd* Fd::first_ = nullptr;

void Origin::check_operation() const {
  if (forked()) {
    fail(
        ErrorKind::kInvalid,
        "fused: this process was forked after the operation had begun; it ends "
        "in the parent only");
  }
}

PerProcessBase::PerProcessBase()
    : next_(std::exchange(all_per_process, this)) {}

void PerProcessBase::forget_all() noexcept {
  for (PerProcessBase* one = all_per_process; one; one = one->next_) {
    one->object_.store(nullptr, std::memory_order_relaxed);
  }
}

// --- descriptors -------------------------------------------------------------

NoFork::NoFork() {
  if (holds++ == 0) {
    pthread_rwlock_rdlock(&fork_gate);
  }
}

NoFork::~NoFork() {
  if (--holds == 0) {
    pthread_rwlock_unlock(&fork_gate);
  }
}

Fd::Fd(int fd, const NoFork& /* since it was opened */) : fd_(fd) {
  if (fd_ >= 0) {
    const std::lock_guard<std::mutex> lock(descriptors_mutex);
    link();
  }
}

void Fd::link() {
  next_ = first_;
  link_ = &first_;
  if (next_ != nullptr) {
    next_->link_ = &next_;
  }
  first_ = this;
}

void Fd::unlink() {
  *link_ = next_;
  if (next_ != nullptr) {
    next_->link_ = link_;
  }
}

void Fd::take(Fd& other) noexcept {
  if (other.fd_ >= 0) {
    const std::lock_guard<std::mutex> lock(descriptors_mutex);
    other.unlink();
    fd_ = std::exchange(other.fd_, -1);
    link();
  }
}

void Fd::reset() {
  if (fd_ >= 0) {
    const NoFork hold;
    {
      const std::lock_guard<std::mutex> lock(descriptors_mutex);
      unlink();
    }
    close(std::exchange(fd_, -1));
  }
}

void Fd::close_all() noexcept {
  for (Fd* one = first_; one != nullptr; one = one->next_) {
    close(std::exchange(one->fd_, -1));
  }
  first_ = nullptr;
}

// --- around a fork -----------------------------------------------------------

namespace {

void before_fork() {
  pthread_rwlock_wrlock(&fork_gate);
  descriptors_mutex.lock();
}

void after_fork_in_parent() {
  descriptors_mutex.unlock();
  pthread_rwlock_unlock(&fork_gate);
}

void after_fork_in_child() {
  fork_generation.fetch_add(1, std::memory_order_relaxed);
  PerProcessBase::forget_all();
  Fd::close_all();
  descriptors_mutex.unlock();
  pthread_rwlock_unlock(&fork_gate);
  fork_gate = kFreeGate; // threads that wait for it are not here
}

[[maybe_unused]] const int registered =
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);

} // namespace

} // namespace fusedpg
