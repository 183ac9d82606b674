// Enqueues one fused operation: the way of its chunks through two streams.
//
//   compute: pack(0)          pack(1) update(0)          pack(2) update(1)
//   unpack(0) ... wire:    reduce-scatter(0)  reduce-scatter(1)
//   all-gather(0) ...
//
// The first chunk has a header, by which ranks agree: nothing is written for
// good before it has been read.
//
// Each arrow between the streams is an event. Buffers alternate, so that chunk
// t + 1 is packed and reduced while chunk t is updated and gathered.

#include <algorithm>
#include <numeric>

#include "base/ownership.hpp"
#include "base/round_up.hpp"
#include "cuda/run.hpp"

namespace fusedpg::cuda {
namespace {

// Ranks exchange a header's hash and weight at the first call of a kind.
constexpr size_t kKindBytes = kHeaderFlags;

} // namespace

StepConfig Run::step_config() const {
  bool in_arena = e_.peers_.has_value();
  for (size_t t = 0; t < n_ && in_arena; ++t) {
    const TensorInfo& info = task_.tensors[t];
    const auto inside = [&](const void* p, DType type) {
      return info.count == 0 || e_.in_arena(p, info.count * dtype_size(type));
    };
    in_arena = inside(info.grad, task_.grad_type) &&
        inside(info.param, task_.param_type);
  }
  return {
      task_.reduces,
      task_.updates,
      lamb_,
      task_.grad_type,
      task_.param_type,
      in_arena,
      e_.peers_.has_value(),
      e_.ring_,
      task_.program != nullptr,
      e_.size_,
      e_.settings_.wide_half_sums};
}

void Run::acquire() {
  const size_t element =
      std::max(dtype_size(task_.grad_type), dtype_size(task_.param_type));
  const size_t elements =
      std::accumulate(task_.counts.begin(), task_.counts.end(), size_t(0));
  const size_t block = e_.chunk_bytes(elements * element) / element /
      static_cast<size_t>(e_.size_);
  // What is widened has to be packed, and so have products with a weight unless
  // their owner makes them.
  const bool packs = (weighted_ && !folds_) || task_.widens;
  layout_ = &e_.layout_of(
      task_.counts,
      block,
      select_whole(config_, path_, packs),
      header_elements());
  OpDescriptor facts = task_.facts;
  facts.path = path_;
  operation_->set_facts(facts);
  try {
    e_.upload(*layout_);
    if (path_ != GpuPath::kDirect) {
      reserve_wire();
    }
    const size_t bytes = lay_out_slot();
    if (operation_->captured_) {
      e_.captured_slots_.push_back(e_.make_slot(bytes));
      operation_->slot_ = e_.captured_slots_.back();
    } else {
      operation_->slot_ = e_.take_slot(bytes);
    }
  } catch (const Error& error) {
    fail(
        error.kind(),
        "{} [{}, sequence {}, rank {}]; nothing was changed, and the group "
        "works on",
        error.what(),
        operation_->summary,
        operation_->sequence,
        e_.rank_);
  }
}

size_t Run::header_elements() const {
  if (!rides_) {
    return 0;
  }
  const size_t elements = folds_
      ? header_bytes(n_) / dtype_size(task_.grad_type) + 1
      : coded_elements(n_, weighted_, static_cast<size_t>(e_.size_));
  return round_up(elements, static_cast<size_t>(kShardAlignment));
}

void Run::reserve_wire() {
  const size_t all = layout_->layout.max_block * static_cast<size_t>(e_.size_);
  size_t results = 0; // bytes of an element
  for (const DType type : task_.results) {
    results += dtype_size(type);
  }
  size_t grads = 0;
  if (task_.reduces && !in_place()) {
    // What is folded is received behind what is sent.
    grads = (folds_ ? 2 : 1) * all * dtype_size(task_.grad_type);
  }
  e_.reserve_wire(grads, alone() ? 0 : all * results);
}

void Run::enqueue() {
  e_.last_path_ = gpu_path_name(path_);
  fill_slot();
  meet_ranks();
  agree();
  if (path_ == GpuPath::kDirect) {
    run_direct();
  } else if (lamb_) {
    if (path_ == GpuPath::kRing) {
      run_ring();
    } else {
      pass(task_.reduces, Middle::kMoments, false);
    }
    exchange_norms();
    pass(false, Middle::kUpdate, true);
  } else if (path_ == GpuPath::kRing) {
    run_ring();
  } else if (task_.updates) {
    pass(task_.reduces, Middle::kUpdate, !task_.results.empty());
  } else {
    pass(true, Middle::kOutputs, false);
  }
}

size_t Run::lay_out_slot() {
  const bool direct = path_ == GpuPath::kDirect;
  const size_t groups = task_.step ? task_.step->hypers.size() : 1;
  const auto ranks = static_cast<size_t>(e_.size_);
  Arrays arrays;
  tensors_ = arrays.add(n_ * sizeof(TensorInfo));
  hypers_ = arrays.add(groups * sizeof(kernels::Hyper));
  lrs_ = arrays.add(groups * sizeof(void*));
  lr_types_ = arrays.add(groups * sizeof(DType));
  offsets_ = arrays.add(direct ? 2 * n_ * sizeof(uint64_t) : 0);
  rings_ = arrays.add(num_rings() * sizeof(RingUpdate));
  uploaded_ = arrays.bytes();
  kinds_ = arrays.add(ranks * kKindBytes);
  headers_ = arrays.add(rides_ ? 0 : ranks * slot_header());
  weights_ = arrays.add(ranks * sizeof(double));
  scalars_ = arrays.add(n_ * sizeof(TensorScalars));
  all_offsets_ = arrays.add(direct ? ranks * 2 * n_ * sizeof(uint64_t) : 0);
  partial_sums_ = arrays.add(partial_sum_bytes());
  sums_ = arrays.add(lamb_ ? 2 * n_ * sizeof(double) : 0);
  all_sums_ = arrays.add(lamb_ ? ranks * 2 * n_ * sizeof(double) : 0);
  return arrays.bytes();
}

void Run::fill_slot() {
  const size_t groups = task_.step ? task_.step->hypers.size() : 1;
  std::copy(
      task_.tensors.begin(), task_.tensors.end(), host<TensorInfo>(tensors_));
  has_lrs_ = false;
  if (task_.step == nullptr) { // nobody's, but prepare() looks at it
    new (host<kernels::Hyper>(hypers_)) kernels::Hyper();
  }
  for (size_t g = 0; task_.step != nullptr && g < groups; ++g) {
    const StepCall& step = *task_.step;
    host<kernels::Hyper>(hypers_)[g] = step.hypers[g];
    const DeviceScalar lr = g < step.lrs.size() ? step.lrs[g] : DeviceScalar();
    host<const void*>(lrs_)[g] = lr.data;
    host<DType>(lr_types_)[g] = lr.type;
    has_lrs_ = has_lrs_ || lr.data != nullptr;
  }
  for (size_t t = 0; t < num_rings(); ++t) {
    host<RingUpdate>(rings_)[t] = ring_update(t);
  }
  if (path_ == GpuPath::kDirect) {
    const auto* arena = static_cast<const char*>(e_.arena());
    for (size_t t = 0; t < n_; ++t) {
      const TensorInfo& info = task_.tensors[t];
      uint64_t* pair = host<uint64_t>(offsets_) + 2 * t;
      pair[0] =
          static_cast<uint64_t>(static_cast<const char*>(info.grad) - arena);
      pair[1] =
          static_cast<uint64_t>(static_cast<const char*>(info.param) - arena);
    }
  }
  check(
      "cudaMemcpyAsync",
      cuda_.copy(device<char>(0), host<char>(0), uploaded_, compute_));
}

Header Run::header(char* data, size_t stride) const {
  Header header{};
  header.data = data;
  header.stride = stride;
  header.hash = hash_of(operation_->facts());
  header.type = DType::kOpaque;
  header.tensors = static_cast<uint32_t>(n_);
  header.rank = e_.rank_;
  header.size = e_.size_;
  return header;
}

void Run::propose(const Header& to, size_t copies, size_t items) {
  ProposeArgs args{};
  args.to = to;
  args.copies = static_cast<uint32_t>(copies);
  args.items = static_cast<uint32_t>(items);
  args.used = task_.used;
  args.found_inf = task_.found_inf;
  args.weight = task_.reduction.weight.value_or(1.0);
  check("propose", cuda_.propose(&args, compute_));
}

void Run::meet_ranks() {
  OpDescriptor kind = operation_->facts();
  kind.value_hash = 0;
  if (alone() || operation_->captured_ || e_.known_.count(hash_of(kind)) != 0) {
    return;
  }
  const size_t mine = kinds_ + static_cast<size_t>(e_.rank_) * kKindBytes;
  propose(header(device<char>(mine), 0), 1, kKindBytes);
  order(compute_, e_.events_.proposed, wire_);
  gather(mine, kinds_, kKindBytes);
  PrepareArgs args{};
  args.from = header(device<char>(kinds_), kKindBytes);
  args.from.tensors = 0;
  args.mismatch = &e_.flags_->mismatch;
  args.sequence = operation_->sequence;
  check("prepare", cuda_.prepare(&args, wire_));
  const Event agreed = e_.events_.agreed.get();
  check("cudaEventRecord", cuda_.event_record(agreed, wire_));
  e_.await_agreement(*operation_, agreed);
  e_.known_.insert(hash_of(kind));
}

void Run::agree() {
  if (rides_) {
    return;
  }
  const size_t bytes = slot_header();
  const size_t mine = headers_ + static_cast<size_t>(e_.rank_) * bytes;
  propose(header(device<char>(mine), 0), 1, bytes);
  if (alone()) {
    return;
  }
  if (path_ == GpuPath::kDirect) {
    exchange();
    return;
  }
  order(compute_, e_.events_.proposed, wire_);
  gather(mine, headers_, bytes);
  check("cudaEventRecord", cuda_.event_record(e_.events_.agreed.get(), wire_));
}

void Run::gather(size_t from, size_t to, size_t bytes) {
  e_.carrier_->all_gather(device<char>(from), device<char>(to), bytes, wire_);
}

void Run::prepare() {
  if (prepared_) {
    return;
  }
  prepared_ = true;
  PrepareArgs p{};
  if (rides_) {
    p.from = riding_header(reduced(0));
  } else {
    p.from = header(device<char>(headers_), slot_header());
    if (!alone() && path_ != GpuPath::kDirect) {
      check(
          "cudaStreamWaitEvent",
          cuda_.stream_wait_event(compute_, e_.events_.agreed.get()));
    }
  }
  const StepCall* step = task_.step;
  p.tensors = task_.updates ? device<TensorInfo>(tensors_) : nullptr;
  p.hypers = device<kernels::Hyper>(hypers_);
  p.lrs = has_lrs_ ? device<const void*>(lrs_) : nullptr;
  p.lr_types = device<DType>(lr_types_);
  p.grad_scale = step ? step->grad_scale : nullptr;
  p.weights = weighted_ ? device<double>(weights_) : nullptr;
  p.divisor = divisor();
  p.scalars = device<TensorScalars>(scalars_);
  p.used = task_.used;
  p.found_inf = task_.found_inf;
  p.mismatch = &e_.flags_->mismatch;
  p.sequence = operation_->sequence;
  if (path_ == GpuPath::kDirect) {
    p.stop = e_.peers_->stop;
    p.late = e_.peers_->late;
  }
  check("prepare", cuda_.prepare(&p, compute_));
}

// Behind the gradients of a block of the first chunk.
Header Run::riding_header(char* block) const {
  const size_t element = dtype_size(task_.grad_type);
  Header riding =
      header(block + chunks()[0].block * element, sent(0) * element);
  if (!folds_) {
    riding.type = task_.grad_type;
    riding.op = task_.red_op;
    riding.weighted = weighted_;
  }
  return riding;
}

Chunk Run::chunk(size_t t, size_t block) const {
  const ChunkLayout& c = chunks()[t];
  return {
      device<TensorInfo>(tensors_),
      layout_->pieces,
      layout_->tiles + c.first_tile,
      static_cast<uint32_t>(c.num_tiles),
      e_.rank_,
      e_.size_,
      0,
      block};
}

void Run::pass(bool reduces, Middle middle, bool gathers) {
  const size_t n = chunks().size();
  const CudaEngine::Events& ev = e_.events_;
  reduces = reduces && !in_place();
  gathers = gathers && !alone();
  if (n == 0) {
    prepare(); // flags and counters
  }
  for (size_t t = 0; t < n + 2; ++t) {
    if (t < n && reduces) {
      pack(t);
      if (!alone()) {
        order(compute_, ev.packed[t % 2], wire_);
        reduce_scatter(t);
        check(
            "cudaEventRecord",
            cuda_.event_record(ev.reduced[t % 2].get(), wire_));
      }
    }
    if (t >= 1 && t - 1 < n) {
      const size_t u = t - 1;
      if (reduces && !alone()) {
        check(
            "cudaStreamWaitEvent",
            cuda_.stream_wait_event(compute_, ev.reduced[u % 2].get()));
      }
      prepare();
      work_on(u, middle, reduces);
      if (gathers) {
        order(compute_, ev.updated[u % 2], wire_);
        all_gather(u);
        check(
            "cudaEventRecord",
            cuda_.event_record(ev.gathered[u % 2].get(), wire_));
      }
    }
    if (t >= 2 && gathers) {
      check(
          "cudaStreamWaitEvent",
          cuda_.stream_wait_event(compute_, ev.gathered[t % 2].get()));
      unpack(t - 2);
    }
  }
}

void Run::pack(size_t t) {
  if (chunks()[t].whole) {
    return;
  }
  if (const size_t header = chunks()[t].header; header != 0) {
    const size_t items = folds_ ? header * dtype_size(task_.grad_type) : header;
    propose(
        riding_header(grad_block(t, 0)), static_cast<size_t>(e_.size_), items);
  }
  PackArgs args{};
  args.chunk = chunk(t, sent(t));
  args.wire = grad_block(t, 0);
  args.type = task_.widens ? task_.program->dtype : task_.grad_type;
  args.widens = task_.widens;
  args.weight = weighted_ && !folds_ ? *task_.reduction.weight : 1.0;
  check("pack", cuda_.pack(&args, compute_));
}

void Run::reduce_scatter(size_t t) {
  const ChunkLayout& c = chunks()[t];
  const void* from = c.whole ? task_.tensors[c.tensor].grad
                             : static_cast<const void*>(grad_block(t, 0));
  if (folds_) {
    e_.carrier_->all_to_all(
        from, received(t), sent(t) * dtype_size(task_.grad_type), wire_);
    return;
  }
  e_.carrier_->reduce_scatter(
      from,
      grad_block(t, e_.rank_),
      sent(t),
      task_.grad_type,
      task_.red_op,
      wire_);
}

UpdateArgs Run::step_args() const {
  const StepCall& step = *task_.step;
  const StepHyper& h = step.hypers[0];
  UpdateArgs u{};
  u.formula = formula(task_.op);
  u.param_type = step.param_type;
  u.grad_type = step.grad_type;
  u.state_type = step.state_type;
  u.masters = step.has_masters;
  u.decoupled = h.decoupled;
  u.amsgrad = h.amsgrad;
  u.momentum = h.momentum != 0;
  u.nesterov = h.nesterov;
  u.scalars = device<TensorScalars>(scalars_);
  return u;
}

UpdateArgs Run::update_args(size_t t, bool reduced_here) const {
  UpdateArgs u = step_args();
  u.chunk = chunk(t, sent(t));
  u.folds = reduced_here && folds_;
  u.grads = reduced_here ? reduced(t) : nullptr;
  u.weights = weighted_ ? device<double>(weights_) : nullptr;
  u.params_out = alone() ? nullptr : param_block(t, e_.rank_);
  return u;
}

void Run::work_on(size_t t, Middle middle, bool reduced_here) {
  if (middle == Middle::kOutputs) {
    UnpackArgs args{};
    args.chunk = chunk(t, sent(t));
    args.wire = reduced(t);
    args.type = task_.grad_type;
    args.to_outputs = true;
    args.folds = folds_;
    args.scalars = device<TensorScalars>(scalars_);
    args.divisor = divisor();
    args.weights = weighted_ ? device<double>(weights_) : nullptr;
    check("unpack", cuda_.unpack(&args, compute_));
    return;
  }
  if (task_.program != nullptr) {
    launch_program(t, reduced_here);
    return;
  }
  const UpdateArgs update = update_args(t, reduced_here);
  if (middle == Middle::kMoments) {
    const MomentsArgs args{
        update, device<double>(partial_sums_) + 2 * chunks()[t].first_tile};
    check("lamb_moments", cuda_.lamb_moments(&args, compute_));
  } else {
    check("update", cuda_.update(&update, compute_));
  }
}

void Run::all_gather(size_t t) {
  for (size_t k = 0; chunks()[t].block != 0 && k < task_.results.size(); ++k) {
    e_.carrier_->all_gather(
        param_block(t, e_.rank_, k),
        param_block(t, 0, k),
        chunks()[t].block * dtype_size(task_.results[k]),
        wire_);
  }
}

void Run::unpack(size_t t) {
  for (size_t k = 0; k < task_.results.size(); ++k) {
    UnpackArgs args{};
    args.chunk = chunk(t, chunks()[t].block);
    args.chunk.tensors += k; // a program's pieces are of the first one
    args.wire = param_block(t, 0, k);
    args.type = task_.results[k];
    args.scalars = device<TensorScalars>(scalars_);
    args.divisor = 1;
    check("unpack", cuda_.unpack(&args, compute_));
  }
}

} // namespace fusedpg::cuda
