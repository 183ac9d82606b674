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
// NCCL has a function for each type and protocol and chooses by size: buffers
// grow by this up to those of the largest chunk.
constexpr size_t kGrowth = 4;
// Sums of more ones need not be exact in bf16.
constexpr int kMostOnes = 128;

void fill(char* data, size_t count, DType type, float value) {
  const auto as = [&](auto bits) {
    for (size_t i = 0; i < count; ++i) {
      std::memcpy(data + i * sizeof bits, &bits, sizeof bits);
    }
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

} // namespace

// What the kernel uses; kept if it does not come to an end.
struct CudaEngine::RingProbe {
  HostMemory host;
  DeviceMemory device;
  OwnedEvent end;
  size_t bytes = 0;
};

// SGD with a learning rate of 1, from parameters 0: minus the sum of ones.
bool CudaEngine::ring_works(
    const std::shared_ptr<RingProbe>& probe,
    DType type,
    size_t part,
    const Deadline& deadline) {
  const size_t count = part * static_cast<size_t>(size_);
  const size_t bytes = (count * dtype_size(type) + 15) / 16 * 16;
  struct Scalars {
    TensorInfo tensor;
    ShardPiece piece;
    TensorScalars scalars;
    RingUpdate ring;
  };
  const size_t least = sizeof(Scalars) + 3 * bytes;
  if (probe->bytes < least) {
    probe->host = HostMemory();
    probe->device = DeviceMemory();
    probe->host = allocate_host(cuda_, least - bytes);
    probe->device = allocate_device(cuda_, least);
    probe->bytes = least;
  }
  // Of both: gradients, then results; on the device then parameters.
  auto* host = static_cast<char*>(probe->host.get());
  auto* device = static_cast<char*>(probe->device.get());
  auto* scalars = new (host + 2 * bytes) Scalars{};
  auto* there = reinterpret_cast<Scalars*>(device + 3 * bytes);
  char* results = device + bytes;
  char* mine = results + static_cast<size_t>(rank_) * part * dtype_size(type);
  fill(host, count, type, rank_ < kMostOnes ? 1.0F : 0.0F);
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
    const std::shared_ptr<RingProbe>& probe;
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
  fill(host, count, type, -sum);
  return std::memcmp(host, host + bytes, count * dtype_size(type)) == 0;
}

void CudaEngine::check_ring(const Deadline& deadline) {
  const std::string well = "well";
  std::string wrong = well;
  const auto ranks = static_cast<size_t>(size_);
  const size_t largest = chunk_bytes(~size_t(0));
  constexpr auto kLeast = static_cast<size_t>(kShardAlignment);
  const auto probe = std::make_shared<RingProbe>();
  probe->end = make_event(cuda_);
  for (const DType type :
       {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const size_t element = dtype_size(type);
    // As chunks are cut.
    const size_t most =
        std::max<size_t>(largest / element / ranks / kLeast * kLeast, kLeast);
    for (size_t part = most;;
         part = (part / kGrowth + kLeast - 1) / kLeast * kLeast) {
      if (!ring_works(probe, type, part, deadline)) {
        wrong = formatted(
            "{} in buffers of {} bytes",
            dtype_name(type),
            part * ranks * element);
      }
      if (part == kLeast) {
        break;
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
