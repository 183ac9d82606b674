#include "c10d/flight_recorder.hpp"

#include <time.h>

#include <algorithm>

#include "base/fork.hpp"
#include "base/options.hpp"

namespace fusedpg {
namespace {

PerProcess<FlightRecorder> recorder;

int64_t now_ns(clockid_t clock = CLOCK_REALTIME) {
  timespec now{};
  clock_gettime(clock, &now);
  return int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

template <typename Types>
void note(
    const std::vector<at::Tensor>& tensors,
    FlightRecorder::Sizes& sizes,
    Types& types) {
  sizes.clear();
  types.clear();
  for (const at::Tensor& t : tensors) {
    const at::IntArrayRef of = t.sizes();
    sizes.push_back(static_cast<int64_t>(of.size()));
    sizes.append(of.begin(), of.end());
    types.push_back(t.scalar_type());
  }
}

} // namespace

FlightRecorder::FlightRecorder() : entries_(flight_recorder_entries()) {}

FlightRecorder& FlightRecorder::get() {
  return recorder.get();
}

std::shared_ptr<RecordedGroup> FlightRecorder::add_group(int rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto group = std::make_shared<RecordedGroup>(groups_made_++, rank);
  groups_.erase(
      std::remove_if(
          groups_.begin(),
          groups_.end(),
          [](const auto& one) { return one.expired(); }),
      groups_.end());
  groups_.push_back(group);
  return group;
}

void FlightRecorder::set_name(RecordedGroup& group, RecordedGroup::Name name) {
  std::lock_guard<std::mutex> lock(mutex_);
  group.name = std::move(name);
}

RecordedGroup::Name FlightRecorder::name_of(const RecordedGroup& group) {
  std::lock_guard<std::mutex> lock(mutex_);
  return group.name;
}

uint64_t FlightRecorder::record(
    const std::shared_ptr<RecordedGroup>& group,
    const char* title,
    const std::vector<at::Tensor>& inputs,
    const std::vector<at::Tensor>& outputs,
    std::chrono::milliseconds timeout,
    int peer) {
  if (entries_.empty()) {
    return 0;
  }
  const int64_t created = now_ns();
  std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t number = next_++;
  Entry& entry = entries_[number % entries_.size()];
  entry.number.store(0, std::memory_order_relaxed);
  Facts& f = entry.facts;
  if (f.group != group) {
    f.group = group;
  }
  f.title = title;
  f.peer = peer;
  f.sequence =
      ++(peer == kCollective ? group->collectives
                             : group->messages[{peer, !inputs.empty()}]);
  f.timeout_ms = timeout.count();
  f.created = created;
  note(inputs, f.inputs, f.input_types);
  note(outputs, f.outputs, f.output_types);
  entry.started.store(0, std::memory_order_relaxed);
  entry.completed.store(0, std::memory_order_relaxed);
  entry.ended.store(false, std::memory_order_relaxed);
  entry.number.store(number, std::memory_order_release);
  return number;
}

FlightRecorder::Entry* FlightRecorder::find(uint64_t number) {
  if (number == 0) {
    return nullptr;
  }
  Entry& entry = entries_[number % entries_.size()];
  return entry.number.load(std::memory_order_acquire) == number ? &entry
                                                                : nullptr;
}

void FlightRecorder::start(uint64_t number) {
  if (Entry* entry = find(number)) {
    // To a few milliseconds: a third exact time would be half of what a small
    // operation's record costs.
    entry->started.store(
        std::max(now_ns(CLOCK_REALTIME_COARSE), entry->facts.created),
        std::memory_order_relaxed);
  }
}

void FlightRecorder::end(uint64_t number, bool completed) {
  Entry* entry = find(number);
  if (entry == nullptr) {
    return;
  }
  if (completed) {
    entry->completed.store(now_ns(), std::memory_order_relaxed);
  }
  entry->ended.store(true, std::memory_order_release);
}

std::vector<FlightRecorder::Facts> FlightRecorder::dump() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Facts> all;
  const uint64_t size = entries_.size();
  for (uint64_t n = next_ > size ? next_ - size : 1; n < next_; ++n) {
    const Entry& entry = entries_[n % size];
    Facts facts = entry.facts;
    facts.number = n;
    facts.ended = entry.ended.load(std::memory_order_acquire);
    facts.started = entry.started.load(std::memory_order_relaxed);
    facts.completed = entry.completed.load(std::memory_order_relaxed);
    all.push_back(std::move(facts));
  }
  return all;
}

std::vector<std::shared_ptr<RecordedGroup>> FlightRecorder::groups() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<RecordedGroup>> all;
  for (const auto& one : groups_) {
    if (auto group = one.lock()) {
      all.push_back(std::move(group));
    }
  }
  return all;
}

} // namespace fusedpg
