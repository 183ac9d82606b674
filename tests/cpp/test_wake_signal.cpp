// A signal that other threads set ends a poll, each time, and no more often for long.

#include <poll.h>

#include <atomic>
#include <thread>

#include "check.hpp"
#include "net/wake_signal.hpp"

namespace {

using namespace fusedpg;

bool ends_a_poll(const WakeSignal& signal, int timeout_ms) {
  pollfd one{.fd = signal.fd(), .events = POLLIN, .revents = 0};
  return poll(&one, 1, timeout_ms) == 1;
}

TEST(wake_signal_is_never_lost) {
  constexpr int kTimes = 20000;
  const WakeSignal signal;
  std::atomic<int> said{0};
  std::atomic<int> heard{0};
  std::thread setter([&] {
    for (int i = 1; i <= kTimes; ++i) {
      said = i;
      signal.set();
      while (i % 64 == 0 && heard < i) {
        std::this_thread::yield(); // so that the other side sleeps at times
      }
    }
  });
  while (heard < kTimes) {
    if (!CHECK(ends_a_poll(signal, 10000))) {
      heard = kTimes;
      break;
    }
    signal.reset();
    heard = said.load();
  }
  setter.join();
  // The last reset may have come between the write and what is said of it.
  signal.reset();
  CHECK(!ends_a_poll(signal, 0));
  signal.set();
  CHECK(ends_a_poll(signal, 0));
  signal.reset();
  CHECK(!ends_a_poll(signal, 0));
}

} // namespace
