#include "messages/messages.hpp"

#include <utility>

namespace fusedpg {

std::string MessagePost::name() const {
  return formatted(
      "{}({} bytes, tag {}, {} {})",
      sends() ? "send" : "recv",
      bytes,
      tag,
      sends() ? "to" : "from",
      peer == kAnySource ? std::string("any rank")
                         : formatted("rank {}", peer));
}

Error receive_mismatch(const MessagePost& post, int me, int from, size_t sent) {
  return Error(
      ErrorKind::kMismatch,
      formatted(
          "fused: {} on rank {}: rank {} sent {} bytes, expected {}",
          post.name(),
          me,
          from,
          sent,
          post.bytes));
}

Error send_mismatch(const MessagePost& post, int me, int to, size_t expected) {
  return Error(
      ErrorKind::kMismatch,
      formatted(
          "fused: {} from rank {}: rank {} expects {} bytes, sent {}",
          post.name(),
          me,
          to,
          expected,
          post.bytes));
}

Error late_message(const MessagePost& post, int me, const std::string& state) {
  return Error(
      ErrorKind::kTimeout,
      formatted(
          "fused: {}, failed on rank {}: timeout after {} ms without the other "
          "side{}{}",
          post.name(),
          me,
          post.deadline.timeout().count(),
          state.empty() ? "" : "; ",
          state));
}

Error stopped_messages(int me) {
  return Error(
      ErrorKind::kAborted,
      formatted(
          "fused: the group was shut down on rank {} with point-to-point "
          "operations pending",
          me));
}

std::exception_ptr error_of(
    const Error& error,
    const MessagePost& post,
    int me) {
  const std::string text = error.what();
  const std::string name = post.name();
  if (text.find(name) != std::string::npos) {
    return std::make_exception_ptr(error);
  }
  return std::make_exception_ptr(Error(
      error.kind(),
      formatted(
          "fused: {}, failed on rank {}: {}",
          name,
          me,
          text.rfind("fused: ", 0) == 0 ? text.substr(7) : text)));
}

void Messages::send(
    const void* data,
    size_t bytes,
    int destination,
    int tag,
    std::chrono::milliseconds timeout,
    Done done) {
  post(
      {MessagePost::What::kSend,
       static_cast<char*>(const_cast<void*>(data)),
       bytes,
       destination,
       tag,
       Deadline(timeout),
       std::move(done)});
}

void Messages::receive(
    void* data,
    size_t bytes,
    int source,
    int tag,
    std::chrono::milliseconds timeout,
    Done done) {
  post(
      {MessagePost::What::kReceive,
       static_cast<char*>(data),
       bytes,
       source,
       tag,
       Deadline(timeout),
       std::move(done)});
}

void PostQueue::push(MessagePost post, int me) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) {
    fail(
        closed_->kind(),
        "fused: {} on rank {}: {}",
        post.name(),
        me,
        closed_->what());
  }
  posts_.push_back(std::move(post));
  any_.store(true, std::memory_order_release);
}

std::vector<MessagePost> PostQueue::take() {
  std::lock_guard<std::mutex> lock(mutex_);
  return take_locked();
}

std::vector<MessagePost> PostQueue::close(const Error& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = why;
  return take_locked();
}

std::vector<MessagePost> PostQueue::take_locked() {
  any_.store(false, std::memory_order_release);
  return std::exchange(posts_, {});
}

} // namespace fusedpg
