#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

#include "base/fork.hpp"
#include "hooks.hpp"

namespace fusedpg::fake {

// All memory that the process took from CUDA.
class Memory {
 public:
  int allocate(void** memory, size_t bytes);
  int release(void* memory);
  int host_allocate(void** memory, size_t bytes);
  int host_release(void* memory);

  void fill(Stats& stats);

 private:
  struct Deleter {
    void operator()(void* memory) const;
  };
  struct Block {
    std::unique_ptr<void, Deleter> memory;
    size_t bytes = 0;
  };
  static Block make(size_t bytes);
  static bool fits(const std::map<void*, Block>& blocks, size_t bytes);
  void inspect(const Block& freed);

  std::mutex mutex_;
  std::map<void*, Block> device_;
  std::map<void*, Block> host_;
  // Released memory is kept for a while, to see whether somebody writes to it.
  std::deque<Block> freed_;
  size_t freed_bytes_ = 0;
};

inline PerProcess<Memory> all_memory;
inline Memory& memory() {
  return all_memory.get();
}

} // namespace fusedpg::fake
