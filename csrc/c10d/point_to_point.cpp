// send, recv and recv from any rank.

#include "c10d/errors.hpp"
#include "c10d/process_group_fused.hpp"
#include "c10d/tensors.hpp"

namespace fusedpg {
namespace {

using Tensors = ProcessGroupFused::Tensors;

// Completes the Work when the mailbox is done with the message.
Mailbox::Done completion(
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

} // namespace

ProcessGroupFused::WorkPtr ProcessGroupFused::send(
    Tensors& tensors,
    int dst,
    int tag) {
  if (on_gpu(tensors)) {
    return on_nccl(tensors, &Backend::send, tensors, dst, tag);
  }
  check_open("fused:send");
  check_count("send", "tensor", tensors.size(), 1);
  check_tensor("send", tensors[0]);
  check_root("send", dst);
  if (spans_hosts()) {
    return remember(delegate().send(tensors, dst, tag));
  }
  TORCH_CHECK_VALUE(
      dst != getRank(), "fused: send: rank ", dst, " is this one");
  translate([&] { engine_->check_failed(); });
  auto work = c10::make_intrusive<WorkFused>(
      getRank(), c10d::OpType::SEND, "fused:send", tensors, Tensors());
  const Flat flat = Flat::input(tensors[0]);
  translate([&] {
    mailbox().send(
        flat.span().data,
        flat.span().bytes,
        dst,
        tag,
        timeout_.load(),
        completion(work, flat, false));
  });
  return remember(work);
}

ProcessGroupFused::WorkPtr ProcessGroupFused::recv(
    Tensors& tensors,
    int src,
    int tag) {
  if (on_gpu(tensors)) {
    return on_nccl(tensors, &Backend::recv, tensors, src, tag);
  }
  check_root("recv", src);
  TORCH_CHECK_VALUE(
      src != getRank(), "fused: recv: rank ", src, " is this one");
  if (spans_hosts()) {
    check_open("fused:recv");
    return remember(delegate().recv(tensors, src, tag));
  }
  return receive(tensors, src, tag, c10d::OpType::RECV, "fused:recv");
}

ProcessGroupFused::WorkPtr ProcessGroupFused::recvAnysource(
    Tensors& tensors,
    int tag) {
  if (on_gpu(tensors)) {
    return on_nccl(tensors, &Backend::recvAnysource, tensors, tag);
  }
  if (spans_hosts()) {
    check_open("fused:recvAnySource");
    return remember(delegate().recvAnysource(tensors, tag));
  }
  return receive(
      tensors,
      Mailbox::kAnySource,
      tag,
      c10d::OpType::RECVANYSOURCE,
      "fused:recvAnySource");
}

ProcessGroupFused::WorkPtr ProcessGroupFused::receive(
    Tensors& tensors,
    int src,
    int tag,
    c10d::OpType type,
    const char* title) {
  check_open(title);
  check_count("recv", "tensor", tensors.size(), 1);
  check_tensor("recv", tensors[0]);
  translate([&] { engine_->check_failed(); });
  auto work =
      c10::make_intrusive<WorkFused>(getRank(), type, title, tensors, tensors);
  const Flat flat = Flat::output(tensors[0]);
  translate([&] {
    mailbox().receive(
        flat.span().data,
        flat.span().bytes,
        src,
        tag,
        timeout_.load(),
        completion(work, flat, true));
  });
  return remember(work);
}

} // namespace fusedpg
