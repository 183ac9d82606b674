#include "base/while_waiting.hpp"

namespace fusedpg {
namespace {

thread_local WaitHook* waiting_hook = nullptr;

} // namespace

WaitHook::WaitHook() : outer_(waiting_hook) {
  waiting_hook = this;
}

WaitHook::~WaitHook() {
  waiting_hook = outer_;
}

void while_waiting() {
  if (waiting_hook == nullptr) {
    return;
  }
  const auto now = Clock::now();
  if (waiting_hook->next_ == Clock::time_point()) {
    waiting_hook->next_ = now + WaitHook::kInterval;
  } else if (now >= waiting_hook->next_) {
    waiting_hook->look();
    waiting_hook->next_ = Clock::now() + WaitHook::kInterval;
  }
}

bool has_wait_hook() {
  return waiting_hook != nullptr;
}

} // namespace fusedpg
