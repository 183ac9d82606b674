#include "c10d/routes/hosts.hpp"

#include "base/while_waiting.hpp"
#include "c10d/errors.hpp"
#include "collectives/hosts_way.hpp"

namespace fusedpg {

namespace {

std::unique_ptr<Domain> make_domain(
    Group& group,
    Bootstrap& bootstrap,
    const Deadline& deadline) {
  if (bootstrap.host_ranks().size() == 1) {
    return nullptr;
  }
  return std::make_unique<Domain>(
      group.rank,
      bootstrap,
      group.settings,
      deadline,
      net_stage_bytes(group.size));
}

std::optional<AggregateRates> rates_of(const Group& group) {
  const Settings& settings = group.settings;
  return settings.aggregate_rates
      ? std::optional(aggregate_rates(
            *settings.aggregate_rates, group.size, settings.aggregators.size()))
      : std::nullopt;
}

} // namespace

HostsRoute::HostsRoute(
    Group& group,
    Bootstrap& bootstrap,
    const Deadline& deadline)
    : CpuRoute(group),
      hosts_(bootstrap.hosts()),
      flat_(
          group.settings.flat_order ? std::optional(HostMap::apart(group.size))
                                    : std::nullopt),
      failures_(group.store, rank_, size_),
      skip_{group.settings.block_skip, group.settings.block_size, {}},
      aggregate_(
          group.settings.aggregate,
          rates_of(group),
          group.settings.aggregate_message_bytes) {
  connection_ = connect_hosts(
      group,
      [&] { domain_ = make_domain(group, bootstrap, deadline); },
      deadline,
      [this] {
        while_waiting();
        if (domain_) {
          check_neighbours("the addresses of other hosts");
        }
      });
  Transport* transport = connection_.transport.get();
  transport->set_waits(&group.waits);
  if (domain_) {
    domain_->set_waits(&group.waits);
    transport->set_watch([this] { check_neighbours("a message"); });
    domain_->set_idle([transport] { return transport->progress(); });
  }
}

// Who waits for a message may hold the mailbox for a moment longer.
HostsRoute::~HostsRoute() {
  if (mailbox_) {
    mailbox_->stop();
  }
}

void HostsRoute::check_aborted() {
  while_waiting();
  if (failure()) {
    fail_aborted();
  }
}

void HostsRoute::connect_aggregators(const Deadline& deadline) {
  auto aggregators = fusedpg::connect_aggregators(
      group_,
      *connection_.transport,
      flat_ || !hosts_.shared(),
      deadline,
      [this] { check_aborted(); });
  const std::lock_guard<std::mutex> lock(transport_mutex_);
  if (failure()) { // before whoever aborts could see them
    fail_aborted();
  }
  connection_.aggregators = std::move(aggregators);
  const std::lock_guard<std::mutex> name_lock(name_mutex_);
  aggregators_ = connection_.aggregators->places();
}

NetContext HostsRoute::net_context(uint64_t ticket, const Deadline& deadline) {
  check_aborted();
  if (!group_.settings.aggregators.empty() && !connection_.aggregators) {
    connect_aggregators(deadline);
  }
  in_doubt_since_.reset();
  return {
      {group_.kernels,
       pool_,
       deadline,
       ticket,
       group_.settings.nan_check,
       skip_,
       group_.stats},
      *connection_.transport,
      &hosts_,
      domain_.get(),
      {},
      &buffers_,
      connection_.aggregators.get(),
      /*aggregated=*/false,
      &aggregate_};
}

void HostsRoute::check_neighbours(const std::string& what) {
  // A message that such a rank has caused may still be on its way.
  constexpr std::chrono::milliseconds kGrace{300};
  try {
    domain_->check_peers(what, [this](int p) {
      return p != domain_->rank() && !domain_->has_left(p);
    });
    in_doubt_since_.reset();
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kAborted) {
      throw;
    }
    const auto now = Clock::now();
    if (!in_doubt_since_) {
      in_doubt_since_ = now;
    }
    if (now - *in_doubt_since_ > kGrace) {
      throw;
    }
  }
}

void HostsRoute::execute(
    const Operation& operation,
    uint64_t ticket,
    std::chrono::milliseconds timeout) {
  failures_.check();
  in_doubt_since_.reset();
  const Deadline deadline(timeout); // of all waits, connecting included
  bool entered = false;
  std::optional<NetContext> ctx;
  const auto prepare = [&] {
    if (!ctx) {
      ctx.emplace(net_context(ticket, deadline));
      ctx->entered = &entered;
    }
  };
  // Tells the peers when this rank has thrown before it entered.
  const auto refuse = [&](const std::string& reason) {
    if (entered) {
      return;
    }
    try {
      prepare();
      net_refuse(*ctx, reason);
    } catch (const std::exception&) {
      // They hear of that otherwise.
    }
  };
  // Peers may need what is still here while this rank computes.
  const auto flush = [&] {
    constexpr std::chrono::milliseconds kPatience{5000};
    connection_.transport->flush(
        Deadline(std::min(deadline.left(), kPatience)));
  };
  // Each of several operations hears of an abort before it begins.
  struct CheckedWay : HostsWay {
    CheckedWay(HostsRoute& route, NetContext& ctx)
        : HostsWay(ctx, route.flat_ ? &*route.flat_ : nullptr),
          route(route) {}
    void begin_item(uint64_t index, uint64_t length) override {
      HostsWay::begin_item(index, length);
      route.check_aborted();
      route.in_doubt_since_.reset();
    }
    HostsRoute& route;
  };
  try {
    if (domain_) {
      domain_->prepare();
    }
    prepare();
    CheckedWay way(*this, *ctx);
    operation(way);
  } catch (const Error& error) {
    const bool alike = error.kind() == ErrorKind::kInvalid ||
        error.kind() == ErrorKind::kMismatch;
    if (alike) {
      refuse(error.what());
      flush();
    } else if (domain_) {
      domain_->mark_failed(error); // at once: peers here wait for this rank
    }
    if (error.kind() == ErrorKind::kAborted && aborted_) {
      fail_aborted(); // which says how
    }
    throw;
  } catch (const std::exception& error) {
    refuse(one_line(error));
    flush();
    throw;
  }
  flush();
}

void HostsRoute::failed(const char* title, uint64_t ticket) {
  try {
    failures_.handle(title, ticket, [this] {
      end_waits("aborted");
      std::lock_guard<std::mutex> lock(transport_mutex_);
      connection_.transport->end();
      if (connection_.aggregators) {
        connection_.aggregators->end();
      }
    });
  } catch (const Error& error) {
    if (domain_) {
      domain_->mark_failed(error);
    }
    end_messages();
    throw;
  }
}

at::Tensor HostsRoute::empty_shared(
    at::IntArrayRef /* sizes */,
    const at::TensorOptions& /* options */) {
  TORCH_CHECK_VALUE(
      false, "fused: parameters cannot be shared in a group that spans hosts");
}

void HostsRoute::describe(GroupInfo& info) {
  info.engine = "tcp";
  info.address = connection_.address;
  info.transport = "tcp";
  describe_arena(info);
  std::lock_guard<std::mutex> lock(name_mutex_);
  info.aggregators = aggregators_;
  info.aggregate = aggregate_.choice();
}

std::optional<ErrorKind> HostsRoute::failure() {
  if (const auto kind = failures_.kind()) {
    return kind;
  }
  if (domain_ && domain_->failed()) {
    return domain_->failure_kind();
  }
  return aborted_ ? std::optional(ErrorKind::kAborted) : std::nullopt;
}

void HostsRoute::fail_aborted() const {
  std::lock_guard<std::mutex> lock(name_mutex_);
  fail(
      ErrorKind::kAborted,
      "fused: the group was {} on rank {} and must be destroyed",
      how_.empty() ? "aborted" : how_,
      rank_);
}

void HostsRoute::interrupt(const std::string& how) {
  end_waits(how);
  end_messages();
  // Where no operation is under way to raise it, peers hear of it all the same.
  try {
    group_.executor().submit([this](uint64_t ticket) {
      try {
        fail_aborted();
      } catch (...) {
        capture([&] { failed("fused:abort", ticket); });
      }
    });
  } catch (const Error&) {
    // It was shut down.
  }
}

// A signal handler may call this in a wait, so nothing waits under these mutexes.
void HostsRoute::end_waits(const std::string& how) {
  {
    std::lock_guard<std::mutex> lock(name_mutex_);
    how_ = how_.empty() ? how : how_;
  }
  aborted_ = true;
  if (domain_) {
    domain_->request_abort(how);
  }
  std::lock_guard<std::mutex> lock(transport_mutex_);
  connection_.transport->abort();
  if (connection_.aggregators) {
    connection_.aggregators->abort();
  }
}

void HostsRoute::shutdown() {
  if (!group_.exit.empty() && !failure()) {
    failures_.say_exit(group_.exit);
  }
  {
    std::lock_guard<std::mutex> lock(mailbox_mutex_);
    if (mailbox_) {
      mailbox_->stop();
    }
    connection_.mail.reset();
  }
  // Whoever still refers to the group, as DDP does, keeps no job alive, and peers
  // hear that this rank has left.
  std::unique_ptr<aggregate::Client> gone;
  {
    std::lock_guard<std::mutex> lock(transport_mutex_);
    gone = std::move(connection_.aggregators);
  }
  gone.reset();
  constexpr std::chrono::milliseconds kFarewell{2000};
  connection_.transport->flush(Deadline(kFarewell));
  connection_.transport->end();
  if (domain_) {
    domain_->leave(group_.exit);
  }
}

} // namespace fusedpg
