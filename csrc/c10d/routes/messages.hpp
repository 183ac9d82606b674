#pragma once

#include <chrono>
#include <memory>
#include <utility>

#include "c10d/errors.hpp"
#include "c10d/routes/route.hpp"
#include "c10d/tensors.hpp"
#include "c10d/work_fused.hpp"

// Messages of tensors through a mailbox, Mailbox or NetMailbox.
namespace fusedpg {

// Completes the Work when the mailbox is done with the message.
inline auto completion(
    const c10::intrusive_ptr<WorkFused>& work,
    const Flat& flat,
    bool receives) {
  return [work, flat = std::make_shared<Flat>(flat), receives](
             std::exception_ptr error, int peer) mutable {
    work->set_source_rank(peer);
    work->complete(capture([&] {
      const auto held = std::exchange(flat, nullptr);
      if (error) {
        std::rethrow_exception(error);
      }
      if (receives) {
        held->finish();
      }
    }));
  };
}

template <typename Box>
WorkPtr post_send(
    Box& box,
    int rank,
    Tensors& tensors,
    int dst,
    int tag,
    std::chrono::milliseconds timeout) {
  auto work = c10::make_intrusive<WorkFused>(
      rank, c10d::OpType::SEND, "fused:send", tensors, Tensors());
  const Flat flat = Flat::input(tensors[0]);
  translate([&] {
    box.send(
        flat.span().data,
        flat.span().bytes,
        dst,
        tag,
        timeout,
        completion(work, flat, false));
  });
  return work;
}

template <typename Box>
WorkPtr post_receive(
    Box& box,
    int rank,
    Tensors& tensors,
    int src,
    int tag,
    std::chrono::milliseconds timeout) {
  const bool any = src == Box::kAnySource;
  auto work = c10::make_intrusive<WorkFused>(
      rank,
      any ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV,
      any ? "fused:recvAnySource" : "fused:recv",
      tensors,
      tensors);
  const Flat flat = Flat::output(tensors[0]);
  translate([&] {
    box.receive(
        flat.span().data,
        flat.span().bytes,
        src,
        tag,
        timeout,
        completion(work, flat, true));
  });
  return work;
}

} // namespace fusedpg
