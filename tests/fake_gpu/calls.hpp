#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "base/fork.hpp"
#include "hooks.hpp"

#define FUSEDPG_FAKE_EXPORT extern "C" __attribute__((visibility("default")))

namespace fusedpg::fake {

int64_t from_environment(const char* name, int64_t otherwise);

// Counts calls and mistakes, and holds the faults to be made.
class Calls {
 public:
  Calls();

  // Counts a call; returns what it must fail with, or 0.
  int enter(const char* function, int rank = -1);
  // How long the operation that begins now must sleep first.
  int begin(int rank);
  void worked() {
    ++work_;
  }

  void mistake(std::atomic<uint64_t>& counter, const std::string& text);
  int bad_handle(int code, const char* what);
  std::atomic<uint64_t> mismatches{0};
  std::atomic<uint64_t> bad_handles{0};
  std::atomic<uint64_t> freed_written{0};

  uint64_t count(const std::string& function);
  void add_fault(const std::string& function, int rank, int nth, int code);
  void fill(Stats& stats);
  void reset();

  // What every call of CUDA returns since a kernel has failed; nothing runs.
  std::atomic<int> sticky{0};
  // Microseconds.
  std::atomic<uint32_t> delay{0};
  std::atomic<uint32_t> seed{1};

 private:
  struct Fault {
    std::string function;
    int rank;
    int left;
    int code;
  };
  int take_fault(const std::string& function, int rank); // locked
  void read_environment(); // locked

  std::mutex mutex_;
  std::map<std::string, uint64_t> counts_;
  std::vector<Fault> faults_;
  uint64_t notes_ = 0;
  std::string note_;
  std::atomic<uint64_t> work_{0};
  std::atomic<uint64_t> begun_{0};
};

inline PerProcess<Calls> all_calls;
inline Calls& calls() {
  return all_calls.get();
}

} // namespace fusedpg::fake
