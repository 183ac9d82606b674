#include "calls.hpp"

#include <cstdlib>
#include <cstring>

namespace fusedpg::fake {

namespace {

// The name of the fault that is a stall.
constexpr const char* kStall = "stall";

bool covers(int wanted, int rank) {
  return wanted < 0 || wanted == rank;
}

} // namespace

int64_t from_environment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise : std::atoll(text);
}

Calls::Calls() {
  read_environment();
}

void Calls::read_environment() {
  delay = static_cast<uint32_t>(from_environment("FUSEDPG_FAKE_DELAY_US", 200));
  seed = static_cast<uint32_t>(from_environment("FUSEDPG_FAKE_SEED", 1));
}

int Calls::take_fault(const std::string& function, int rank) {
  for (auto fault = faults_.begin(); fault != faults_.end(); ++fault) {
    if (fault->function == function && covers(fault->rank, rank) &&
        --fault->left == 0) {
      const int code = fault->code;
      faults_.erase(fault);
      return code;
    }
  }
  return 0;
}

int Calls::enter(const char* function, int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++counts_[function];
  return take_fault(function, rank);
}

int Calls::begin(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++begun_;
  return take_fault(kStall, rank);
}

void Calls::mistake(std::atomic<uint64_t>& counter, const std::string& text) {
  ++counter;
  const std::lock_guard<std::mutex> lock(mutex_);
  ++notes_;
  note_ = text;
}

int Calls::bad_handle(int code, const char* what) {
  mistake(bad_handles, what);
  return code;
}

uint64_t Calls::count(const std::string& function) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = counts_.find(function);
  return found == counts_.end() ? 0 : found->second;
}

void Calls::add_fault(
    const std::string& function,
    int rank,
    int nth,
    int code) {
  const std::lock_guard<std::mutex> lock(mutex_);
  faults_.push_back({function, rank, nth, code});
}

void Calls::fill(Stats& s) {
  s.work = work_;
  s.collectives_begun = begun_;
  s.mismatches = mismatches;
  s.bad_handles = bad_handles;
  s.freed_written = freed_written;
  const std::lock_guard<std::mutex> lock(mutex_);
  s.notes = notes_;
  std::strncpy(s.note, note_.c_str(), sizeof s.note - 1);
}

void Calls::reset() {
  const std::lock_guard<std::mutex> lock(mutex_);
  counts_.clear();
  faults_.clear();
  notes_ = 0;
  note_.clear();
  work_ = begun_ = 0;
  mismatches = bad_handles = freed_written = 0;
  sticky = 0;
  read_environment();
}

} // namespace fusedpg::fake

FUSEDPG_FAKE_EXPORT uint64_t fusedpg_fake_calls(const char* function) {
  return fusedpg::fake::calls().count(function);
}

FUSEDPG_FAKE_EXPORT void fusedpg_fake_fail_rank(
    const char* function,
    int rank,
    int nth,
    int code) {
  fusedpg::fake::calls().add_fault(function, rank, nth, code);
}

FUSEDPG_FAKE_EXPORT void fusedpg_fake_fail(
    const char* function,
    int nth,
    int code) {
  fusedpg::fake::calls().add_fault(function, -1, nth, code);
}

FUSEDPG_FAKE_EXPORT void fusedpg_fake_stall(
    int rank,
    int nth,
    int milliseconds) {
  fusedpg::fake::calls().add_fault(
      fusedpg::fake::kStall, rank, nth, milliseconds);
}

FUSEDPG_FAKE_EXPORT void fusedpg_fake_set_delay(uint32_t microseconds) {
  fusedpg::fake::calls().delay = microseconds;
}
