#include "c10d/routes/hosts.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "c10d/abortable.hpp"
#include "c10d/coo.hpp"
#include "c10d/delegate.hpp"
#include "c10d/errors.hpp"
#include "collectives/fused_step.hpp"
#include "collectives/hosts_way.hpp"
#include "collectives/reduction.hpp"

namespace fusedpg {
namespace {

// Gloo knows neither AVG nor PREMUL_SUM: both are SUM with a factor, before or
// after.
struct GlooReduction {
  c10d::ReduceOp op;
  double before = 1.0;
  int64_t divisor = 1;

  explicit GlooReduction(const Reduction& given) : op(given.op) {
    if (given.args.op == RedOp::kAvg) {
      divisor = given.args.divisor;
      op = c10d::ReduceOp::SUM;
    } else if (given.args.op == RedOp::kPremulSum) {
      before = given.args.factor;
      op = c10d::ReduceOp::SUM;
    }
  }
  void prepare(at::Tensor& t) const {
    if (before != 1.0) {
      t.mul_(before);
    }
  }
  void finish(at::Tensor& t) const {
    if (divisor == 1) {
      return;
    }
    if (t.is_floating_point() || t.is_complex()) {
      t.div_(divisor);
    } else {
      t.div_(divisor, "trunc");
    }
  }
};

} // namespace

class HostsTurn : public Turn {
 public:
  HostsTurn(
      HostsRoute& route,
      uint64_t ticket,
      std::chrono::milliseconds timeout)
      : route_(route),
        gloo_(*route.delegate_),
        stats_(route.group_.stats),
        rank_(route.getRank()),
        size_(route.getSize()),
        ticket_(ticket),
        timeout_(timeout) {}

  void all_reduce(const std::vector<Flat>& tensors, const Reduction& reduction)
      override {
    SkipState& skip = route_.skip_;
    DelegateConfig delegated;
    delegated.ranks_share_hosts = route_.ranks_share_hosts_;
    delegated.ucx = route_.carried_by_ucx(timeout_);
    const bool dense_is_delegated = select_delegate(delegated);
    for (const Flat& flat : tensors) {
      const ReduceTensor tensor = flat.reduce_tensor();
      if (skip.mode == BlockSkip::kOff && dense_is_delegated) {
        agree(tensor, reduction);
        delegate_sum(flat, reduction);
        continue;
      }
      const OpDescriptor d =
          facts(sum_call(OpCode::kAllReduce, {tensor}, reduction.args));
      const SkipConfig config = skip_config(skip, size_, d, reduction.args);
      delegated.choice = select_skip(config);
      if (select_delegate(delegated)) {
        if (select_estimate(config)) {
          skip.estimates.count_dense(d.shape_hash, d.dtype);
        }
        agree(tensor, reduction);
        delegate_sum(flat, reduction);
        continue;
      }
      NetContext ctx = context();
      HostsWay way(
          ctx,
          dense_is_delegated
              ? HostsWay::Delegate([&] { delegate_sum(flat, reduction); })
              : nullptr);
      fusedpg::all_reduce(way, {tensor}, reduction.args);
    }
  }

  void reduce(const Flat& tensor, const Reduction& reduction, int root)
      override {
    // Gloo uses other ranks' tensors as scratch space: give it a copy.
    at::Tensor copy = tensor.tensor().detach().clone();
    const GlooReduction gloo(reduction);
    gloo.prepare(copy);
    auto opts = options<c10d::ReduceOptions>();
    opts.reduceOp = gloo.op;
    opts.rootRank = root;
    Tensors one{copy};
    gloo_.reduce(one, opts)->wait();
    if (root == rank_) {
      gloo.finish(copy);
      Flat::input(copy).give(tensor.tensor());
    }
  }

  void reduce_scatter(
      const Flat& output,
      const Parts& inputs,
      const Reduction& reduction) override {
    // One all_reduce of everything: Gloo's own is no more, and this works for
    // uneven sizes.
    at::Tensor all = inputs.joined();
    if (inputs.whole() != nullptr) {
      all = all.clone();
    }
    sum(all, GlooReduction(reduction));
    int64_t offset = 0;
    for (int p = 0; p < rank_; ++p) {
      offset += inputs.count(p);
    }
    Flat::input(all.narrow(0, offset, inputs.count(rank_)))
        .give(output.tensor());
  }

  void broadcast(const Flat& tensor, int root) override {
    auto opts = options<c10d::BroadcastOptions>();
    opts.rootRank = root;
    Tensors one{tensor.tensor()};
    gloo_.broadcast(one, opts)->wait();
  }

  void all_gather(const Parts& outputs, const Flat& input) override {
    if (outputs.whole() != nullptr) {
      at::Tensor to = outputs.whole()->tensor();
      at::Tensor from = input.tensor();
      gloo_._allgather_base(to, from, options<c10d::AllgatherOptions>())
          ->wait();
      return;
    }
    // Broadcasts, so that sizes may differ from rank to rank.
    for (int p = 0; p < size_; ++p) {
      const Flat& part = outputs.tensors()[p];
      if (p == rank_) {
        input.give(part.tensor());
      }
      if (part.tensor().numel() != 0) {
        broadcast(part, p);
      }
    }
  }

  void gather(const std::vector<Flat>& outputs, const Flat& input, int root)
      override {
    auto opts = options<c10d::GatherOptions>();
    opts.rootRank = root;
    TensorLists lists;
    if (!outputs.empty()) {
      lists.push_back(flat_tensors(outputs));
    }
    Tensors one{input.tensor()};
    gloo_.gather(lists, one, opts)->wait();
  }

  void scatter(const Flat& output, const std::vector<Flat>& inputs, int root)
      override {
    auto opts = options<c10d::ScatterOptions>();
    opts.rootRank = root;
    TensorLists lists;
    if (!inputs.empty()) {
      lists.push_back(flat_tensors(inputs));
    }
    Tensors one{output.tensor()};
    gloo_.scatter(one, lists, opts)->wait();
  }

  void all_to_all(const Parts& outputs, const Parts& inputs) override {
    // As one exchange: Gloo has no list form.
    at::Tensor from = inputs.joined();
    at::Tensor to =
        outputs.whole() != nullptr ? outputs.joined() : outputs.like_joined();
    auto to_splits = outputs.splits();
    auto from_splits = inputs.splits();
    gloo_
        .alltoall_base(
            to, from, to_splits, from_splits, options<c10d::AllToAllOptions>())
        ->wait();
    if (outputs.whole() == nullptr) {
      // Anew, as Gloo empties what it is given.
      const auto received = to.split_with_sizes(outputs.splits());
      for (size_t p = 0; p < received.size(); ++p) {
        Flat::input(received[p]).give(outputs.tensors()[p].tensor());
      }
    }
  }

  void barrier() override {
    gloo_.barrier(options<c10d::BarrierOptions>())->wait();
  }

  void begin_item(uint64_t index, uint64_t length) override {
    list_index_ = index;
    list_length_ = length;
  }

  void fused_step(const StepCall& call) override {
    NetContext ctx = context();
    HostsWay way(ctx);
    fusedpg::fused_step(way, call);
  }

  void reduce_shards(const ShardsCall& call) override {
    NetContext ctx = context();
    HostsWay way(ctx);
    fusedpg::reduce_shards(way, call);
  }

  void sparse_all_reduce(
      const Flat& tensor,
      const kernels::ReduceArgs& args,
      const SkipOptions& options) override {
    NetContext ctx = context();
    HostsWay way(ctx);
    fusedpg::sparse_all_reduce(way, {tensor.reduce_tensor()}, args, options);
  }

  at::Tensor coo_all_reduce(const at::Tensor& mine, bool mean) override {
    log_once("all_reduce of sparse tensors between hosts uses Gloo");
    stats_.add(OpCode::kAllReduce, DataPath::kDelegated, {});
    Tensors one{mine.clone()};
    gloo_.allreduce(one, options<c10d::AllreduceOptions>())->wait();
    return mean ? coo_mean(one[0], size_) : one[0];
  }

 private:
  template <typename Options>
  Options options() const {
    Options opts;
    opts.timeout = timeout_;
    return opts;
  }

  NetContext context() {
    NetContext ctx = route_.net_context(ticket_, timeout_);
    ctx.list_index = list_index_;
    ctx.list_length = list_length_;
    return ctx;
  }

  void sum(at::Tensor t, const GlooReduction& reduction) {
    reduction.prepare(t);
    auto opts = options<c10d::AllreduceOptions>();
    opts.reduceOp = reduction.op;
    Tensors one{t};
    gloo_.allreduce(one, opts)->wait();
    reduction.finish(t);
  }

  // Gloo compares nothing: ranks that differ would hang, or get wrong sums.
  void agree(const ReduceTensor& tensor, const Reduction& reduction) {
    NetContext ctx = context();
    HostsWay way(ctx);
    const SumCall call = sum_call(OpCode::kAllReduce, {tensor}, reduction.args);
    OpDescriptor mine = describe_sum(way.op(), call, {tensor});
    way.enter(nullptr, mine, {});
  }

  void delegate_sum(const Flat& flat, const Reduction& reduction) {
    sum(flat.tensor().detach(), GlooReduction(reduction));
    // What Gloo's ring moves.
    const uint64_t moved =
        2 * flat.span().bytes * static_cast<uint64_t>(size_ - 1) / size_;
    stats_.add(OpCode::kAllReduce, DataPath::kDelegated, {moved, moved});
  }

  HostsRoute& route_;
  c10d::Backend& gloo_;
  Stats& stats_;
  const int rank_;
  const int size_;
  const uint64_t ticket_;
  const std::chrono::milliseconds timeout_;
  uint64_t list_index_ = 0;
  uint64_t list_length_ = 1;
};

HostsRoute::HostsRoute(Group& group, bool ranks_share_hosts)
    : CpuRoute(group),
      ranks_share_hosts_(ranks_share_hosts),
      delegate_(make_gloo("fusedpg-delegate")),
      failures_(group.store, rank_, size_),
      skip_{group.settings.block_skip, group.settings.block_size, {}} {
  log_once(
      "a group spans several hosts: its collectives use Gloo, but for fused "
      "optimizer steps and reductions that skip blocks of zeros");
}

c10::intrusive_ptr<c10d::Backend> HostsRoute::make_gloo(const char* prefix) {
  return c10::make_intrusive<AbortableBackend>(make_delegate(
      "cpu",
      c10::make_intrusive<c10d::PrefixStore>(prefix, group_.store),
      rank_,
      size_,
      group_.timeout.load()));
}

bool HostsRoute::carried_by_ucx(std::chrono::milliseconds timeout) {
  return !ranks_share_hosts_ &&
      group_.settings.transport != TransportChoice::kGloo &&
      connected(timeout).ends_at_once();
}

Transport& HostsRoute::connected(std::chrono::milliseconds timeout) {
  const auto check_aborted = [this] {
    if (failure()) {
      fail(
          ErrorKind::kAborted,
          "fused: the group was aborted on rank {} and must be destroyed",
          rank_);
    }
  };
  check_aborted();
  std::lock_guard<std::mutex> lock(transport_mutex_);
  if (cannot_connect_) {
    std::rethrow_exception(
        cannot_connect_); // the keys in the store have been used
  }
  if (!connection_.transport) {
    try {
      connection_ =
          connect_hosts(group_, Deadline(timeout), check_aborted, [&] {
            return make_gloo("fusedpg-transport");
          });
      std::lock_guard<std::mutex> name_lock(name_mutex_);
      transport_name_ = connection_.name;
    } catch (...) {
      cannot_connect_ = std::current_exception();
      throw;
    }
  }
  return *connection_.transport;
}

NetContext HostsRoute::net_context(
    uint64_t ticket,
    std::chrono::milliseconds timeout) {
  Transport& transport = connected(timeout);
  return {
      {group_.kernels,
       pool_,
       Deadline(timeout),
       ticket,
       group_.settings.nan_check,
       skip_,
       group_.stats},
      transport,
      ranks_share_hosts_};
}

void HostsRoute::execute(
    const Operation& operation,
    uint64_t ticket,
    std::chrono::milliseconds timeout) {
  failures_.check();
  HostsTurn turn(*this, ticket, timeout);
  // Peers may need what is still here while this rank computes.
  const auto flush = [&] {
    constexpr std::chrono::milliseconds kPatience{5000};
    if (connection_.transport) {
      connection_.transport->flush(Deadline(std::min(timeout, kPatience)));
    }
  };
  try {
    operation(turn);
  } catch (...) {
    flush();
    throw;
  }
  flush();
}

void HostsRoute::failed(const char* title, uint64_t ticket) {
  failures_.handle(title, ticket, [this] {
    end_waits();
    // What failed may be the delegate's, and peers wait for messages.
    std::lock_guard<std::mutex> lock(transport_mutex_);
    if (connection_.transport) {
      connection_.transport->end();
    }
  });
}

std::shared_ptr<c10::Allocator> HostsRoute::getMemAllocator() {
  TORCH_CHECK(false, "fused: a group that spans hosts has no shared arena");
}

at::Tensor HostsRoute::empty_shared(
    at::IntArrayRef /* sizes */,
    const at::TensorOptions& /* options */) {
  TORCH_CHECK_VALUE(
      false, "fused: parameters cannot be shared in a group that spans hosts");
}

void HostsRoute::describe(GroupInfo& info) {
  info.engine = "gloo";
  std::lock_guard<std::mutex> lock(name_mutex_);
  info.transport = transport_name_;
}

std::optional<ErrorKind> HostsRoute::failure() {
  if (const auto kind = failures_.kind()) {
    return kind;
  }
  return delegate_->getError() == c10d::ErrorType::SUCCESS
      ? std::nullopt
      : std::optional(ErrorKind::kAborted);
}

void HostsRoute::abort() {
  end_waits();
  // Where no operation is under way to raise it, peers hear of it all the same.
  try {
    group_.executor().submit([this](uint64_t ticket) {
      try {
        fail(
            ErrorKind::kAborted,
            "fused: the group was aborted on rank {} and must be destroyed",
            rank_);
      } catch (...) {
        capture([&] { failed("fused:abort", ticket); });
      }
    });
  } catch (const Error&) {
    // It was shut down.
  }
}

// What connects the hosts holds the mutex, and looks for the delegate's abort.
void HostsRoute::end_waits() {
  delegate_->abort();
  std::lock_guard<std::mutex> lock(transport_mutex_);
  if (connection_.transport) {
    connection_.transport->abort();
  }
}

void HostsRoute::shutdown() {
  std::lock_guard<std::mutex> lock(transport_mutex_);
  delegate_->shutdown();
}

} // namespace fusedpg
