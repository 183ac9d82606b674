// Whether the ring of a patched NCCL does what it should, before anybody relies
// on it: in a partial build, functions that were left out are kernels that do
// nothing and report nothing.

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/error.hpp"
#include "base/ownership.hpp"
#include "cuda/engine.hpp"
#include "cuda/kernels/elements.hpp"

namespace fusedpg::cuda {
namespace {

const char* const kRingKey = "cuda/ring/";
// Elements of the small and the large buffer: NCCL has other functions for them.
constexpr size_t kSmall = 1;
constexpr size_t kLarge = size_t(1) << 20;
// Sums of more ones need not be exact in bf16.
constexpr int kMostOnes = 128;

void put(char* data, size_t i, DType type, float value) {
  const auto as = [&](auto bits) {
    std::memcpy(data + i * sizeof bits, &bits, sizeof bits);
  };
  switch (type) {
    case DType::kFloat16:
      return as(float_to_half(value));
    case DType::kBFloat16:
      return as(float_to_bfloat(value));
    default:
      return as(value);
  }
}

// What the kernel uses; kept if it does not come to an end.
struct Probe {
  HostMemory host;
  DeviceMemory device;
  OwnedEvent end;
};

} // namespace

// SGD with a learning rate of 1, from parameters 0: minus the sum of ones.
bool CudaEngine::ring_works(DType type, size_t part, const Deadline& deadline) {
  const size_t count = part * static_cast<size_t>(size_);
  const size_t bytes = (count * dtype_size(type) + 15) / 16 * 16;
  struct Scalars {
    TensorInfo tensor;
    ShardPiece piece;
    TensorScalars scalars;
    RingUpdate ring;
  };
  const auto probe = std::make_shared<Probe>();
  probe->host = allocate_host(cuda_, sizeof(Scalars) + 2 * bytes);
  probe->device = allocate_device(cuda_, sizeof(Scalars) + 3 * bytes);
  probe->end = make_event(cuda_);
  // Of both: gradients, then results; on the device then parameters.
  auto* host = static_cast<char*>(probe->host.get());
  auto* device = static_cast<char*>(probe->device.get());
  auto* scalars = new (host + 2 * bytes) Scalars{};
  auto* there = reinterpret_cast<Scalars*>(device + 3 * bytes);
  char* results = device + bytes;
  char* mine = results + static_cast<size_t>(rank_) * part * dtype_size(type);
  for (size_t i = 0; i < count; ++i) {
    put(host, i, type, rank_ < kMostOnes ? 1.0F : 0.0F);
  }
  scalars->tensor.param = device + 2 * bytes;
  scalars->tensor.count = count;
  scalars->tensor.shard = part;
  scalars->piece.length = part;
  scalars->scalars.sgd.lr = 1;
  scalars->scalars.grad_factor = 1;
  UpdateArgs& update = scalars->ring.update;
  update.chunk = {
      &there->tensor, &there->piece, nullptr, 0, rank_, size_, 0, part};
  update.formula = kernels::Formula::kSgd;
  update.param_type = type;
  update.grad_type = type;
  update.state_type = type;
  update.scalars = &there->scalars;
  update.grads = mine;
  update.params_out = mine;
  scalars->ring.num_pieces = 1;
  scalars->ring.mode = RingMode::kUpdate;
  const Stream stream = wire_stream_.get();
  // Not freed before kernels that may use it have ended.
  struct Keep {
    Communicator& comm;
    const std::shared_ptr<Probe>& probe;
    bool ended = false;
    ~Keep() {
      if (!ended) {
        comm.keep(probe);
      }
    }
  } keep{*comm_, probe};
  check(cuda_, "cudaMemsetAsync", cuda_.clear(results, 2 * bytes, stream));
  check(cuda_, "cudaMemcpyAsync", cuda_.copy(device, host, bytes, stream));
  check(
      cuda_,
      "cudaMemcpyAsync",
      cuda_.copy(there, scalars, sizeof(Scalars), stream));
  comm_->call_within(
      "ncclFusedpgReduceScatterUpdate",
      deadline,
      [&nccl = nccl_, device, results, part, type, there, stream](
          NcclComm comm) {
        return nccl.reduce_scatter_update(
            device,
            results,
            part,
            nccl_type(type),
            &there->ring,
            0,
            1,
            comm,
            stream);
      });
  check(
      cuda_,
      "cudaMemcpyAsync",
      cuda_.copy(host + bytes, results, bytes, stream));
  check(cuda_, "cudaEventRecord", cuda_.event_record(probe->end.get(), stream));
  for (int state = kNotReady; state != kSuccess;) {
    state = cuda_.event_query(probe->end.get());
    if (state != kSuccess && state != kNotReady) {
      check(cuda_, "cudaEventQuery", state);
    }
    if (deadline.expired()) {
      fail(
          ErrorKind::kTimeout,
          "fused: the ring of the patched NCCL did not end within {} ms; is "
          "every rank of the group alive?",
          deadline.timeout().count());
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  keep.ended = true;
  const auto sum = static_cast<float>(std::min(size_, kMostOnes));
  for (size_t i = 0; i < count; ++i) {
    put(host, i, type, -sum);
  }
  return std::memcmp(host, host + bytes, count * dtype_size(type)) == 0;
}

void CudaEngine::check_ring(const Deadline& deadline) {
  const std::string well = "well";
  std::string wrong = well;
  for (const DType type :
       {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const size_t elements : {kSmall, kLarge}) {
      const auto part = static_cast<size_t>(
          shard_size(static_cast<int64_t>(elements), size_));
      if (!ring_works(type, part, deadline)) {
        wrong = dtype_name(type);
      }
    }
  }
  for (const std::string& found :
       tell_all(kRingKey, wrong, deadline, "the check of its ring")) {
    if (found != well) {
      fail(
          ErrorKind::kSystem,
          "fused: the ring of {} gives wrong results for {}, on a known input: "
          "was it built without that function (patches/nccl/README.md)? Build "
          "it again, or set FUSEDPG_NCCL=stock",
          nccl_.path,
          found);
    }
  }
}

} // namespace fusedpg::cuda
