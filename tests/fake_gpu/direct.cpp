#include "direct.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "cuda/kernels/serial.hpp"
#include "kernels/kernels.hpp"

namespace fusedpg::fake {

using namespace cuda; // NOLINT: the launch arguments' names

namespace {

struct Contexts {
  std::mutex mutex;
  std::map<void*, std::shared_ptr<Direct>> alive;
};

struct Team {
  int ranks;
  int rank;
  int stride;
};

} // namespace

Direct::Direct(
    std::shared_ptr<Comm> comm,
    std::shared_ptr<Window> window,
    int channel)
    : comm_(std::move(comm)),
      window_(std::move(window)),
      channel_(channel) {
  ++alive().direct_contexts;
}

Direct::~Direct() {
  --alive().direct_contexts;
}

template <typename T>
T* Direct::of_rank(T* mine, int rank, int other) const {
  const auto place =
      reinterpret_cast<char*>(mine) - window_->bases[static_cast<size_t>(rank)];
  return reinterpret_cast<T*>(
      window_->bases[static_cast<size_t>(other)] + place);
}

// With the CPU's kernel, which folds in rank order and writes to all ranks.
void Direct::update_tile(const DirectArgs& args, uint32_t tile) const {
  const cuda::UpdateArgs& update = args.update;
  const Chunk& chunk = update.chunk;
  const Span span = span_of(chunk, tile);
  const TensorScalars& scalars = update.scalars[span.index];
  if (scalars.skip) {
    return;
  }
  const uint32_t count = span.count(chunk.rank);
  const uint32_t most = args.present != nullptr ? kSkipBlock : count;
  for (uint32_t begin = 0; begin < count; begin += most) {
    update_part(args, tile, begin, std::min(most, count - begin));
  }
}

void Direct::update_part(
    const DirectArgs& args,
    uint32_t tile,
    uint32_t begin,
    uint32_t count) const {
  static constexpr char kZeros[kSkipBlock * sizeof(double)] = {};
  const cuda::UpdateArgs& update = args.update;
  const Chunk& chunk = update.chunk;
  const Span span = span_of(chunk, tile);
  const TensorInfo& tensor = *span.tensor;
  const TensorScalars& scalars = update.scalars[span.index];
  const uint64_t first = span.first(chunk.rank) + begin;
  const uint64_t word =
      static_cast<uint64_t>(chunk.rank) * chunk.num_tiles + tile;
  std::vector<const void*> grads;
  std::vector<void*> params;
  for (int p = 0; p < chunk.size; ++p) {
    const uint64_t* offsets = args.offsets +
        2 * (static_cast<uint64_t>(p) * args.num_tensors + span.index);
    char* base = window_->bases[p];
    const bool has = args.present == nullptr ||
        (of_rank(args.present, chunk.rank, p)[word] >> (begin / kSkipBlock) &
         1) != 0;
    grads.push_back(
        has ? at(base + offsets[0], first, update.grad_type) : kZeros);
    params.push_back(at(base + offsets[1], first, update.param_type));
    calls().blocks_skipped += has ? 0 : 1;
  }
  kernels::UpdateArgs with;
  static_cast<kernels::StepScalars&>(with) = scalars;
  with.formula = update.formula;
  with.grad_factor = scalars.grad_factor;
  with.weights = args.weights;
  kernels::UpdateSpans spans;
  spans.param_type = update.param_type;
  spans.grad_type = update.grad_type;
  spans.state_type = update.state_type;
  spans.params_out = params.data();
  spans.num_out = params.size();
  spans.param = at(tensor.param, first, update.param_type);
  spans.grads = grads.data();
  spans.num_grads = grads.size();
  const uint64_t own = span.begin + begin;
  spans.master =
      update.masters ? at(tensor.master, own, DType::kFloat32) : nullptr;
  for (int k = 0; k < 3; ++k) {
    spans.state[k] = tensor.state[k] == nullptr
        ? nullptr
        : at(tensor.state[k], own, update.state_type);
  }
  spans.count = count;
  kernels::table()->update(with, spans);
}

// Counts barriers as the kernel does.
void Direct::check_signals(DirectSignals* signals) {
  const Mapping& memory = window_->own->mapping;
  const auto* begin = reinterpret_cast<const char*>(signals);
  if (begin < memory.data() ||
      begin + kDirectBlocks * sizeof(DirectSignals) >
          memory.data() + memory.bytes()) {
    calls().bad_handle(0, "signals of direct_step outside the window");
    return;
  }
  for (uint32_t block = 0; block < kDirectBlocks; ++block) {
    for (const uint64_t passed : signals[block].passed) {
      if (signals[block].epoch != barriers_ || passed != 0) {
        calls().bad_handle(0, "signals of direct_step were written to");
        return;
      }
    }
    signals[block].epoch += 2;
  }
  barriers_ += 2;
}

void Direct::run(
    const Announcement& announcement,
    DirectSignals* signals,
    const uint64_t* stop,
    const std::function<void()>& before,
    const std::function<void()>& between) {
  const std::lock_guard<std::mutex> lock(executing_);
  Announcement mine = announcement;
  Executed executed{0, 0, mine.common.count, mine.common.op, 0};
  if (!comm_->begin(executed, 0, next_sequence_)) {
    return;
  }
  mine.common.sequence = executed.sequence;
  check_signals(signals);
  // NCCL's abort does not reach this kernel.
  const auto meet = [&] {
    return comm_->exchange(
        channel_,
        mine,
        [] {},
        [] {},
        [stop] { return __atomic_load_n(stop, __ATOMIC_ACQUIRE) != 0; });
  };
  before();
  if (meet()) {
    between();
    ++mine.common.part;
    meet();
  }
  comm_->end();
}

// The barriers: gradients are there; parameters have arrived.
void Direct::step(const DirectArgs& args) {
  Announcement announcement{};
  announcement.common = {
      0,
      0,
      args.update.chunk.block,
      kDirectStep,
      static_cast<int32_t>(args.update.param_type),
      static_cast<int32_t>(args.update.formula),
      args.present != nullptr};
  run(
      announcement,
      args.signals,
      args.stop,
      [&] {
        if (args.present != nullptr) {
          serial::find_tile_bits(args);
        }
      },
      [&] {
        for (uint32_t tile = 0; tile < args.update.chunk.num_tiles; ++tile) {
          update_tile(args, tile);
        }
      });
}

void Direct::sum_blocks(const DirectSumArgs& args) const {
  std::vector<char*> bases;
  std::vector<const uint8_t*> flags;
  for (int p = 0; p < args.size; ++p) {
    bases.push_back(window_->bases[p] + args.offsets[p]);
    flags.push_back(of_rank(args.flags, args.rank, p));
  }
  std::fill_n(args.counts, kDirectBlocks, DirectCounts{});
  for (uint64_t b = 0; b < args.num_blocks; ++b) {
    Ranks ranks{};
    bool any = false;
    for (int p = 0; p < args.size; ++p) {
      if (flags[p][b] != 0) {
        ranks.words[p / 32] |= uint32_t{1} << (p % 32);
        any = true;
      }
    }
    if (any) {
      count_block(args, ranks, b, args.counts[b % kDirectBlocks]);
      sum_block(args, bases.data(), ranks, b, 0, 1);
    }
  }
}

// The barriers: blocks are there, with their flags; sums have arrived.
void Direct::sum(const DirectSumArgs& args) {
  if (!ranks_agree(args.agree)) {
    return;
  }
  Announcement announcement{};
  announcement.common = {
      0,
      0,
      args.tensor.count,
      kDirectSum,
      static_cast<int32_t>(args.tensor.type),
      args.mean,
      static_cast<int32_t>(args.tensor.block)};
  run(
      announcement,
      args.signals,
      args.stop,
      [&] {
        serial::find_blocks(
            {args.tensor, args.num_blocks, args.flags, nullptr});
      },
      [&] { sum_blocks(args); });
}

int32_t direct_version() {
  return static_cast<int32_t>(from_environment(
      "FUSEDPG_FAKE_DIRECT_VERSION",
      from_environment("FUSEDPG_FAKE_NCCL_VERSION", 22809)));
}

int direct_create(const DirectCreateArgs* args, void** context, int* usable) {
  *context = nullptr;
  *usable = 0;
  if (args->nccl_version / 100 != direct_version() / 100 ||
      args->window == nullptr) {
    return kSuccess;
  }
  const std::shared_ptr<Comm> comm = comms().find(args->comm);
  const std::shared_ptr<Window> window =
      comm == nullptr ? nullptr : comm->window(args->window);
  if (window == nullptr || args->size != comm->size ||
      args->dev_comm_create == nullptr || args->dev_comm_destroy == nullptr ||
      args->team_lsa == nullptr) {
    return calls().bad_handle(
        kInvalidValue, "wrong arguments of direct_create");
  }
  using TeamLsa = Team (*)(NcclComm);
  const auto team_lsa = reinterpret_cast<TeamLsa>(args->team_lsa);
  if (team_lsa(args->comm).ranks != args->size) {
    return kSuccess;
  }
  using Create = NcclResult (*)(NcclComm, const int32_t*, void*);
  const auto create = reinterpret_cast<Create>(args->dev_comm_create);
  const int channel = comm->claim_direct_channel();
  const NcclResult result = channel < 0
      ? kNcclInternalError
      : create(args->comm, &args->multimem, nullptr);
  if (result != kNcclSuccess && result != kNcclInProgress) {
    return kUnknownError;
  }
  *context = nccl_handle();
  *usable = 1;
  Contexts& contexts = global<Contexts>();
  const std::lock_guard<std::mutex> lock(contexts.mutex);
  contexts.alive.emplace(
      *context, std::make_shared<Direct>(comm, window, channel));
  return result == kNcclSuccess ? kSuccess : kNotReady;
}

int direct_destroy(void* context) {
  std::shared_ptr<Direct> ending;
  Contexts& contexts = global<Contexts>();
  const std::lock_guard<std::mutex> lock(contexts.mutex);
  const auto found = contexts.alive.find(context);
  if (found == contexts.alive.end()) {
    return calls().bad_handle(
        kInvalidValue, "no such context of direct_create");
  }
  ending = std::move(found->second);
  contexts.alive.erase(found);
  return kSuccess;
}

namespace {

template <typename Args>
int enqueue(
    const Args& args,
    Stream stream,
    void (Direct::*kernel)(const Args&)) {
  std::shared_ptr<Direct> direct;
  Contexts& contexts = global<Contexts>();
  {
    const std::lock_guard<std::mutex> lock(contexts.mutex);
    const auto found = contexts.alive.find(args.context);
    if (found == contexts.alive.end()) {
      return calls().bad_handle(
          kInvalidValue, "no such context of direct_create");
    }
    direct = found->second;
  }
  return streams().enqueue(
      stream,
      [direct, kernel, copied = args] { ((*direct).*kernel)(copied); },
      current_device());
}

} // namespace

int direct_step(const DirectArgs* args, Stream stream) {
  return enqueue(*args, stream, &Direct::step);
}

int direct_sum(const DirectSumArgs* args, Stream stream) {
  return enqueue(*args, stream, &Direct::sum);
}

} // namespace fusedpg::fake
