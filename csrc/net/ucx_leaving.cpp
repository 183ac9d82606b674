#include "net/ucx_leaving.hpp"

#include <pthread.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <list>
#include <mutex>
#include <system_error>
#include <thread>

namespace fusedpg {
namespace {

constexpr std::chrono::milliseconds kMoment{1};
constexpr std::chrono::microseconds kPause{500};

struct Leaving {
  std::unique_ptr<UcxWorker> worker;
  Deadline farewell;

  bool over() {
    return worker->has_left() || farewell.expired();
  }
};

// The workers of groups that are gone, and the thread that makes progress on
// them while there are any.
class Lounge {
 public:
  static Lounge& instance() {
    static auto* lounge = new Lounge();
    return *lounge;
  }

  // False: there is no thread to be had.
  bool take(Leaving& leaving) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    try {
      if (closed_) {
        return false;
      }
      const bool forked = owner_ != getpid(); // without the thread
      if (!running_ || forked) {
        if (thread_.joinable()) {
          forked ? thread_.detach() : thread_.join();
        }
        thread_ = std::thread([this] { work(); });
        owner_ = getpid();
        running_ = true;
      }
      arrived_.push_back(std::move(leaving));
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }

 private:
  Lounge() {
    // Before the destructors of UCX, whose library was loaded earlier.
    std::atexit([] { instance().close(); });
  }

  void close() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    // A forked child has no such thread.
    if (thread_.joinable() && owner_ == getpid()) {
      thread_.join();
    }
  }

  void work() {
    sigset_t all; // signals are for the threads of the program
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
    pthread_setname_np(pthread_self(), "fusedpg-leave");
    std::list<Leaving> here;
    while (true) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        here.splice(here.end(), arrived_);
        if (here.empty()) {
          running_ = false;
          return;
        }
      }
      here.remove_if([](Leaving& leaving) { return leaving.over(); });
      std::this_thread::sleep_for(kPause);
    }
  }

  std::mutex mutex_; // of all but here
  std::list<Leaving> arrived_;
  bool running_ = false;
  bool closed_ = false;
  pid_t owner_ = 0;
  std::thread thread_;
};

} // namespace

void leave(
    std::unique_ptr<UcxWorker> worker,
    const Deadline& farewell) noexcept {
  worker->begin_leaving();
  Leaving leaving{std::move(worker), farewell};
  const Deadline moment(kMoment);
  while (!leaving.over()) {
    if (moment.expired() && !leaving.worker->borrows() &&
        Lounge::instance().take(leaving)) {
      return;
    }
  }
}

} // namespace fusedpg
