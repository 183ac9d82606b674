#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

// A child of fork() has one thread, and copies of what all the others were in the
// middle of: locks that are never released, counts of threads that are not there,
// connections of its parent's. So
// - what belongs to one process knows where it was made (Origin), and is nothing
//   to a child;
// - what a process has one of begins anew in a child (PerProcess);
// - descriptors are closed in a child (Fd in base/fd.hpp).
namespace fusedpg {

// Counts the forks that have led to this process.
extern std::atomic<uint64_t> fork_generation;

// The process in which it was made. It costs a load, where getpid() is a system
// call.
class Origin {
 public:
  // Whether this is a child of that process.
  bool forked() const {
    return generation_ != fork_generation.load(std::memory_order_relaxed);
  }
  // Throws Error(kInvalid) there: for waits for what a parent has begun.
  void check_operation() const;

 private:
  uint64_t generation_ = fork_generation.load(std::memory_order_relaxed);
};

// For objects whose destructors wait for their threads: in a child it does nothing.
struct DeleteAtOrigin {
  Origin origin{};

  template <typename T>
  void operator()(T* object) const {
    if (!origin.forked()) {
      delete object;
    }
  }
};

class PerProcessBase {
 public:
  PerProcessBase(const PerProcessBase&) = delete;
  // In a child, before it does anything else.
  static void forget_all() noexcept;

 protected:
  PerProcessBase();
  ~PerProcessBase() = default;
  std::atomic<void*> object_{nullptr};

 private:
  PerProcessBase* next_;
};

// Holds one T a process, made when it is first asked for. The parent's stays as it
// is in a child's memory. Never destroyed: a detached thread may look at it while
// the process ends. For namespace scope only.
template <typename T>
class PerProcess : PerProcessBase {
 public:
  T& get() {
    void* object = object_.load(std::memory_order_acquire);
    if (object == nullptr) {
      auto fresh = std::make_unique<T>();
      if (object_.compare_exchange_strong(object, fresh.get())) {
        object = fresh.release();
      }
    }
    return *static_cast<T*>(object);
  }
};

} // namespace fusedpg
