#include "host/pool.hpp"

namespace fusedpg {

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (std::thread& worker : workers_) {
    worker.join();
  }
}

void Pool::run_split(size_t n, size_t align, size_t grain, const Part& fn) {
  const size_t parts =
      std::min<size_t>(static_cast<size_t>(threads_), n / grain);
  const size_t part = ((n + parts - 1) / parts + align - 1) / align * align;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    while (workers_.size() + 1 < static_cast<size_t>(threads_)) {
      const int index = static_cast<int>(workers_.size()) + 1;
      workers_.emplace_back([this, index] { work(index); });
    }
    fn_ = &fn;
    n_ = n;
    part_ = part;
    running_ = threads_ - 1;
    ++round_;
  }
  start_.notify_all();
  fn(0, std::min(part, n));
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [&] { return running_ == 0; });
}

void Pool::work(int index) {
  uint64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    start_.wait(lock, [&] { return stop_ || round_ != seen; });
    if (stop_) {
      return;
    }
    seen = round_;
    const Part& fn = *fn_;
    const size_t begin = std::min(n_, part_ * static_cast<size_t>(index));
    const size_t end = std::min(n_, begin + part_);
    lock.unlock();
    if (begin < end) {
      fn(begin, end);
    }
    lock.lock();
    if (--running_ == 0) {
      done_.notify_one();
    }
  }
}

} // namespace fusedpg
