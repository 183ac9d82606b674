// Sends and receives of tensors, and the barrier that names who is missing: by a
// group's Messages.

#include <utility>

#include "c10d/errors.hpp"
#include "c10d/fresh_thread_state.hpp"
#include "c10d/group.hpp"
#include "c10d/routes/cpu.hpp"
#include "c10d/tensors.hpp"
#include "c10d/work_fused.hpp"
#include "messages/messages.hpp"

namespace fusedpg {
namespace {

// Completes the Work when the mailbox is done with the message, of which the flight
// recorder has the number. Of a receive from any rank it learns then: of `group`.
auto completion(
    const c10::intrusive_ptr<WorkFused>& work,
    const Flat& flat,
    bool receives,
    uint64_t number,
    const std::shared_ptr<RecordedGroup>& group,
    Dialect dialect) {
  return [work,
          flat = std::make_shared<Flat>(flat),
          receives,
          number,
          group,
          dialect](std::exception_ptr error, int peer) mutable {
    FlightRecorder& flight = FlightRecorder::get();
    if (group && !error) {
      number = flight.record(group, "fused:recv", {}, work->result(), {}, peer);
    }
    flight.end(number, !error);
    work->set_source_rank(peer);
    const FreshThreadState state; // it may be any thread that waits
    const auto finish = [&] {
      const auto held = std::exchange(flat, nullptr);
      if (error) {
        std::rethrow_exception(error);
      }
      if (receives) {
        held->finish();
      }
    };
    work->complete(capture(finish, dialect));
  };
}

} // namespace

WorkPtr CpuRoute::send(Tensors& tensors, int dst, int tag) {
  group_.check_open("fused:send");
  check_count("send", "tensor", tensors.size(), 1);
  check_tensor("send", tensors[0]);
  group_.check_root("send", dst);
  TORCH_CHECK_VALUE(
      dst != rank_, formatted("fused: send: rank {} is this one", dst));
  return post(c10d::OpType::SEND, "fused:send", tensors, dst, tag);
}

WorkPtr CpuRoute::recv(Tensors& tensors, int src, int tag) {
  group_.check_open("fused:recv");
  group_.check_root("recv", src);
  TORCH_CHECK_VALUE(
      src != rank_, formatted("fused: recv: rank {} is this one", src));
  check_count("recv", "tensor", tensors.size(), 1);
  check_tensor("recv", tensors[0]);
  return post(c10d::OpType::RECV, "fused:recv", tensors, src, tag);
}

WorkPtr CpuRoute::recvAnysource(Tensors& tensors, int tag) {
  group_.check_open("fused:recvAnySource");
  check_count("recv", "tensor", tensors.size(), 1);
  check_tensor("recv", tensors[0]);
  return post(
      c10d::OpType::RECVANYSOURCE,
      "fused:recvAnySource",
      tensors,
      Messages::kAnySource,
      tag);
}

std::shared_ptr<Messages> CpuRoute::messages() {
  const auto check_open = [this] { group_.check_open("fused:send/recv"); };
  check_open(); // before a lock, in a forked child
  return translate(
      [&] { return engine_->messages(check_open); }, group_.dialect);
}

void CpuRoute::monitoredBarrier(
    const c10d::BarrierOptions& opts,
    bool wait_all_ranks) {
  const auto check_open = [this] {
    group_.check_open("fused:monitored_barrier");
  };
  check_open();
  // Unlike elsewhere, a timeout of zero is one.
  const auto timeout = opts.timeout == c10d::kUnsetTimeout
      ? group_.timeout.load()
      : bounded(opts.timeout);
  translate(
      [&] { engine_->monitored_barrier(timeout, wait_all_ranks, check_open); },
      group_.dialect);
}

WorkPtr CpuRoute::post(
    c10d::OpType type,
    const char* title,
    const Tensors& tensors,
    int peer,
    int tag) {
  const bool sends = type == c10d::OpType::SEND;
  const bool any = type == c10d::OpType::RECVANYSOURCE;
  const Tensors none;
  const Tensors& inputs = sends ? tensors : none;
  const Tensors& outputs = sends ? none : tensors;
  const auto box = messages();
  auto work = c10::make_intrusive<WorkFused>(
      group_.interrupter, rank_, type, group_.shown(title), tensors, outputs);
  work->set_messages(box);
  const Flat flat = sends ? Flat::input(tensors[0]) : Flat::output(tensors[0]);
  const uint64_t number = any
      ? 0
      : FlightRecorder::get().record(
            group_.recorded, title, inputs, outputs, group_.timeout, peer);
  translate([&] {
    void* data = flat.buffer().data;
    const auto bytes = static_cast<size_t>(flat.tensor().nbytes());
    auto done = completion(
        work,
        flat,
        !sends,
        number,
        any ? group_.recorded : nullptr,
        group_.dialect);
    if (sends) {
      box->send(data, bytes, peer, tag, group_.timeout, std::move(done));
    } else {
      box->receive(data, bytes, peer, tag, group_.timeout, std::move(done));
    }
  });
  return group_.remember(std::move(work));
}

} // namespace fusedpg
