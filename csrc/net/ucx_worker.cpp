#include "net/ucx_worker.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace fusedpg {

using namespace ucx;

UcxWorker::UcxWorker(const Api& api, const UcxConfig& config, int size)
    : api_(api),
      farewell_(config.farewell),
      peers_(size) {
  for (int p = 0; p < size; ++p) {
    peers_[p].worker = this;
    peers_[p].rank = p;
  }
  try {
    start(config);
  } catch (...) {
    end();
    throw;
  }
}

UcxWorker::~UcxWorker() {
  end();
}

void UcxWorker::start(const UcxConfig& config) {
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
      api_.worker_get_efd(worker_, &event_fd_),
      "no event descriptor: ucp_worker_get_efd");

  Address address = nullptr;
  size_t length = 0;
  check(
      api_.worker_get_address(worker_, &address, &length),
      "ucp_worker_get_address");
  address_.assign(static_cast<const char*>(address), length);
  api_.worker_release_address(worker_, address);
}

void UcxWorker::connect(int peer, const std::string& address) {
  EndpointParams endpoint;
  endpoint.address = address.data();
  endpoint.error_handler = {on_lost, &peers_[peer]};
  check(
      api_.ep_create(worker_, &endpoint, &peers_[peer].endpoint),
      formatted("connecting to rank {}", peer).c_str());
}

void UcxWorker::check(Status status, const char* what) const {
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

UcxWorker::OperationPtr UcxWorker::begin(
    int peer,
    bool sends,
    const NetBuffer& buffer) {
  const OperationPtr operation(new Operation{*this, peer, sends, buffer});
  operation->place = under_way_.insert(under_way_.end(), operation);
  return operation;
}

UcxWorker::OperationPtr UcxWorker::send(
    int to,
    uint64_t tag,
    const NetBuffer& message) {
  const auto operation = begin(to, true, message);
  RequestParam param;
  param.op_attr_mask = RequestParam::kCallback | RequestParam::kUserData;
  param.callback.send = on_sent;
  param.user_data = operation.get();
  const StatusPtr started = api_.tag_send(
      peers_[to].endpoint, message.data(), message.bytes(), tag, &param);
  started_is(*operation, started);
  return operation;
}

UcxWorker::OperationPtr UcxWorker::receive(
    int from,
    uint64_t tag,
    const NetBuffer& into) {
  constexpr uint64_t kWholeTag = ~uint64_t(0);
  const auto operation = begin(from, false, into);
  ReceiveInfo at_once{};
  RequestParam param;
  param.op_attr_mask = RequestParam::kCallback | RequestParam::kUserData |
      RequestParam::kReceiveInfo;
  param.receive_info = &at_once;
  param.callback.receive = on_received;
  param.user_data = operation.get();
  const StatusPtr started = api_.tag_receive(
      worker_, into.data(), into.bytes(), tag, kWholeTag, &param);
  if (started == nullptr) {
    operation->length = at_once.length;
  }
  started_is(*operation, started);
  return operation;
}

// A callback may have come already: of a message whose parts were all here.
void UcxWorker::started_is(Operation& operation, StatusPtr started) {
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

void UcxWorker::on_sent(void* request, Status status, void* data) {
  const auto operation = *static_cast<Operation*>(data)->place; // stays
  operation->done = true;
  operation->status = status;
  operation->worker.under_way_.erase(operation->place);
  operation->worker.api_.request_free(request);
}

void UcxWorker::on_received(
    void* request,
    Status status,
    const ReceiveInfo* info,
    void* data) {
  auto* operation = static_cast<Operation*>(data);
  operation->length = info == nullptr ? 0 : info->length;
  on_sent(request, status, data);
}

void UcxWorker::on_lost(void* data, Endpoint /* endpoint */, Status status) {
  auto* peer = static_cast<Peer*>(data);
  if (peer->lost == kOk) {
    peer->lost = status;
    peer->worker->lost_.push_back(peer->rank);
  }
}

StatusPtr UcxWorker::start_flush() {
  const RequestParam param;
  const StatusPtr started = api_.worker_flush(worker_, &param);
  // Who needs a message that is lost says so.
  return started == nullptr || is_error(started) ? nullptr : started;
}

// --- the end -----------------------------------------------------------------

void UcxWorker::close_endpoints(bool force) noexcept {
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
      closing_.push_back(started);
    }
    peer.endpoint = nullptr;
  }
}

// Receives belong to no endpoint; sends end with theirs. UCX cannot cancel a
// receive of which a part has come, and will never end it: nobody writes to its
// buffer once the worker is gone.
void UcxWorker::cancel_receives() noexcept {
  for (auto it = under_way_.begin(); it != under_way_.end();) {
    const OperationPtr operation = *it++;
    if (!operation->sends) {
      api_.request_cancel(worker_, operation->request);
    }
  }
}

void UcxWorker::begin_leaving() noexcept {
  if (worker_ != nullptr) {
    cancel_receives();
    close_endpoints(/*force=*/false);
    farewell_ = {}; // the caller sees to it
  }
}

bool UcxWorker::has_left() noexcept {
  if (worker_ == nullptr) {
    return true;
  }
  progress();
  return std::all_of(
      closing_.begin(), closing_.end(), [&](const StatusPtr one) {
        return over(one);
      });
}

bool UcxWorker::borrows() const {
  return std::any_of(
      under_way_.begin(), under_way_.end(), [](const OperationPtr& operation) {
        return operation->buffer.is_borrowed();
      });
}

void UcxWorker::end() noexcept {
  if (worker_ != nullptr) {
    const Deadline deadline(farewell_);
    close_endpoints(/*force=*/true);
    while (!has_left() && !deadline.expired()) {
    }
    for (const StatusPtr one : closing_) {
      release(one);
    }
    closing_.clear();
    cancel_receives();
    const auto sending = [](const OperationPtr& operation) {
      return operation->sends;
    };
    while (std::any_of(under_way_.begin(), under_way_.end(), sending) &&
           !deadline.expired()) {
      progress();
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

} // namespace fusedpg
