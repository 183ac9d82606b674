#include "collectives/fused_program.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

#include "collectives/reduction.hpp"

namespace fusedpg {
namespace {

// What is reduced before it is computed with: fits the nearer caches.
constexpr size_t kTile = 2048;
constexpr size_t kWidest = 8; // bytes of an element
constexpr size_t kLine = 64; // of a cache

constexpr size_t kNone = std::numeric_limits<size_t>::max();

// A program that is being executed.
class ProgramRun {
 public:
  ProgramRun(Way& way, const ProgramCall& call)
      : way_(way),
        call_(call),
        lanes_(
            call.runs == 0 ? Plan::shards({call.count}, way.size())
                           : Plan::blocks(call.count, call.runs, way.size())),
        own_(lanes_[way.rank()]) {
    for (const LanePiece& piece : own_) {
      own_count_ += piece.count;
    }
    for (const size_t element : call.kept) {
      kept_.emplace_back(new char[own_count_ * element]);
    }
    begin_sums();
  }

  bool run() {
    const std::string wrong = misfit(call_);
    if (!wrong.empty()) {
      fail(
          ErrorKind::kInvalid,
          "fused: {}, sequence number {}, on rank {}: {}",
          describe(facts(call_)),
          way_.op().sequence,
          way_.rank(),
          wrong);
    }
    OpDescriptor d = facts(call_);
    d.flags = call_.function == nullptr ? kNoFunction : 0;
    check_nan(way_.op(), d, call_.source, call_.count);
    const size_t direct = first_gathered();
    bool able = true;
    Way::AtOnce small;
    if (!call_.sums.empty()) {
      // Ranks have to hear of each other's sums, so one way is not enough.
    } else if (none_gathered()) {
      small = at_once(d, direct, own_, able);
    } else if (whole_everywhere()) {
      small = at_once(d, direct, {{0, 0, call_.count}}, able);
    }
    if (small.sources) {
      return able;
    }
    const Plan plan = epilogue_plan(call_.sums.empty() ? direct : kNone);
    if (!small.entered) {
      way_.enter(&plan, d, {});
    }
    if (any_rank(way_, kNoFunction)) {
      return false;
    }
    way_.run(plan, d);
    while (phase_ < call_.sums.size()) {
      next_phase(d, direct);
    }
    // A plan has one result: more of them travel after it.
    for (size_t k = 0; k < call_.outputs.size(); ++k) {
      if (k == direct || !call_.outputs[k].gathered) {
        continue;
      }
      const Plan rest = gather_plan(call_.outputs[k]);
      d.flags = 0;
      way_.enter(&rest, d, {});
      way_.run(rest, d);
    }
    return true;
  }

 private:
  // Whether a rank has all that any element needs, and wants all results: then
  // each can compute a small program for itself, which saves the second way.
  // The program's hash says it, so ranks that agree on that agree on this.
  bool whole_everywhere() const {
    const auto part = [](const ProgramCall::Input& input) {
      return input.kind == ProgramCall::Operand::kPart ||
          input.kind == ProgramCall::Operand::kPartOfRows;
    };
    const auto gathered = [](const ProgramCall::Output& output) {
      return output.gathered;
    };
    return std::none_of(call_.inputs.begin(), call_.inputs.end(), part) &&
        std::all_of(call_.outputs.begin(), call_.outputs.end(), gathered);
  }

  // This rank computes `pieces` from all ranks' whole contributions.
  // `able`: whether all ranks have the function; nothing is written if not.
  Way::AtOnce at_once(
      OpDescriptor& d,
      size_t direct,
      const std::vector<LanePiece>& pieces,
      bool& able) {
    kernels::ReduceArgs args;
    args.dtype = call_.dtype;
    args.op = call_.op;
    const Span source{
        const_cast<void*>(call_.source), call_.count * dtype_size(call_.dtype)};
    const size_t begin = pieces.empty() ? 0 : pieces.front().begin;
    const size_t end =
        pieces.empty() ? 0 : pieces.back().begin + pieces.back().count;
    const Way::AtOnce small =
        way_.at_once(d, {args, source, begin, end - begin});
    if (!small.sources) {
      return small;
    }
    able = !any_rank(way_, kNoFunction);
    if (!able) {
      return small;
    }
    const Sources srcs = *small.sources;
    void* dst = direct == kNone ? nullptr : call_.outputs[direct].data;
    const size_t size = dtype_size(
        srcs.folded ? wide_type(call_.dtype, call_.op) : call_.dtype);
    std::vector<const void*> shifted(srcs.num);
    for (const LanePiece& piece : pieces) {
      for (size_t k = 0; k < srcs.num; ++k) {
        shifted[k] = static_cast<const char*>(srcs.data[k]) +
            (piece.begin - begin) * size;
      }
      apply(
          direct,
          piece.begin,
          piece.count,
          &dst,
          direct == kNone ? 0 : 1,
          {shifted.data(), srcs.num, srcs.folded},
          /*stream=*/false);
    }
    return small;
  }

  // Of an owned element: how many elements before it are not owned.
  size_t others_before(size_t begin) const {
    if (call_.runs == 0) {
      return own_.empty() ? 0 : own_.front().begin;
    }
    const size_t block = call_.count / (call_.runs * lanes_.size());
    const size_t run = begin / (block * lanes_.size());
    return begin - run * block - begin % block;
  }
  // Its index in the larger tensor.
  uint64_t index(size_t begin) const {
    if (call_.runs == 0) {
      return call_.first + begin;
    }
    const size_t block = call_.count / (call_.runs * lanes_.size());
    return call_.first + begin / block * call_.spacing + begin % block;
  }

  bool none_gathered() const {
    return std::none_of(
        call_.outputs.begin(),
        call_.outputs.end(),
        [](const ProgramCall::Output& output) { return output.gathered; });
  }
  // Which result travels with the reduction: it has as many elements as that.
  size_t first_gathered() const {
    for (size_t k = 0; k < call_.outputs.size(); ++k) {
      const ProgramCall::Output& output = call_.outputs[k];
      if (output.gathered && !output.of_rows &&
          output.phase == call_.sums.size()) {
        return k;
      }
    }
    return kNone;
  }

  // Memory for what the phase finds: numbers of blocks, one after the other.
  void begin_sums() {
    if (phase_ < call_.sums.size()) {
      const size_t blocks = (own_count_ + kProgramBlock - 1) / kProgramBlock;
      sums_.assign(blocks * call_.sums[phase_].size(), 0);
    }
  }

  static double nothing(RedOp op) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    return op == RedOp::kMax ? -kInfinity : op == RedOp::kMin ? kInfinity : 0;
  }
  static double combined(RedOp op, double a, double b) {
    if (op == RedOp::kSum) {
      return a + b;
    }
    if (a != a || b != b) {
      return a + b; // a NaN
    }
    return op == RedOp::kMax ? std::max(a, b) : std::min(a, b);
  }

  // Combines the phase's numbers over all ranks' elements, blocks in order and
  // then ranks in order, and carries out the next phase.
  void next_phase(OpDescriptor& d, size_t direct) {
    const std::vector<RedOp>& ops = call_.sums[phase_];
    std::vector<uint64_t> words(ops.size());
    for (size_t k = 0; k < ops.size(); ++k) {
      double sum = nothing(ops[k]);
      for (size_t at = k; at < sums_.size(); at += ops.size()) {
        sum = combined(ops[k], sum, sums_[at]);
      }
      std::memcpy(&words[k], &sum, sizeof sum);
    }
    ++phase_;
    const bool last = phase_ == call_.sums.size();
    Plan plan = epilogue_plan(last ? direct : kNone);
    plan.reads = false;
    plan.tensors.front().src = nullptr;
    d.flags = 0;
    way_.enter(&plan, d, words);
    for (size_t k = 0; k < ops.size(); ++k) {
      double total = nothing(ops[k]);
      for (int p = 0; p < way_.size(); ++p) {
        double sum = 0;
        std::memcpy(&sum, way_.extra(p) + k, sizeof sum);
        total = combined(ops[k], total, sum);
      }
      totals_.push_back(total);
    }
    begin_sums();
    compute(
        kNone,
        own_.empty() ? 0 : own_.front().begin,
        0,
        0,
        nullptr,
        0,
        {},
        /*stream=*/false);
    way_.run(plan, d);
  }

  // reduce-scatter -> function -> all-gather of the output `direct`.
  Plan epilogue_plan(size_t direct) {
    Plan plan;
    plan.src_size = dtype_size(call_.dtype);
    plan.dst_size = plan.src_size;
    plan.src_type = call_.dtype;
    plan.op = call_.op;
    plan.receiver = Plan::kNobody;
    char* dst = nullptr;
    if (direct != kNone) {
      plan.receiver = Plan::kAll;
      plan.dst_size = call_.outputs[direct].element;
      dst = call_.outputs[direct].data;
    }
    plan.tensors.push_back({static_cast<const char*>(call_.source), dst});
    plan.lanes = lanes_;
    plan.granule = call_.sums.empty() ? call_.row : kProgramBlock;
    plan.epilogue = [this, direct](
                        size_t /* tensor */,
                        size_t begin,
                        size_t count,
                        void* const* dsts,
                        size_t num_dsts,
                        const Sources& srcs,
                        bool stream) {
      apply(direct, begin, count, dsts, num_dsts, srcs, stream);
    };
    return plan;
  }

  // Everyone gets what the owners have computed.
  Plan gather_plan(const ProgramCall::Output& output) {
    Plan plan;
    plan.src_size = plan.dst_size = output.element;
    plan.reads = false;
    plan.tensors.push_back({nullptr, output.data});
    plan.lanes = lanes_;
    for (std::vector<LanePiece>& lane : plan.lanes) {
      for (LanePiece& piece : lane) {
        piece.begin /= output.of_rows ? call_.row : 1;
        piece.count /= output.of_rows ? call_.row : 1;
      }
    }
    plan.epilogue = [this, &output](
                        size_t /* tensor */,
                        size_t begin,
                        size_t count,
                        void* const* dsts,
                        size_t num_dsts,
                        const Sources& /* none */,
                        bool stream) {
      const char* from = output.data + begin * output.element;
      for (size_t k = 0; k < num_dsts; ++k) {
        if (dsts[k] != from) {
          way_.kernels().copy(dsts[k], from, count * output.element, stream);
        }
      }
    };
    return plan;
  }

  // The function on what the ranks contribute to `count` elements.
  void apply(
      size_t direct,
      size_t begin,
      size_t count,
      void* const* dsts,
      size_t num_dsts,
      const Sources& srcs,
      bool stream) const {
    const auto ranks = static_cast<size_t>(way_.size());
    if (phase_ > 0) {
      compute(direct, begin, count, 0, dsts, num_dsts, {}, stream);
      return;
    }
    if (!srcs.folded && srcs.num == ranks && ranks <= kMostProgramSources) {
      compute(direct, begin, count, 0, dsts, num_dsts, srcs, stream);
      return;
    }
    // Whole rows, of which one may be longer.
    const size_t tile = std::max<size_t>(kTile / call_.row, 1) * call_.row;
    alignas(64) char few[kTile * kWidest];
    thread_local std::vector<std::max_align_t> many;
    char* sums = few;
    if (tile > kTile) {
      many.resize(tile * kWidest / sizeof(std::max_align_t) + 1);
      sums = reinterpret_cast<char*>(many.data());
    }
    const void* const sum = sums;
    for (size_t at = 0; at < count; at += tile) {
      const size_t n = std::min(tile, count - at);
      reduce(sums, n, at, srcs);
      const Sources reduced{&sum, 0};
      compute(direct, begin + at, n, at, dsts, num_dsts, reduced, stream);
    }
  }

  // `begin`: in the tensor; `offset`: of it from where dsts point.
  void compute(
      size_t direct,
      size_t begin,
      size_t count,
      size_t offset,
      void* const* dsts,
      size_t num_dsts,
      const Sources& srcs,
      bool stream) const {
    thread_local std::vector<const void*> inputs;
    thread_local std::vector<void*> places;
    thread_local std::vector<ProgramOutput> outputs;
    const size_t first = others_before(begin);
    inputs.clear();
    for (const ProgramCall::Input& input : call_.inputs) {
      inputs.push_back(input.data + place(input, begin, first, call_.row));
    }
    places.clear();
    for (const ProgramCall::Output& output : call_.outputs) {
      places.push_back(output.data + place(output, begin, first, call_.row));
    }
    for (size_t k = 0; k < num_dsts; ++k) {
      places.push_back(
          static_cast<char*>(dsts[k]) + offset * call_.outputs[direct].element);
    }
    const size_t before_kept = places.size();
    for (size_t k = 0; k < kept_.size(); ++k) {
      places.push_back(kept_[k].get() + (begin - first) * call_.kept[k]);
    }
    thread_local std::vector<char> scratch;
    scratch.resize(std::max(scratch.size(), call_.scratch + kLine));
    char* const memory = scratch.data();
    void* const own =
        memory + (-reinterpret_cast<uintptr_t>(memory) & (kLine - 1));
    outputs.clear();
    for (size_t k = 0; k < call_.outputs.size(); ++k) {
      // What has just been read is in the cache.
      const bool in_tiles = stream && !call_.outputs[k].in_place;
      ProgramOutput output{places.data() + k, 1, !in_tiles, stream};
      if (k == direct) {
        output.to = places.data() + call_.outputs.size();
        output.num = num_dsts;
      }
      outputs.push_back(output);
    }
    for (size_t k = before_kept; k < places.size(); ++k) {
      outputs.push_back({places.data() + k, 1, 1, 0});
    }
    if (call_.scratch != 0) {
      outputs.push_back({&own, 1, 1, 0});
    }
    const ProgramArgs args{
        srcs.data,
        srcs.num,
        inputs.data(),
        outputs.data(),
        call_.numbers.data(),
        call_.seeds.data(),
        phase_,
        sums_of(begin - first),
        totals_.data()};
    call_.function(&args, index(begin), count);
  }

  // Where the numbers of a block go that begins at an owned element.
  double* sums_of(size_t own) const {
    if (phase_ >= call_.sums.size()) {
      return nullptr;
    }
    return sums_.data() + own / kProgramBlock * call_.sums[phase_].size();
  }

  void reduce(void* sums, size_t count, size_t offset, const Sources& srcs)
      const {
    const DType wide = wide_type(call_.dtype, call_.op);
    kernels::ReduceArgs args;
    args.dtype = srcs.folded ? wide : call_.dtype;
    args.op = call_.op;
    args.wide = args.dtype != wide;
    thread_local std::vector<const void*> parts;
    parts.clear();
    for (size_t k = 0; k < srcs.num; ++k) {
      parts.push_back(
          static_cast<const char*>(srcs.data[k]) +
          offset * dtype_size(args.dtype));
    }
    way_.kernels().reduce(args, &sums, 1, parts.data(), srcs.num, count, false);
  }

  Way& way_;
  const ProgramCall& call_;
  const Lanes lanes_;
  const std::vector<LanePiece>& own_;
  size_t own_count_ = 0;
  size_t phase_ = 0;
  mutable std::vector<double> sums_; // of the phase; the epilogue fills it
  std::vector<double> totals_; // of the phases before
  std::vector<std::unique_ptr<char[]>> kept_;
};

} // namespace

bool fused_program(Way& way, const ProgramCall& call) {
  const bool done = ProgramRun(way, call).run();
  if (done) {
    way.count(OpCode::kFusedProgram);
  }
  return done;
}

} // namespace fusedpg
