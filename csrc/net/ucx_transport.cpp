#include "net/ucx_transport.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

#include "base/error.hpp"

namespace fusedpg {

using namespace ucx;

namespace {

constexpr uint64_t kWholeTag = ~uint64_t(0);
constexpr uint32_t kHello = ~uint32_t(0);

// Those of one sender and tag meet in order.
uint64_t tag_of(int from, uint32_t tag) {
  return static_cast<uint64_t>(from) << 32 | tag;
}

// Rounded up.
std::chrono::milliseconds left(const Deadline& deadline) {
  return std::chrono::ceil<std::chrono::milliseconds>(deadline.remaining());
}

} // namespace

struct UcxTransport::Operation {
  UcxTransport& transport;
  const int peer;
  const bool sends;
  const NetBuffer buffer; // stays as long as UCX knows of it
  void* request = nullptr;
  bool done = false;
  Status status = kOk;
  size_t length = 0; // of what has come
  Operations::iterator place{};
};

// Waits once; an operation that nobody waits for ends with the transport.
class UcxTransport::UcxRequest : public Transport::Request {
 public:
  UcxRequest(UcxTransport& transport, std::shared_ptr<Operation> operation)
      : transport_(transport),
        operation_(std::move(operation)) {}
  void wait(const Deadline& deadline) override {
    transport_.wait(*operation_, deadline);
  }
  const Operation& operation() const {
    return *operation_;
  }

 private:
  UcxTransport& transport_;
  const std::shared_ptr<Operation> operation_;
};

UcxTransport::UcxTransport(
    const Api& api,
    const UcxConfig& config,
    Rendezvous& rendezvous,
    int rank,
    int size,
    const Deadline& deadline,
    const std::function<void()>& check)
    : api_(api),
      rank_(rank),
      spin_(config.spin),
      farewell_(config.farewell),
      peers_(size) {
  try {
    connect_all(config, rendezvous, deadline, check);
  } catch (...) {
    end();
    if (abort_fd_ >= 0) {
      close(abort_fd_);
    }
    throw;
  }
}

UcxTransport::UcxTransport(
    const Api& api,
    const UcxConfig& config,
    int rank,
    int size)
    : api_(api),
      rank_(rank),
      spin_(config.spin),
      farewell_(config.farewell),
      peers_(size) {
  try {
    start(config);
  } catch (...) {
    end();
    if (abort_fd_ >= 0) {
      close(abort_fd_);
    }
    throw;
  }
}

void UcxTransport::start(const UcxConfig& config) {
  for (int p = 0; p < size(); ++p) {
    peers_[p].transport = this;
    peers_[p].rank = p;
  }
  abort_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (abort_fd_ < 0) {
    fail_errno("fused: eventfd");
  }
  Config settings = nullptr;
  check(api_.config_read(nullptr, nullptr, &settings), "reading UCX_*");
  for (const auto& [name, value] : config.set) {
    const Status status =
        api_.config_modify(settings, name.c_str(), value.c_str());
    if (status != kOk && status != kNoElement) { // which older ones lack
      api_.config_release(settings);
      check(status, ("UCX_" + name + "=" + value).c_str());
    }
  }
  const Params params;
  const Status made = api_.init(1, 13, &params, settings, &context_);
  api_.config_release(settings);
  check(made, "ucp_init");
  const WorkerParams worker_params;
  check(
      api_.worker_create(context_, &worker_params, &worker_),
      "ucp_worker_create");
  check(
      api_.worker_get_efd(worker_, &progress_fd_),
      "no event descriptor: ucp_worker_get_efd");

  Address address = nullptr;
  size_t length = 0;
  check(
      api_.worker_get_address(worker_, &address, &length),
      "ucp_worker_get_address");
  address_.assign(static_cast<const char*>(address), length);
  api_.worker_release_address(worker_, address);
}

void UcxTransport::connect(int peer, const std::string& address) {
  EndpointParams endpoint;
  endpoint.address = address.data();
  endpoint.error_handler = {on_lost, &peers_[peer]};
  check(
      api_.ep_create(worker_, &endpoint, &peers_[peer].endpoint),
      formatted("connecting to rank {}", peer).c_str());
}

void UcxTransport::connect_all(
    const UcxConfig& config,
    Rendezvous& rendezvous,
    const Deadline& deadline,
    const std::function<void()>& check_others) {
  const std::string mine = formatted("ucx/address/{}", rank_);
  try {
    start(config);
    rendezvous.set(mine, address_);
  } catch (...) {
    rendezvous.set(mine, ""); // so that nobody waits for it
    throw;
  }
  for (int p = 0; p < size(); ++p) {
    if (p == rank_) {
      continue;
    }
    const std::string theirs = await_rank(
        rendezvous,
        formatted("ucx/address/{}", p),
        rank_,
        p,
        deadline,
        check_others);
    if (theirs.empty()) {
      fail(
          ErrorKind::kPeerFailed,
          "fused: rank {} could not start UCX; its own error says why",
          p);
    }
    connect(p, theirs);
  }
  // Whatever cannot be reached shows here, where the cause is plain.
  std::vector<std::shared_ptr<Operation>> hellos;
  for (int p = 0; p < size(); ++p) {
    if (p != rank_) {
      hellos.push_back(start_receive(p, kHello, NetBuffer(1)));
      hellos.push_back(start_send(p, kHello, NetBuffer(1)));
    }
  }
  for (const auto& hello : hellos) {
    constexpr std::chrono::milliseconds kLook{20};
    while (!deadline.expired() &&
           !progress_until(Deadline(kLook), [&] { return over(*hello); })) {
      check_others();
    }
    wait(*hello, deadline);
  }
}

UcxTransport::~UcxTransport() {
  close_endpoints(failed_ || aborted_, Deadline(farewell_));
  release();
  close(abort_fd_);
}

void UcxTransport::end() noexcept {
  failed_ = true;
  close_endpoints(/*force=*/true, Deadline(farewell_));
  release();
}

void UcxTransport::release() noexcept {
  if (worker_ != nullptr) {
    // Receives belong to no endpoint; sends end with theirs. UCX cannot cancel
    // a receive of which a part has come, and will never end it: nobody writes
    // to its buffer once the worker is gone.
    for (auto it = under_way_.begin(); it != under_way_.end();) {
      const std::shared_ptr<Operation> operation = *it++;
      if (!operation->sends) {
        api_.request_cancel(worker_, operation->request);
      }
    }
    const auto sending = [](const std::shared_ptr<Operation>& operation) {
      return operation->sends;
    };
    const Deadline deadline(farewell_);
    while (std::any_of(under_way_.begin(), under_way_.end(), sending) &&
           !deadline.expired()) {
      api_.worker_progress(worker_);
    }
    api_.worker_destroy(worker_);
    worker_ = nullptr;
    under_way_.clear();
  }
  if (context_ != nullptr) {
    api_.cleanup(context_);
    context_ = nullptr;
  }
}

void UcxTransport::check(Status status, const char* what) const {
  if (status != kOk) {
    fail(
        ErrorKind::kSystem,
        "fused: UCX {}: {}: {}",
        api_.version,
        what,
        api_.status_string(status));
  }
}

// --- messages ----------------------------------------------------------------

std::shared_ptr<UcxTransport::Operation> UcxTransport::begin(
    int peer,
    bool sends,
    const NetBuffer& buffer) {
  const std::shared_ptr<Operation> operation(
      new Operation{*this, peer, sends, buffer});
  // What a rank has sent before it left can still be received.
  if (failed_ || aborted_ || (sends && peers_[peer].lost != kOk)) {
    give_up(*operation, Deadline(std::chrono::hours(1)));
  }
  operation->place = under_way_.insert(under_way_.end(), operation);
  return operation;
}

Transport::RequestPtr UcxTransport::send(
    int to,
    uint32_t tag,
    const NetBuffer& message) {
  return std::make_unique<UcxRequest>(*this, start_send(to, tag, message));
}

Transport::RequestPtr UcxTransport::receive(
    int from,
    uint32_t tag,
    const NetBuffer& into) {
  return std::make_unique<UcxRequest>(*this, start_receive(from, tag, into));
}

std::shared_ptr<UcxTransport::Operation> UcxTransport::start_send(
    int to,
    uint32_t tag,
    const NetBuffer& message) {
  const auto operation = begin(to, true, message);
  RequestParam param;
  param.op_attr_mask = RequestParam::kCallback | RequestParam::kUserData;
  param.callback.send = on_sent;
  param.user_data = operation.get();
  const StatusPtr started = api_.tag_send(
      peers_[to].endpoint,
      message.data(),
      message.bytes(),
      tag_of(rank_, tag),
      &param);
  started_is(*operation, started);
  return operation;
}

std::shared_ptr<UcxTransport::Operation> UcxTransport::start_receive(
    int from,
    uint32_t tag,
    const NetBuffer& into) {
  const auto operation = begin(from, false, into);
  ReceiveInfo at_once{};
  RequestParam param;
  param.op_attr_mask = RequestParam::kCallback | RequestParam::kUserData |
      RequestParam::kReceiveInfo;
  param.receive_info = &at_once;
  param.callback.receive = on_received;
  param.user_data = operation.get();
  const StatusPtr started = api_.tag_receive(
      worker_, into.data(), into.bytes(), tag_of(from, tag), kWholeTag, &param);
  if (started == nullptr) {
    operation->length = at_once.length;
  }
  started_is(*operation, started);
  return operation;
}

// A callback may have come already: of a message whose parts were all here.
void UcxTransport::started_is(Operation& operation, StatusPtr started) {
  if (operation.done) {
    return;
  }
  if (started == nullptr || is_error(started)) {
    operation.done = true;
    operation.status = started == nullptr ? kOk : error_of(started);
    under_way_.erase(operation.place);
  } else {
    operation.request = started;
  }
}

void UcxTransport::on_sent(void* request, Status status, void* data) {
  const auto operation = *static_cast<Operation*>(data)->place; // stays
  operation->done = true;
  operation->status = status;
  operation->transport.under_way_.erase(operation->place);
  operation->transport.api_.request_free(request);
}

void UcxTransport::on_received(
    void* request,
    Status status,
    const ReceiveInfo* info,
    void* data) {
  auto* operation = static_cast<Operation*>(data);
  operation->length = info == nullptr ? 0 : info->length;
  on_sent(request, status, data);
}

void UcxTransport::on_lost(void* data, Endpoint /* endpoint */, Status status) {
  auto* peer = static_cast<Peer*>(data);
  if (peer->lost == kOk) {
    peer->lost = status;
    peer->transport->lost_.push_back(peer->rank);
  }
}

bool UcxTransport::over(const Operation& operation) const {
  return operation.done || peers_[operation.peer].lost != kOk;
}

// --- waiting -----------------------------------------------------------------

template <typename Done>
bool UcxTransport::progress_until(const Deadline& deadline, const Done& done) {
  auto spun = Clock::now();
  while (!done()) {
    const bool moved = api_.worker_progress(worker_) != 0;
    // Also while others keep this rank busy.
    if (aborted_ || deadline.expired()) {
      return done();
    }
    if (moved) {
      spun = Clock::now();
    } else if (Clock::now() - spun > spin_) {
      sleep(deadline);
    }
  }
  return true;
}

void UcxTransport::sleep(const Deadline& deadline) {
  if (api_.worker_arm(worker_) != kOk) {
    return; // busy: there is something to do
  }
  pollfd fds[] = {{progress_fd_, POLLIN, 0}, {abort_fd_, POLLIN, 0}};
  constexpr std::chrono::milliseconds kLongest{1000};
  poll(fds, 2, static_cast<int>(std::min(left(deadline), kLongest).count()));
}

UcxTransport::State UcxTransport::state(const Request& request) const {
  const Operation& operation =
      static_cast<const UcxRequest&>(request).operation();
  if (operation.done) {
    return operation.status == kOk ? State::kDone : State::kLost;
  }
  return lost(operation.peer) ? State::kLost : State::kUnderWay;
}

void UcxTransport::doze(std::chrono::milliseconds most) {
  if (api_.worker_progress(worker_) == 0) {
    sleep(Deadline(most));
  }
  uint64_t woken = 0;
  [[maybe_unused]] const auto got = read(abort_fd_, &woken, sizeof woken);
}

void UcxTransport::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = write(abort_fd_, &one, sizeof one);
}

void UcxTransport::wait(Operation& operation, const Deadline& deadline) {
  const auto done = [&] { return over(operation); };
  if (!failed_ && watch_) {
    constexpr std::chrono::milliseconds kLook{20};
    while (!progress_until(Deadline(std::min(kLook, left(deadline))), done) &&
           !aborted_ && !deadline.expired()) {
      try {
        watch_();
      } catch (...) {
        end();
        throw;
      }
    }
  } else if (!failed_) {
    progress_until(deadline, done);
  }
  if (!operation.done || operation.status != kOk) {
    give_up(operation, deadline);
  }
  if (!operation.sends && operation.length != operation.buffer.bytes()) {
    end();
    fail(
        ErrorKind::kMismatch,
        "fused: rank {} (here) expected {} bytes of rank {}, which sent {}",
        rank_,
        operation.buffer.bytes(),
        operation.peer,
        operation.length);
  }
}

std::string UcxTransport::losses() const {
  std::string text;
  for (const int p : lost_) {
    text += formatted(
        "{}rank {} ({})",
        text.empty() ? "connections that ended, in this order: " : ", ",
        p,
        api_.status_string(peers_[p].lost));
  }
  return text.empty() ? "no connection has ended" : text;
}

void UcxTransport::give_up(
    const Operation& operation,
    const Deadline& deadline) {
  const std::string what = formatted(
      "fused: a message from rank {} to rank {}",
      operation.sends ? formatted("{} (here)", rank_)
                      : formatted("{}", operation.peer),
      operation.sends ? formatted("{}", operation.peer)
                      : formatted("{} (here)", rank_));
  const bool lost = peers_[operation.peer].lost != kOk;
  const std::string losses = this->losses();
  const Status status = operation.status;
  const bool done = operation.done;
  end();
  if (aborted_) {
    fail(ErrorKind::kAborted, "{}: the group was aborted", what);
  }
  if (!lost && !done && deadline.expired()) {
    fail(
        ErrorKind::kTimeout,
        "{}: not done within {} ms; {}",
        what,
        deadline.timeout().count(),
        losses);
  }
  fail(
      ErrorKind::kPeerFailed,
      "{}: {}; {}",
      what,
      api_.status_string(lost ? peers_[operation.peer].lost : status),
      losses);
}

void UcxTransport::flush(const Deadline& deadline) {
  if (failed_ || aborted_) {
    return;
  }
  RequestParam param;
  const StatusPtr started = api_.worker_flush(worker_, &param);
  if (started == nullptr || is_error(started)) {
    return; // who needs a message that is lost says so
  }
  progress_until(
      deadline, [&] { return api_.request_check(started) != kInProgress; });
  api_.request_free(started);
}

void UcxTransport::progress() {
  if (!failed_ && !aborted_) {
    while (api_.worker_progress(worker_) != 0) {
    }
  }
}

void UcxTransport::abort() {
  aborted_ = true;
  wake();
}

// --- the end -----------------------------------------------------------------

void UcxTransport::close_endpoints(bool force, const Deadline& deadline) {
  if (worker_ == nullptr) {
    return;
  }
  std::vector<StatusPtr> closing;
  for (Peer& peer : peers_) {
    if (peer.endpoint == nullptr) {
      continue;
    }
    RequestParam param;
    if (force || peer.lost != kOk) {
      param.op_attr_mask = RequestParam::kFlags;
      param.flags = RequestParam::kForce;
    }
    const StatusPtr started = api_.ep_close(peer.endpoint, &param);
    if (started != nullptr && !is_error(started)) {
      closing.push_back(started);
    }
    peer.endpoint = nullptr;
  }
  for (const StatusPtr one : closing) {
    while (api_.request_check(one) == kInProgress && !deadline.expired()) {
      api_.worker_progress(worker_);
    }
    api_.request_free(one);
  }
}

} // namespace fusedpg
