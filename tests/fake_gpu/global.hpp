#pragma once

#include <pthread.h>

#include <atomic>

#define FUSEDPG_FAKE_EXPORT extern "C" __attribute__((visibility("default")))

namespace fusedpg::fake {

// One T of this process, made on first use. Never destroyed: worker threads may
// run until the process ends. A forked child begins with a new one, because the
// threads that served (and locked) the parent's are not there.
template <typename T>
T& global() {
  static std::atomic<T*> instance{nullptr};
  T* found = instance.load(std::memory_order_acquire);
  if (found != nullptr) {
    return *found;
  }
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { instance.store(nullptr); });
  (void)registered;
  T* made = new T;
  if (instance.compare_exchange_strong(found, made)) {
    return *made;
  }
  delete made;
  return *found;
}

} // namespace fusedpg::fake
