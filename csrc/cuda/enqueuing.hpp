#pragma once

#include "cuda/engine.hpp"

namespace fusedpg::cuda {

// Where the arrays of an operation lie in its slot.
class Arrays {
 public:
  size_t add(size_t bytes) {
    const size_t offset = bytes_;
    bytes_ += (bytes + 15) / 16 * 16;
    return offset;
  }
  size_t bytes() const {
    return bytes_;
  }

 private:
  size_t bytes_ = 0;
};

// What all operations of the engine need while they are enqueued.
class Enqueuing {
 protected:
  Enqueuing(CudaEngine& engine, Operation& operation)
      : e_(engine),
        cuda_(engine.cuda_),
        operation_(operation),
        compute_(engine.compute_.get()),
        wire_(engine.wire_stream_.get()) {}

  void check(const char* what, int error) const {
    cuda::check(cuda_, what, error);
  }
  // `to` goes on when `from` has got this far.
  void order(Stream from, const OwnedEvent& event, Stream to) {
    check("cudaEventRecord", cuda_.event_record(event.get(), from));
    check("cudaStreamWaitEvent", cuda_.stream_wait_event(to, event.get()));
  }
  template <typename Call>
  void nccl(const char* what, const Call& call) {
    e_.comm_->call(what, call);
  }
  // In place, on the wire's stream.
  void all_reduce(void* data, size_t count, NcclDataType type, NcclRedOp op) {
    nccl("ncclAllReduce", [&](NcclComm comm) {
      return e_.nccl_.all_reduce(data, data, count, type, op, comm, wire_);
    });
  }
  // Within the operation's slot.
  void gather(size_t from, size_t to, size_t count, NcclDataType type);
  bool alone() const {
    return e_.size_ == 1;
  }

  template <typename T>
  T* device(size_t offset) const {
    return reinterpret_cast<T*>(
        static_cast<char*>(operation_.slot_->device.get()) + offset);
  }
  template <typename T>
  T* host(size_t offset) const {
    return reinterpret_cast<T*>(
        static_cast<char*>(operation_.slot_->host.get()) + offset);
  }

  // Takes the memory that the operation needs, its slot too, with the facts of
  // the operation known. Throws Refusal, on all ranks, if one of them lacks it.
  void acquire(const CudaEngine::Needs& needs);
  // Whether all ranks have it; waits for the GPU.
  bool all_have(bool has);

  // What this rank proposes to the others, and then what all ranks have.
  void exchange(const ProposeArgs& proposal);
  // Tells the host if ranks disagree, as soon as the wire knows: they may hang
  // in what they exchange next. `agree`: what all ranks have proposed.
  void report_mismatch(size_t agree);

  CudaEngine& e_;
  const CudaApi& cuda_;
  Operation& operation_;
  const Stream compute_;
  const Stream wire_;
};

} // namespace fusedpg::cuda
