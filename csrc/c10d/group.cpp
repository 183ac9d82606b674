#include "c10d/group.hpp"

#include "c10d/errors.hpp"
#include "c10d/fresh_thread_state.hpp"
#include "c10d/work_fused.hpp"

namespace fusedpg {
namespace {

struct Coalescing {
  const Group* group = nullptr;
  std::vector<WorkPtr> works;
};
thread_local Coalescing coalescing;

struct AsyncCall {
  const Group* group = nullptr;
  uint64_t number = 0;
};
thread_local AsyncCall current_call;

} // namespace

uint64_t& shared_errors() {
  thread_local uint64_t count = 0;
  return count;
}

Group::Group(
    int rank,
    int size,
    const Settings& settings,
    std::chrono::milliseconds timeout,
    Dialect dialect)
    : GroupBase(
          rank,
          size,
          settings,
          translate([&]() -> const kernels::Table& {
            return select_kernels(settings);
          }),
          as_error),
      dialect(dialect),
      timeout(bounded(timeout)),
      interrupter(std::make_shared<Interrupter>()),
      recorded(
          translate([=] { return FlightRecorder::get().add_group(rank); })) {}

Group::Watched::Watched(
    Group& group,
    const CallInfo& info,
    const Tensors& inputs,
    const Tensors& outputs)
    : group_(group),
      number_(flight_.record(
          group.recorded,
          info.title,
          inputs,
          outputs,
          info.timeout)) {
  if (profiled_.isActive()) {
    profiled_._setAsync(); // as a Work records itself
    const std::vector<c10::IValue> values(inputs.begin(), inputs.end());
    profiled_.before(
        group.shown(info.title),
        c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
  }
}

void Group::Watched::failed() {
  error_ = capture([] { throw; }, group_.dialect);
}

void Group::Watched::raise() const {
  if (error_) {
    ++shared_errors();
    std::rethrow_exception(error_);
  }
}

WorkPtr Group::enqueue(
    const CallInfo& info,
    const Tensors& inputs,
    const Tensors& outputs,
    std::function<void(uint64_t)> operation,
    const TensorLists& lists) {
  FlightRecorder& flight = FlightRecorder::get();
  const uint64_t number =
      flight.record(recorded, info.title, inputs, outputs, info.timeout);
  auto work = c10::make_intrusive<WorkFused>(
      interrupter,
      rank,
      info.type,
      shown(info.title),
      inputs,
      outputs,
      lists.size() > 1 ? lists : TensorLists());
  const uint64_t ticket = translate([&] {
    return executor_->submit([work,
                              &flight,
                              number,
                              operation = std::move(operation),
                              dialect = dialect](uint64_t ticket) mutable {
      const FreshThreadState state;
      flight.start(number);
      const auto error = capture([&] { operation(ticket); }, dialect);
      flight.end(number, !error);
      // Whoever waits may end the process at once: tensors go first.
      operation = nullptr;
      work->complete(error);
    });
  });
  work->set_executor(executor_, ticket);
  return remember(work);
}

void Group::set_async_call(uint64_t number) const {
  current_call = {this, number};
}

uint64_t Group::async_call() const {
  return current_call.group == this ? current_call.number : 0;
}

void Group::start_coalescing() {
  // What an exception has left behind is over.
  coalescing.works.clear();
  coalescing.group = this;
}

WorkPtr Group::end_coalescing() {
  coalescing.group = nullptr;
  return c10::make_intrusive<WorkGroup>(
      rank, std::exchange(coalescing.works, {}));
}

bool Group::is_coalescing() const {
  return coalescing.group == this;
}

WorkPtr Group::remember(WorkPtr work) {
  if (is_coalescing() && work) {
    coalescing.works.push_back(work);
  }
  return work;
}

std::string Group::shown(const char* title) const {
  if (!at::hasCallbacks()) {
    return {};
  }
  const std::string own = "fused:";
  return dialect == Dialect::kGloo && std::string(title).starts_with(own)
      ? "gloo:" + std::string(title).substr(own.size())
      : title;
}

void Group::check_open(const char* op) const {
  if (forked()) {
    C10_THROW_ERROR(
        DistBackendError,
        formatted(
            "{}: this group belongs to the process that forked this one; "
            "create a group in each process",
            op));
  }
  if (closed()) {
    C10_THROW_ERROR(
        DistBackendError,
        formatted(
            "{}: this group was shut down or destroyed on rank {}", op, rank));
  }
}

void Group::check_root(const char* op, int64_t root) const {
  TORCH_CHECK_VALUE(
      root >= 0 && root < size,
      formatted(
          "fused: {}: root {} is not a rank of this group of {}",
          op,
          root,
          size));
}

void check_count(
    const char* op,
    const char* what,
    size_t found,
    size_t expected) {
  TORCH_CHECK_VALUE(
      found == expected,
      formatted(
          "fused: {}: expected {} {}, found {}", op, expected, what, found));
}

} // namespace fusedpg
