#include "c10d/connect_hosts.hpp"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/error.hpp"
#include "c10d/backend_transport.hpp"
#include "c10d/store_rendezvous.hpp"
#include "net/ucx_transport.hpp"

namespace fusedpg {
namespace {

// A rank's word to the others before they connect: the version of its UCX, or
// why it has none. Over Gloo it says only that it has come.
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

Offer ucx_offer(const Settings& settings, const ucx::Api*& api) {
  try {
    api = &ucx::load(settings.ucx_lib);
    return {api->version, ""};
  } catch (const Error& error) {
    return {"", error.what()};
  }
}

// Every rank finds the same.
void check_versions(const std::vector<Offer>& offers) {
  const auto refuse = [](const std::string& why) {
    fail(
        ErrorKind::kSystem,
        "fused: Options.transport (FUSEDPG_TRANSPORT) is \"ucx\", but {}",
        why);
  };
  for (size_t p = 0; p < offers.size(); ++p) {
    if (offers[p].version.empty()) {
      refuse(formatted("rank {}: {}", p, offers[p].why_not));
    }
    if (offers[p].version != offers[0].version) {
      refuse(formatted(
          "UCX is {} on rank 0 and {} on rank {}",
          offers[0].version,
          offers[p].version,
          p));
    }
  }
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
  const bool by_ucx = settings.transport == TransportChoice::kUcx;
  BoundedRendezvous rendezvous(
      c10::make_intrusive<c10d::PrefixStore>("fusedpg-transport", group.store),
      deadline,
      check);
  const auto key = [](int p) { return formatted("offer/{}", p); };
  const ucx::Api* api = nullptr;
  const Offer mine = by_ucx ? ucx_offer(settings, api) : Offer{};
  rendezvous.set(key(group.rank), mine.text());
  std::vector<Offer> offers;
  for (int p = 0; p < group.size; ++p) {
    offers.push_back(
        Offer::of(
            await_rank(rendezvous, key(p), group.rank, p, deadline, check)));
  }
  check();
  if (!by_ucx) {
    return {std::make_unique<BackendTransport>(make_gloo()), "gloo"};
  }
  check_versions(offers);
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

} // namespace fusedpg
