#pragma once

#include <chrono>
#include <memory>
#include <utility>

#include "c10d/errors.hpp"
#include "c10d/fresh_thread_state.hpp"
#include "c10d/routes/route.hpp"
#include "c10d/tensors.hpp"
#include "c10d/work_fused.hpp"

// Messages of tensors through a mailbox, Mailbox or NetMailbox.
namespace fusedpg {

// Completes the Work when the mailbox is done with the message, of which the flight
// recorder has the number. Of a receive from any rank it learns then: of `group`.
inline auto completion(
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

// The box moves its messages for who waits for one of them.
template <typename Box>
void set_move(WorkFused& work, const std::shared_ptr<Box>& box) {
  work.set_move([box = std::weak_ptr<Box>(box)](
                    const auto& done, const Deadline& deadline) {
    if (const auto held = box.lock()) {
      held->move_until(done, deadline);
    }
  });
}

template <typename Box>
c10::intrusive_ptr<WorkFused> post_send(
    const std::shared_ptr<Box>& box,
    const Group& group,
    Tensors& tensors,
    int dst,
    int tag) {
  auto work = c10::make_intrusive<WorkFused>(
      group.interrupter,
      group.rank,
      c10d::OpType::SEND,
      group.shown("fused:send"),
      tensors,
      Tensors());
  set_move(*work, box);
  const Flat flat = Flat::input(tensors[0]);
  const uint64_t number = FlightRecorder::get().record(
      group.recorded, "fused:send", tensors, {}, group.timeout, dst);
  translate([&] {
    box->send(
        flat.buffer().data,
        static_cast<size_t>(flat.tensor().nbytes()),
        dst,
        tag,
        group.timeout,
        completion(work, flat, false, number, nullptr, group.dialect));
  });
  return work;
}

template <typename Box>
c10::intrusive_ptr<WorkFused> post_receive(
    const std::shared_ptr<Box>& box,
    const Group& group,
    Tensors& tensors,
    int src,
    int tag) {
  const bool any = src == Box::kAnySource;
  auto work = c10::make_intrusive<WorkFused>(
      group.interrupter,
      group.rank,
      any ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV,
      group.shown(any ? "fused:recvAnySource" : "fused:recv"),
      tensors,
      tensors);
  set_move(*work, box);
  const Flat flat = Flat::output(tensors[0]);
  const uint64_t number = any
      ? 0
      : FlightRecorder::get().record(
            group.recorded, "fused:recv", {}, tensors, group.timeout, src);
  translate([&] {
    box->receive(
        flat.buffer().data,
        static_cast<size_t>(flat.tensor().nbytes()),
        src,
        tag,
        group.timeout,
        completion(
            work,
            flat,
            true,
            number,
            any ? group.recorded : nullptr,
            group.dialect));
  });
  return work;
}

} // namespace fusedpg
