#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "comm.hpp"

namespace fusedpg::fake {

// One context of direct_create().
class Direct {
 public:
  Direct(
      std::shared_ptr<Comm> comm,
      std::shared_ptr<Window> window,
      int channel);
  ~Direct();

  void step(const cuda::DirectArgs& args);
  void sum(const cuda::DirectSumArgs& args);
  const std::shared_ptr<Comm>& comm() const {
    return comm_;
  }

 private:
  // What lies at the same place of another rank's arena.
  template <typename T>
  T* of_rank(T* mine, int rank, int other) const;
  void update_tile(const cuda::DirectArgs& args, uint32_t tile) const;
  // Elements [begin, begin + count) of the tile.
  void update_part(
      const cuda::DirectArgs& args,
      uint32_t tile,
      uint32_t begin,
      uint32_t count) const;
  void sum_blocks(const cuda::DirectSumArgs& args) const;
  void check_signals(cuda::DirectSignals* signals);
  // A kernel with two barriers.
  void run(
      const Announcement& announcement,
      cuda::DirectSignals* signals,
      const uint64_t* stop,
      const std::function<void()>& before,
      const std::function<void()>& between);

  const std::shared_ptr<Comm> comm_;
  const std::shared_ptr<Window> window_;
  const int channel_;
  std::mutex executing_;
  uint64_t next_sequence_ = 0;
  uint64_t barriers_ = 0;
};

// Of NCCL, that the fake claims to be compiled with.
int32_t direct_version();
int direct_create(
    const cuda::DirectCreateArgs* args,
    void** context,
    int* usable);
int direct_destroy(void* context);
int direct_step(const cuda::DirectArgs* args, cuda::Stream stream);
int direct_sum(const cuda::DirectSumArgs* args, cuda::Stream stream);

} // namespace fusedpg::fake
