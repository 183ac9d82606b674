#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace fusedpg {

// The threads that share the work of one collective. The caller is one of them;
// the others start with the first range that is worth splitting and inherit the
// caller's CPU affinity. One caller at a time.
class Pool {
 public:
  explicit Pool(int threads) : threads_(std::max(threads, 1)) {}
  ~Pool();

  int threads() const {
    return threads_;
  }

  // Calls fn(begin, end) for parts of [0, n) that start at multiples of
  // `align`, at least `grain` long, and returns when all are done. `fn` must
  // not throw.
  template <typename Fn>
  void run(size_t n, size_t align, size_t grain, Fn&& fn) {
    if (threads_ == 1 || n < 2 * grain) {
      fn(size_t(0), n);
      return;
    }
    run_split(n, align, grain, fn);
  }

 private:
  using Part = std::function<void(size_t, size_t)>;
  void run_split(size_t n, size_t align, size_t grain, const Part& fn);
  void work(int index);

  const int threads_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable start_;
  std::condition_variable done_;
  const Part* fn_ = nullptr;
  size_t n_ = 0;
  size_t part_ = 0;
  uint64_t round_ = 0;
  int running_ = 0;
  bool stop_ = false;
};

} // namespace fusedpg
