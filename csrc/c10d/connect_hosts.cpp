#include "c10d/connect_hosts.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/error.hpp"
#include "c10d/backend_transport.hpp"
#include "c10d/delegate.hpp"
#include "c10d/store_rendezvous.hpp"
#include "net/ucx_transport.hpp"

namespace fusedpg {
namespace {

// What a rank can, as it tells the others: the version of UCX that it has, or
// none, and why not. (What it was asked for was compared when the group met.)
struct Offer {
  std::string version;
  std::string why_not;

  std::string text() const {
    return version + "\n" + why_not;
  }
  static Offer of(const std::string& text) {
    const size_t first = text.find('\n');
    return {text.substr(0, first), text.substr(first + 1)};
  }
};

Offer my_offer(const Settings& settings, const ucx::Api*& api) {
  Offer mine;
  if (settings.transport == TransportChoice::kGloo) {
    mine.why_not = "it was not asked for";
    return mine;
  }
  try {
    api = &ucx::load(settings.ucx_lib);
    mine.version = api->version;
  } catch (const Error& error) {
    mine.why_not = error.what();
  }
  return mine;
}

// Why not all ranks can use UCX, which every rank finds alike; empty: they can.
std::string why_not_ucx(const std::vector<Offer>& offers) {
  for (size_t p = 0; p < offers.size(); ++p) {
    if (offers[p].version.empty()) {
      return formatted("rank {}: {}", p, offers[p].why_not);
    }
    if (offers[p].version != offers[0].version) {
      return formatted(
          "UCX is {} on rank 0 and {} on rank {}",
          offers[0].version,
          offers[p].version,
          p);
    }
  }
  return "";
}

} // namespace

UcxConfig ucx_config(const Settings& settings) {
  UcxConfig config;
  config.set = settings.ucx_config;
  if (settings.spin_us >= 0) {
    config.spin = std::chrono::microseconds(settings.spin_us);
  }
  return config;
}

Connection connect_hosts(
    Group& group,
    const Deadline& deadline,
    const std::function<void()>& check,
    const std::function<c10::intrusive_ptr<c10d::Backend>()>& make_gloo) {
  const Settings& settings = group.settings;
  StoreRendezvous rendezvous(
      c10::make_intrusive<c10d::PrefixStore>("fusedpg-transport", group.store));
  const auto key = [](int p) { return formatted("offer/{}", p); };
  const ucx::Api* api = nullptr;
  rendezvous.set(key(group.rank), my_offer(settings, api).text());
  std::vector<Offer> offers;
  for (int p = 0; p < group.size; ++p) {
    offers.push_back(
        Offer::of(
            await_rank(rendezvous, key(p), group.rank, p, deadline, check)));
  }
  check();
  const std::string why_not = why_not_ucx(offers);
  if (why_not.empty()) {
    return {
        std::make_unique<UcxTransport>(
            *api,
            ucx_config(settings),
            rendezvous,
            group.rank,
            group.size,
            deadline,
            check),
        "ucx " + api->version};
  }
  if (settings.transport == TransportChoice::kUcx) {
    fail(
        ErrorKind::kSystem,
        "fused: Options.transport (FUSEDPG_TRANSPORT) is \"ucx\", but {}",
        why_not);
  }
  if (settings.transport == TransportChoice::kAuto) {
    log_once("messages between hosts go by Gloo instead of UCX: " + why_not);
  }
  return {std::make_unique<BackendTransport>(make_gloo()), "gloo"};
}

} // namespace fusedpg
