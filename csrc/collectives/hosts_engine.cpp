#include "collectives/hosts_engine.hpp"

#include "base/while_waiting.hpp"
#include "collectives/hosts_way.hpp"
#include "collectives/monitored_barrier.hpp"

namespace fusedpg {

namespace {

std::unique_ptr<Domain> make_domain(
    GroupBase& group,
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

std::optional<AggregateRates> rates_of(const GroupBase& group) {
  const Settings& settings = group.settings;
  return settings.aggregate_rates
      ? std::optional(aggregate_rates(
            *settings.aggregate_rates, group.size, settings.aggregators.size()))
      : std::nullopt;
}

} // namespace

HostsEngine::HostsEngine(
    GroupBase& group,
    Bootstrap& bootstrap,
    std::shared_ptr<Rendezvous> store,
    const Deadline& deadline)
    : Engine(group),
      store_(std::move(store)),
      hosts_(bootstrap.hosts()),
      flat_(
          group.settings.flat_order ? std::optional(HostMap::apart(group.size))
                                    : std::nullopt),
      failures_(store_, group),
      skip_{group.settings.block_skip, group.settings.block_size, {}},
      aggregate_(
          group.settings.aggregate,
          rates_of(group),
          group.settings.aggregate_message_bytes) {
  connection_ = connect_hosts(
      group,
      store_,
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

HostsEngine::~HostsEngine() {
  stop_messages();
  mailbox_.reset(); // before what it calls
}

void HostsEngine::check_aborted() {
  while_waiting();
  if (failure()) {
    throw aborted_error();
  }
}

void HostsEngine::connect_aggregators(const Deadline& deadline) {
  auto aggregators = fusedpg::connect_aggregators(
      group_,
      *store_,
      *connection_.transport,
      flat_ || !hosts_.shared(),
      deadline,
      [this] { check_aborted(); });
  const std::lock_guard<std::mutex> lock(transport_mutex_);
  if (failure()) { // before whoever aborts could see them
    throw aborted_error();
  }
  connection_.aggregators = std::move(aggregators);
  const std::lock_guard<std::mutex> name_lock(name_mutex_);
  aggregators_ = connection_.aggregators->places();
}

void HostsEngine::check_neighbours(const std::string& what) {
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

// Each of several operations of a turn hears of an abort before it begins.
class HostsEngine::CheckedWay : public HostsWay {
 public:
  CheckedWay(HostsEngine& engine, NetContext& ctx)
      : HostsWay(ctx, engine.flat_ ? &*engine.flat_ : nullptr),
        engine_(engine) {}
  void begin_item(uint64_t index, uint64_t length) override {
    HostsWay::begin_item(index, length);
    engine_.check_aborted();
    engine_.in_doubt_since_.reset();
  }

 private:
  HostsEngine& engine_;
};

Way& HostsEngine::open_way(uint64_t ticket, std::chrono::milliseconds timeout) {
  failures_.check();
  in_doubt_since_.reset();
  context_.emplace(
      NetContext{
          {group_.kernels,
           pool_,
           Deadline(timeout), // of all waits, connecting included
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
          &aggregate_});
  way_ = std::make_unique<CheckedWay>(*this, *context_);
  return *way_;
}

void HostsEngine::close_way() {
  way_.reset();
}

void HostsEngine::begin(Way& way) {
  check_aborted();
  NetContext& ctx = *way.net();
  if (!group_.settings.aggregators.empty() && !connection_.aggregators) {
    ctx.entered = true; // peers wait for what this rank says of its jobs
    connect_aggregators(ctx.deadline);
    ctx.aggregators = connection_.aggregators.get();
    ctx.entered = false;
  }
  in_doubt_since_.reset();
  if (domain_) {
    domain_->prepare();
  }
}

// Peers may need what is still here while this rank computes.
void HostsEngine::end(Way& way) {
  constexpr std::chrono::milliseconds kPatience{5000};
  connection_.transport->flush(
      Deadline(std::min(way.op().deadline.left(), kPatience)));
}

void HostsEngine::fail_group(
    const Error& error,
    const char* title,
    uint64_t ticket) {
  if (domain_) {
    domain_->mark_failed(error); // at once: peers here wait for this rank
  }
  const bool aborted = error.kind() == ErrorKind::kAborted && aborted_;
  throw give_up(aborted ? aborted_error() : error, title, ticket);
}

Error HostsEngine::give_up(
    const Error& error,
    const char* title,
    uint64_t ticket) {
  const Error whole = failures_.handle(error, title, ticket, [this] {
    end_waits("aborted");
    std::lock_guard<std::mutex> lock(transport_mutex_);
    connection_.transport->end();
    if (connection_.aggregators) {
      connection_.aggregators->end();
    }
  });
  if (domain_) {
    domain_->mark_failed(whole);
  }
  end_messages();
  return whole;
}

void HostsEngine::describe(GroupInfo& info) {
  Engine::describe(info);
  info.engine = "tcp";
  info.address = connection_.address;
  info.transport = "tcp";
  std::lock_guard<std::mutex> lock(name_mutex_);
  info.aggregators = aggregators_;
  info.aggregate = aggregate_.choice();
}

std::optional<ErrorKind> HostsEngine::failure() {
  if (const auto kind = failures_.kind()) {
    return kind;
  }
  if (domain_ && domain_->failed()) {
    return domain_->failure_kind();
  }
  return aborted_ ? std::optional(ErrorKind::kAborted) : std::nullopt;
}

Error HostsEngine::aborted_error() const {
  std::lock_guard<std::mutex> lock(name_mutex_);
  return Error(
      ErrorKind::kAborted,
      formatted(
          "fused: the group was {} on rank {} and must be destroyed",
          how_.empty() ? "aborted" : how_,
          group_.rank));
}

void HostsEngine::interrupt(const std::string& how) {
  end_waits(how);
  end_messages();
  // Where no operation is under way to raise it, peers hear of it all the same.
  try {
    group_.executor().submit([this](uint64_t ticket) {
      try {
        give_up(aborted_error(), "fused:abort", ticket);
      } catch (const std::exception&) {
        // The executor's operations must not throw. Without memory to tell
        // others why, this rank is aborted all the same.
      }
    });
  } catch (const Error&) {
    // It was shut down.
  }
}

// A signal handler may call this in a wait, so nothing waits under these mutexes.
void HostsEngine::end_waits(const std::string& how) {
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

// --- messages, and the barrier that names who is missing ---------------------

std::shared_ptr<Messages> HostsEngine::open_messages() {
  check_failed(); // or its connections may have ended
  const auto gone = [this](int p) {
    return domain_ && hosts_.host(p) == hosts_.host(group_.rank) &&
        domain_->in_doubt(hosts_.local(p));
  };
  // std::function copies what it has.
  auto mail = std::make_shared<std::unique_ptr<TcpEndpoint>>(
      std::move(connection_.mail));
  auto mailbox = std::make_shared<NetMailbox>(
      group_.rank,
      group_.size,
      [this, mail] { return open_transport(group_, std::move(*mail)); },
      connection_.mail_addresses,
      [this] { check_failed(); },
      gone,
      [this](const Error& error) { return message_failed(error); });
  net_mailbox_ = mailbox.get();
  return mailbox;
}

void HostsEngine::monitored_barrier(
    std::chrono::milliseconds timeout,
    bool wait_all_ranks,
    FunctionRef<void()> check_open) {
  const auto held = messages(check_open);
  fusedpg::monitored_barrier(
      *net_mailbox_,
      group_.rank,
      group_.size,
      monitored_barriers_++,
      timeout,
      wait_all_ranks);
}

void HostsEngine::end_messages() {
  std::lock_guard<std::mutex> lock(mailbox_mutex_);
  if (net_mailbox_ != nullptr) {
    net_mailbox_->wake(); // it looks whether the group has failed
  }
  connection_.mail.reset(); // peers may have connected to it, and wait
}

// Throws where no message can be waited for any more.
void HostsEngine::check_failed() {
  failures_.check();
  if (failure() == ErrorKind::kAborted) {
    throw aborted_error();
  }
  if (domain_ && domain_->failed()) {
    domain_->fail_as_before();
  }
}

// On the mailbox's thread, which has closed its connections. Those of
// collectives are closed by the thread that uses them, as soon as it can.
Error HostsEngine::message_failed(const Error& error) {
  // Or what another thread has heard of its cause.
  const Error whole = failures_.handle(error, "fused:send/recv", 0, [] {});
  end_waits("aborted");
  if (domain_) {
    domain_->mark_failed(whole);
  }
  try {
    group_.executor().submit([this](uint64_t /* ticket */) {
      std::lock_guard<std::mutex> lock(transport_mutex_);
      if (connection_.transport) {
        connection_.transport->end();
      }
    });
  } catch (const Error&) {
    // It was shut down.
  }
  return whole;
}

// --- the end -----------------------------------------------------------------

void HostsEngine::shutdown() {
  if (!group_.exit.empty() && !failure()) {
    failures_.say_exit(group_.exit);
  }
  stop_messages();
  {
    std::lock_guard<std::mutex> lock(mailbox_mutex_);
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
