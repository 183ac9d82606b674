#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "net/transport.hpp"

namespace fusedpg {

// A transport over send and recv of another backend, for CPU memory.
class BackendTransport : public Transport {
 public:
  explicit BackendTransport(c10::intrusive_ptr<c10d::Backend> backend);

  int rank() const override {
    return backend_->getRank();
  }
  int size() const override {
    return backend_->getSize();
  }
  RequestPtr send(int to, uint32_t tag, const NetBuffer& message) override;
  RequestPtr receive(int from, uint32_t tag, const NetBuffer& into) override;
  void abort() override;
  void end() noexcept override {
    backend_->abort(); // which closes them
  }

 private:
  template <typename Call>
  RequestPtr post(std::string what, const Call& call);

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::atomic<bool> aborted_{false};
};

} // namespace fusedpg
