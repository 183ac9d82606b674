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

void PostQueue::push(MessagePost&& post, int me) {
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

void PostQueue::take(std::vector<MessagePost>& posts) {
  std::lock_guard<std::mutex> lock(mutex_);
  take_locked(posts);
}

void PostQueue::close(const Error& why, std::vector<MessagePost>& posts) {
  std::lock_guard<std::mutex> lock(mutex_);
  closed_ = why;
  take_locked(posts);
}

void PostQueue::take_locked(std::vector<MessagePost>& posts) {
  any_.store(false, std::memory_order_release);
  posts.clear();
  posts.swap(posts_);
}

} // namespace fusedpg
