#include "c10d/backend_transport.hpp"

#include <ATen/ATen.h>

#include "base/error.hpp"

namespace fusedpg {
namespace {

// The tensor keeps the bytes for as long as the backend keeps the tensor.
at::Tensor tensor_of(const NetBuffer& buffer) {
  return at::from_blob(
      buffer.data(),
      {static_cast<int64_t>(buffer.bytes())},
      [owner = buffer.owner()](void*) {},
      at::kByte);
}

class BackendRequest : public Transport::Request {
 public:
  BackendRequest(
      c10::intrusive_ptr<c10d::Work> work,
      std::string what,
      const std::atomic<bool>& aborted)
      : work_(std::move(work)),
        what_(std::move(what)),
        aborted_(aborted) {}

  void wait(const Deadline& deadline) override {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline.remaining());
    try {
      // 0 would mean the backend's own timeout.
      work_->wait(std::max(left, std::chrono::milliseconds(1)));
    } catch (const std::exception& error) {
      const ErrorKind kind = aborted_ ? ErrorKind::kAborted
          : deadline.expired()        ? ErrorKind::kTimeout
                                      : ErrorKind::kPeerFailed;
      fail(
          kind,
          "fused: {}{}{}",
          what_,
          deadline.expired()
              ? formatted(
                    ": not done within {} ms: ", deadline.timeout().count())
              : ": ",
          error.what());
    }
  }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  const std::string what_;
  const std::atomic<bool>& aborted_;
};

} // namespace

BackendTransport::BackendTransport(c10::intrusive_ptr<c10d::Backend> backend)
    : backend_(std::move(backend)) {}

Transport::RequestPtr BackendTransport::send(
    int to,
    uint32_t tag,
    const NetBuffer& message) {
  std::vector<at::Tensor> tensors{tensor_of(message)};
  return post(
      formatted("a message from rank {} (here) to rank {}", rank(), to),
      [&] { return backend_->send(tensors, to, static_cast<int>(tag)); });
}

Transport::RequestPtr BackendTransport::receive(
    int from,
    uint32_t tag,
    const NetBuffer& into) {
  std::vector<at::Tensor> tensors{tensor_of(into)};
  return post(
      formatted("a message from rank {} to rank {} (here)", from, rank()),
      [&] { return backend_->recv(tensors, from, static_cast<int>(tag)); });
}

// A connection that is known to have ended fails here, not in a wait.
template <typename Call>
Transport::RequestPtr BackendTransport::post(
    std::string what,
    const Call& call) {
  try {
    return std::make_unique<BackendRequest>(call(), what, aborted_);
  } catch (const std::exception& error) {
    fail(
        aborted_ ? ErrorKind::kAborted : ErrorKind::kPeerFailed,
        "fused: {}: {}",
        what,
        error.what());
  }
}

void BackendTransport::abort() {
  aborted_ = true;
  backend_->abort();
}

} // namespace fusedpg
