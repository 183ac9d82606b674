#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "calls.hpp"
#include "cuda_runtime.h"
#include "streams.hpp"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define FUSEDPG_FIBER_STARTS(fake, stack, bytes) \
  __sanitizer_start_switch_fiber(fake, stack, bytes)
#define FUSEDPG_FIBER_RUNS(fake, stack, bytes) \
  __sanitizer_finish_switch_fiber(fake, stack, bytes)
#define FUSEDPG_UNCHECKED __attribute__((no_sanitize("address")))
#else
#define FUSEDPG_FIBER_STARTS(fake, stack, bytes) (void)0
#define FUSEDPG_FIBER_RUNS(fake, stack, bytes) (void)0
#if defined(__SANITIZE_THREAD__)
// To it the fibers of a thread are that thread. It counts calls and returns, of
// which a fiber's first function has but one.
#define FUSEDPG_UNCHECKED __attribute__((no_sanitize("thread")))
#else
#define FUSEDPG_UNCHECKED
#endif
#endif

// Pushes the registers that a function must keep, and takes up those of the
// stack `to`. (ucontext makes two system calls.)
extern "C" void fusedpg_simt_switch(void** from, void* to);
#if defined(__x86_64__)
constexpr size_t kKept = 8; // words; the last one is for the alignment
constexpr size_t kReturn = 6;
asm(R"(
.text
.type fusedpg_simt_switch, @function
fusedpg_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fusedpg_simt_switch, .-fusedpg_simt_switch
)");
#elif defined(__aarch64__)
constexpr size_t kKept = 20;
constexpr size_t kReturn = 11; // x30
asm(R"(
.text
.type fusedpg_simt_switch, %function
fusedpg_simt_switch:
  stp x19, x20, [sp, #-160]!
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  ldp x19, x20, [sp], #160
  ret
.size fusedpg_simt_switch, .-fusedpg_simt_switch
)");
#else
#error "no switch of fibers for this machine"
#endif

constinit thread_local dim3 threadIdx(0, 0, 0);
constinit thread_local dim3 blockIdx(0, 0, 0);
constinit thread_local dim3 blockDim;
constinit thread_local dim3 gridDim;

namespace fusedpg::simt {

namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kMostThreads = 256;
// Blocks whose threads are there at once, so that one that waits for other
// ranks need not keep this rank from going on. All ranks have the same ones.
constexpr unsigned kResident = 8;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t kLeastStack = size_t(256) << 10;
#else
constexpr size_t kLeastStack = size_t(64) << 10;
#endif
// The tops of stacks are to lie in different sets of the caches.
constexpr size_t kStackBytes = kLeastStack + 13 * 64;
constexpr size_t kStacksAtOnce = 64;
constexpr uint64_t kCanary = 0x5afe57acc0ffee11;

// Stacks that no fiber has; kept, as their pages are touched.
class Stacks {
 public:
  void take(std::vector<char*>& stacks) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) {
      void* memory = mmap(
          nullptr,
          kStacksAtOnce * kStackBytes,
          PROT_READ | PROT_WRITE,
          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
          -1,
          0);
      if (memory == MAP_FAILED) {
        std::perror("stacks of fibers");
        std::abort();
      }
      for (size_t i = 0; i < kStacksAtOnce; ++i) {
        free_.push_back(static_cast<char*>(memory) + i * kStackBytes);
        std::memcpy(free_.back(), &kCanary, sizeof kCanary);
      }
    }
    const size_t count = std::min(kStacksAtOnce, free_.size());
    stacks.insert(stacks.end(), free_.end() - count, free_.end());
    free_.resize(free_.size() - count);
  }
  void give_back(const std::vector<char*>& stacks) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.insert(free_.end(), stacks.begin(), stacks.end());
  }

 private:
  std::mutex mutex_;
  std::vector<char*> free_;
};

PerProcess<Stacks> all_stacks;

struct Block;

struct Fiber {
  unsigned thread = 0;
  Block* block = nullptr;
  void* sp = nullptr;
  char* stack = nullptr;
  void* fake = nullptr; // of the address sanitizer
};

// Where threads wait for each other.
struct Meeting {
  std::vector<Fiber*> there;
  // Of those that are there, and of those who met last: nobody can come to the
  // next one before he has read it.
  bool all = true;
  bool all_met = true;
};

struct Block {
  struct Shared {
    const void* key;
    std::unique_ptr<std::max_align_t[]> memory;
  };
  unsigned number = 0;
  unsigned ended = 0;
  Meeting everybody;
  std::vector<Shared> shared;
  std::vector<Fiber> fibers;
};

struct Grid {
  dim3 blocks;
  dim3 threads;
};

// Runs one launch on the calling thread.
class Machine {
 public:
  Machine(const Grid& grid, const std::function<void()>& run, uint32_t launch)
      : grid_(grid),
        run_(run),
        launch_(launch),
        random_(fake::calls().seed * 7919 + launch) {}
  ~Machine() {
    all_stacks.get().give_back(stacks_);
  }
  Machine(const Machine&) = delete;

  void run() {
    gridDim = grid_.blocks;
    blockDim = grid_.threads;
    for (unsigned b = 0; b < grid_.blocks.x; b += kResident) {
      run_blocks(b, std::min(kResident, grid_.blocks.x - b));
    }
  }

  // Of the running fiber, which goes on when it is ready again.
  void leave() {
    Fiber& fiber = *running_;
    FUSEDPG_FIBER_STARTS(&fiber.fake, stack_, stack_bytes_);
    fusedpg_simt_switch(&fiber.sp, sp_);
    FUSEDPG_FIBER_RUNS(fiber.fake, nullptr, nullptr);
  }
  Block& block() const {
    return *running_->block;
  }
  void pause() {
    paused_.push_back(running_);
    leave();
  }
  void meet(Meeting& at, size_t size) {
    at.there.push_back(running_);
    if (at.there.size() == size) {
      ready_.insert(ready_.end(), at.there.begin(), at.there.end());
      at.there.clear();
      at.all_met = at.all;
      at.all = true;
    }
    leave();
  }
  [[noreturn]] void fail(const char* what, const char* other) {
    std::fprintf(
        stderr,
        "a kernel: %s, %s; block %u, thread %u, launch %u, "
        "FUSEDPG_FAKE_SEED %u\n",
        what,
        other,
        running_->block->number,
        running_->thread,
        launch_,
        fake::calls().seed.load());
    std::abort();
  }

 private:
  void run_blocks(unsigned first, unsigned count);
  void begin(Fiber& fiber);
  FUSEDPG_UNCHECKED static void enter();
  void check_ended(const std::vector<Block>& blocks);

  const Grid grid_;
  const std::function<void()>& run_;
  const uint32_t launch_; // how many this thread has run
  std::minstd_rand random_;
  std::vector<Fiber*> ready_;
  std::vector<Fiber*> paused_;
  std::vector<char*> stacks_;
  Fiber* running_ = nullptr;
  bool over_ = false; // whether the fiber that ran last has ended
  // Of the thread itself.
  void* sp_ = nullptr;
  const void* stack_ = nullptr;
  size_t stack_bytes_ = 0;
};

thread_local Machine* machine __attribute__((tls_model("initial-exec"))) =
    nullptr;

void Machine::begin(Fiber& fiber) {
  if (stacks_.empty()) {
    all_stacks.get().take(stacks_);
  }
  fiber.stack = stacks_.back();
  stacks_.pop_back();
  auto* top = reinterpret_cast<void**>(fiber.stack + kStackBytes) - 2;
  void** kept = top - kKept;
  std::memset(kept, 0, kKept * sizeof(void*));
  kept[kReturn] = reinterpret_cast<void*>(&Machine::enter);
  fiber.sp = kept;
}

void Machine::enter() {
  FUSEDPG_FIBER_RUNS(nullptr, &machine->stack_, &machine->stack_bytes_);
  machine->run_();
  machine->over_ = true;
  FUSEDPG_FIBER_STARTS(nullptr, machine->stack_, machine->stack_bytes_);
  fusedpg_simt_switch(&machine->running_->sp, machine->sp_);
  __builtin_unreachable();
}

void Machine::run_blocks(unsigned first, unsigned count) {
  std::vector<Block> blocks(count);
  for (unsigned b = 0; b < count; ++b) {
    blocks[b].number = first + b;
    blocks[b].fibers.resize(grid_.threads.x);
    for (unsigned t = 0; t < grid_.threads.x; ++t) {
      Fiber& fiber = blocks[b].fibers[t];
      fiber.thread = t;
      fiber.block = &blocks[b];
      ready_.push_back(&fiber);
    }
  }
  for (unsigned idle = 0; !ready_.empty() || !paused_.empty();) {
    if (ready_.empty()) {
      // Other ranks may have to run.
      ++idle < 32 ? sched_yield() : usleep(20);
      ready_.swap(paused_);
    }
    std::swap(ready_[random_() % ready_.size()], ready_.back());
    running_ = ready_.back();
    ready_.pop_back();
    threadIdx.x = running_->thread;
    blockIdx.x = running_->block->number;
    if (running_->stack == nullptr) {
      begin(*running_);
    }
    [[maybe_unused]] void* fake = nullptr;
    FUSEDPG_FIBER_STARTS(&fake, running_->stack, kStackBytes);
    fusedpg_simt_switch(&sp_, running_->sp);
    FUSEDPG_FIBER_RUNS(fake, nullptr, nullptr);
    if (over_) {
      over_ = false;
      uint64_t canary = 0;
      std::memcpy(&canary, running_->stack, sizeof canary);
      if (canary != kCanary) {
        fail("stack", "overflow");
      }
      stacks_.push_back(running_->stack);
      ++running_->block->ended;
    }
  }
  check_ended(blocks);
}

void Machine::check_ended(const std::vector<Block>& blocks) {
  for (const Block& block : blocks) {
    if (block.ended == grid_.threads.x) {
      continue;
    }
    fail("a barrier", "which not all threads come to");
  }
}

thread_local unsigned at_once = 0; // blocks

} // namespace

AtOnce::AtOnce(unsigned most) {
  at_once = most;
}
AtOnce::~AtOnce() {
  at_once = 0;
}

cudaError_t launch(
    const cudaLaunchConfig_t& config,
    std::function<void()> run) {
  Grid grid{config.gridDim, config.blockDim};
  if (at_once != 0) {
    grid.blocks.x = std::min(grid.blocks.x, at_once);
  }
  if (grid.blocks.x == 0 || grid.blocks.y * grid.blocks.z != 1 ||
      grid.threads.x == 0 || grid.threads.x > kMostThreads ||
      grid.threads.x % kWarp != 0 || grid.threads.y * grid.threads.z != 1) {
    return cudaErrorInvalidConfiguration;
  }
  fake::calls().enter((std::to_string(grid.blocks.x) + " blocks").c_str());
  const auto work = [grid, run = std::move(run)] {
    thread_local uint32_t launches = 0;
    Machine here(grid, run, ++launches);
    machine = &here;
    here.run();
    machine = nullptr;
  };
  if (at_once != 0) {
    work();
    return cudaSuccess;
  }
  return static_cast<cudaError_t>(
      fake::streams().enqueue(config.stream, work, fake::current_device()));
}

// So seldom that a kernel which is told to stop by a word that it seldom looks
// at soon does.
void yield() {
  thread_local unsigned looks = 0;
  if (++looks % 16 == 0) {
    machine->pause();
  }
}

bool meet_block(bool vote) {
  Meeting& here = machine->block().everybody;
  here.all = here.all && vote;
  machine->meet(here, blockDim.x);
  return here.all_met;
}

void* shared(const void* key, size_t bytes) {
  Block& block = machine->block();
  for (const Block::Shared& part : block.shared) {
    if (part.key == key) {
      return part.memory.get();
    }
  }
  const size_t words = (bytes - 1) / sizeof(std::max_align_t) + 1;
  block.shared.push_back({key, std::make_unique<std::max_align_t[]>(words)});
  void* made = block.shared.back().memory.get();
  std::memset(made, 0xa5, words * sizeof(std::max_align_t));
  return made;
}

} // namespace fusedpg::simt
