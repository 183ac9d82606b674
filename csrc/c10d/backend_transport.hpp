#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "net/transport.hpp"

namespace fusedpg {

// A transport over send and recv of another backend, for CPU memory.
class BackendTransport : public Transport {
 public:
  explicit BackendTransport(c10::intrusive_ptr<c10d::Backend> backend);
  ~BackendTransport() override;

  int rank() const override {
    return backend_->getRank();
  }
  int size() const override {
    return backend_->getSize();
  }
  RequestPtr send(int to, uint32_t tag, const NetBuffer& message) override;
  RequestPtr receive(int from, uint32_t tag, const NetBuffer& into) override;
  void set_watch(std::function<void()> watch) override;
  void abort() override;
  void end() noexcept override {
    backend_->abort(); // which closes them
  }

 private:
  class Request;
  class Interrupter;
  template <typename Call>
  RequestPtr post(std::string what, const Call& call);

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::atomic<bool> aborted_{false};
  std::function<void()> watch_;
  std::unique_ptr<Interrupter> interrupter_; // if there is a watch
};

} // namespace fusedpg
