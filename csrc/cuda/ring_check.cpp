// Whether the ring of a patched NCCL does what it should, before anybody relies
// on it: in a partial build, functions that were left out are kernels that do
// nothing and report nothing.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "base/error.hpp"
#include "base/ownership.hpp"
#include "cuda/engine.hpp"
#include "cuda/kernels/elements.hpp"

namespace fusedpg::cuda {
namespace {

using kernels::Formula;

// NCCL has a function for each type and protocol. Each is asked for, and what
// NCCL chooses by size, too: buffers grow by this.
const char* const kProtocols[kRingProtocols] = {"LL", "LL128", "Simple"};
constexpr int kNcclsChoice = -1;
constexpr size_t kGrowth = 16;
// Of one of three buffers: more would show no other function.
constexpr size_t kMostBytes = size_t(1) << 19;
// Sums of more ones need not be exact in bf16.
constexpr int kMostOnes = 128;

} // namespace

// What may happen to a block on its way, from parameters of `start`, states of
// 0, a learning rate and a momentum of 1, betas of 0, to a sum of s.
struct RingRule {
  const char* name;
  Formula formula = Formula::kSgd;
  bool momentum = false;
  bool nesterov = false;
  bool decoupled = false;
  bool amsgrad = false;

  bool lamb() const {
    return formula == Formula::kLamb; // its first half
  }
  float start() const {
    return lamb() ? 1.0F : 0.0F;
  }
  float result(float s) const {
    return lamb()                   ? s
        : formula == Formula::kAdam ? -1
        : momentum && nesterov      ? -2 * s
                                    : -s;
  }
  float state(int k, float s) const {
    if (formula == Formula::kSgd) {
      return momentum && k == 0 ? s : 0;
    }
    return k == 0 ? s : k == 1 || amsgrad ? s * s : 0;
  }
};

namespace {

constexpr RingRule kRules[] = {
    {"SGD"},
    {"SGD with momentum", Formula::kSgd, true},
    {"SGD with Nesterov's momentum", Formula::kSgd, true, true},
    {"Adam", Formula::kAdam},
    {"Adam with amsgrad", Formula::kAdam, false, false, false, true},
    {"AdamW", Formula::kAdam, false, false, true},
    {"AdamW with amsgrad", Formula::kAdam, false, false, true, true},
    {"LAMB's norms", Formula::kLamb},
};

// Calls call(pattern, bytes of an element) with the value in that type.
template <typename Call>
bool with_element(DType type, float value, Call&& call) {
  switch (type) {
    case DType::kFloat16:
      return call(float_to_half(value));
    case DType::kBFloat16:
      return call(float_to_bfloat(value));
    default:
      return call(value);
  }
}

void fill(char* data, size_t count, DType type, float value) {
  with_element(type, value, [&](auto element) {
    for (size_t i = 0; i < count; ++i) {
      std::memcpy(data + i * sizeof element, &element, sizeof element);
    }
    return true;
  });
}

bool holds(const char* data, size_t count, DType type, float value) {
  return with_element(type, value, [&](auto element) {
    for (size_t i = 0; i < count; ++i) {
      if (std::memcmp(data + i * sizeof element, &element, sizeof element)) {
        return false;
      }
    }
    return true;
  });
}

size_t up_to_16(size_t bytes) {
  return (bytes + 15) / 16 * 16;
}

} // namespace

// What the kernel uses, and the same on the host; kept if it does not come to an
// end.
struct CudaEngine::RingProbe {
  HostMemory host;
  DeviceMemory device;
  OwnedEvent end;
  size_t bytes = 0;
};

struct CudaEngine::RingCase {
  const RingRule& rule;
  DType type;
  int protocol; // or kNcclsChoice
  size_t part; // elements of a rank
};

bool CudaEngine::ring_works(
    const std::shared_ptr<RingProbe>& probe,
    const RingCase& c,
    const Deadline& deadline) {
  const RingRule& rule = c.rule;
  const size_t count = c.part * static_cast<size_t>(size_);
  struct Scalars {
    TensorInfo tensor;
    ShardPiece piece;
    TensorScalars scalars;
    RingUpdate ring;
    double sums[2 * kRingChannels];
  };
  // One behind the other: gradients, results, parameters, three states.
  const size_t buffer = up_to_16(count * dtype_size(c.type));
  const size_t state = up_to_16(c.part * sizeof(float));
  const size_t results_at = buffer;
  const size_t params_at = 2 * buffer;
  const auto state_at = [&](size_t k) { return 3 * buffer + k * state; };
  const size_t scalars_at = state_at(3);
  const size_t least = scalars_at + sizeof(Scalars);
  if (probe->bytes < least) {
    probe->host = HostMemory();
    probe->device = DeviceMemory();
    probe->host = allocate_host(cuda_, least);
    probe->device = allocate(least);
    probe->bytes = least;
  }
  auto* host = static_cast<char*>(probe->host.get());
  auto* device = static_cast<char*>(probe->device.get());
  const size_t own =
      results_at + static_cast<size_t>(rank_) * c.part * dtype_size(c.type);
  std::memset(host, 0, scalars_at);
  fill(host, count, c.type, rank_ < kMostOnes ? 1.0F : 0.0F);
  fill(host + params_at, count, c.type, rule.start());
  auto* scalars = new (host + scalars_at) Scalars{};
  auto* there = reinterpret_cast<Scalars*>(device + scalars_at);
  scalars->tensor.param = device + params_at;
  for (size_t k = 0; k < 3; ++k) {
    scalars->tensor.state[k] = device + state_at(k);
  }
  scalars->tensor.count = count;
  scalars->tensor.shard = c.part;
  scalars->piece.length = c.part;
  TensorScalars& numbers = scalars->scalars;
  numbers.grad_factor = 1;
  numbers.sgd.lr = 1;
  numbers.sgd.momentum = 1;
  numbers.sgd.nesterov = rule.nesterov;
  numbers.adam.one_minus_beta1 = 1;
  numbers.adam.one_minus_beta2 = 1;
  numbers.adam.step_size = 1;
  numbers.adam.decoupled = rule.decoupled;
  numbers.adam.amsgrad = rule.amsgrad;
  numbers.lamb.one_minus_beta1 = 1;
  numbers.lamb.one_minus_beta2 = 1;
  UpdateArgs& update = scalars->ring.update;
  update.chunk = {
      &there->tensor, &there->piece, nullptr, 0, rank_, size_, 0, c.part};
  update.formula = rule.formula;
  update.param_type = c.type;
  update.grad_type = c.type;
  update.state_type = DType::kFloat32;
  update.decoupled = rule.decoupled;
  update.amsgrad = rule.amsgrad;
  update.momentum = rule.momentum;
  update.nesterov = rule.nesterov;
  update.scalars = &there->scalars;
  update.grads = device + own;
  update.params_out = device + own;
  scalars->ring.num_pieces = 1;
  scalars->ring.mode = rule.lamb() ? RingMode::kMoments : RingMode::kUpdate;
  scalars->ring.sums = there->sums;
  const Stream stream = wire_stream_.get();
  // Not freed before kernels that may use it have ended.
  struct Keep {
    const std::shared_ptr<RingProbe>& probe;
    bool ended = false;
    ~Keep() {
      if (!ended) {
        leak(probe);
      }
    }
  } keep{probe};
  check(cuda_, "cudaMemcpyAsync", cuda_.copy(device, host, least, stream));
  const auto absent = std::make_shared<std::atomic<bool>>(false);
  const int how = (rule.lamb() ? 0 : kRingGathers) +
      (c.protocol == kNcclsChoice ? 0 : ring_by(c.protocol));
  call_nccl_within(
      "ncclFusedpgReduceScatterUpdate",
      deadline,
      [&nccl = nccl_, device, results_at, c, there, how, stream, absent](
          NcclComm comm) {
        const NcclResult result = nccl.reduce_scatter_update(
            device,
            device + results_at,
            c.part,
            nccl_type(c.type),
            &there->ring,
            how,
            comm,
            stream);
        *absent = c.protocol != kNcclsChoice && result == kNcclInvalidUsage;
        return *absent ? kNcclSuccess : result;
      });
  check(cuda_, "cudaMemcpyAsync", cuda_.copy(host, device, least, stream));
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
  if (*absent) {
    return true; // NCCL never takes that protocol here
  }
  const auto sum = static_cast<float>(std::min(size_, kMostOnes));
  bool right = rule.lamb()
      ? holds(host + own, c.part, c.type, rule.result(sum))
      : holds(host + results_at, count, c.type, rule.result(sum));
  for (int k = 0; k < 3; ++k) {
    right = right &&
        holds(host + state_at(static_cast<size_t>(k)),
              c.part,
              DType::kFloat32,
              rule.state(k, sum));
  }
  double squares[2] = {0, 0}; // of parameters and directions, all 1
  for (uint32_t i = 0; i < 2 * kRingChannels; ++i) {
    squares[i % 2] += scalars->sums[i];
  }
  const double wanted = rule.lamb() ? static_cast<double>(c.part) : 0;
  return right && squares[0] == wanted && squares[1] == wanted;
}

std::string CudaEngine::check_ring(const Deadline& deadline) {
  std::string wrong;
  const auto ranks = static_cast<size_t>(size_);
  constexpr auto kLeast = static_cast<size_t>(kShardAlignment);
  const auto probe = std::make_shared<RingProbe>();
  probe->end = make_event(cuda_);
  const auto try_one = [&](const RingCase& c) {
    if (!ring_works(probe, c, deadline) && wrong.empty()) {
      wrong = formatted(
          "{} of {} in buffers of {} bytes by {}",
          c.rule.name,
          dtype_name(c.type),
          c.part * ranks * dtype_size(c.type),
          c.protocol == kNcclsChoice ? "the protocol that NCCL chooses"
                                     : kProtocols[c.protocol]);
    }
  };
  for (const DType type :
       {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    // As chunks are cut.
    const size_t most = std::max(
        std::min(chunk_bytes(~size_t(0)), kMostBytes) / dtype_size(type) /
            ranks / kLeast * kLeast,
        kLeast);
    for (int protocol = kNcclsChoice; protocol < kRingProtocols; ++protocol) {
      for (size_t part = most;;
           part = (part / kGrowth + kLeast - 1) / kLeast * kLeast) {
        try_one({kRules[0], type, protocol, part});
        if (part == kLeast) {
          break;
        }
      }
      for (const RingRule& rule : kRules) {
        if (protocol != kNcclsChoice && &rule != &kRules[0]) {
          try_one({rule, type, protocol, std::min(most, 8 * kLeast)});
        }
      }
    }
  }
  return wrong;
}

void CudaEngine::fail_ring(const std::string& wrong) const {
  fail(
      ErrorKind::kSystem,
      "fused: the ring of {} gives wrong results for {}, on a known input: was "
      "it built without that function (patches/nccl/README.md)? Build it "
      "again, or set FUSEDPG_NCCL=stock",
      nccl_.path,
      wrong);
}

} // namespace fusedpg::cuda
