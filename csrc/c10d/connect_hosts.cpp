#include "c10d/connect_hosts.hpp"

#include <algorithm>
#include <thread>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/error.hpp"
#include "c10d/store_rendezvous.hpp"
#include "net/exchange_words.hpp"
#include "net/tcp_transport.hpp"
#include "net/ucx_transport.hpp"

namespace fusedpg {
namespace {

// A rank's word to the others before they connect: what they have to know of it,
// or why it cannot.
struct Offer {
  std::string word;
  std::string why_not;

  std::string text() const {
    return word + "\n" + why_not;
  }
  static Offer of(const std::string& text) {
    const size_t first = text.find('\n');
    return {text.substr(0, first), text.substr(first + 1)};
  }
};

Offer offer_of(const std::function<std::string()>& word) {
  try {
    return {word(), ""};
  } catch (const Error& error) {
    return {"", error.what()};
  }
}

// Every rank finds the same.
[[noreturn]] void refuse(const Settings& settings, const std::string& why) {
  fail(
      ErrorKind::kSystem,
      "fused: Options.transport (FUSEDPG_TRANSPORT) is \"{}\", but {}",
      transport_choice_name(settings.transport),
      why);
}

std::vector<std::string> exchange(
    Group& group,
    const Offer& mine,
    Rendezvous& rendezvous,
    const Deadline& deadline,
    const std::function<void()>& check) {
  std::vector<std::string> words = exchange_words(
      rendezvous,
      "offer",
      group.rank,
      group.size,
      mine.text(),
      deadline,
      check);
  for (int p = 0; p < group.size; ++p) {
    const Offer offer = Offer::of(words[p]);
    if (!offer.why_not.empty()) {
      refuse(group.settings, formatted("rank {}: {}", p, offer.why_not));
    }
    words[p] = offer.word;
  }
  return words;
}

void check_versions(
    const Settings& settings,
    const std::vector<std::string>& versions) {
  for (size_t p = 0; p < versions.size(); ++p) {
    if (versions[p] != versions[0]) {
      refuse(
          settings,
          formatted(
              "UCX is {} on rank 0 and {} on rank {}",
              versions[0],
              versions[p],
              p));
    }
  }
}

// The address that this process listens at: by the way to the store, if that
// has one.
SocketAddress address_here(Group& group) {
  auto store = group.store;
  if (const auto* prefix =
          dynamic_cast<const c10d::PrefixStore*>(store.get())) {
    store =
        const_cast<c10d::PrefixStore*>(prefix)->getUnderlyingNonPrefixStore();
  }
  const auto* tcp = dynamic_cast<const c10d::TCPStore*>(store.get());
  return tcp == nullptr
      ? local_address(group.settings.socket_ifname, "", 0)
      : local_address(
            group.settings.socket_ifname, tcp->getHost(), tcp->getPort());
}

// With room for `more` that are no ranks of the group.
std::unique_ptr<TcpEndpoint> open_endpoint(Group& group, int more = 0) {
  return std::make_unique<TcpEndpoint>(
      TcpListener::at(address_here(group)), group.rank, group.size + more);
}

TcpTransport::Config tcp_config(const Settings& settings) {
  TcpTransport::Config config;
  if (settings.spin_us >= 0) {
    config.spin = std::chrono::microseconds(settings.spin_us);
  } else if (
      std::thread::hardware_concurrency() <=
      static_cast<unsigned>(std::max(settings.local_world_size, 1))) {
    config.spin = {}; // a peer may need the core
  }
  return config;
}

UcxConfig ucx_config(const Settings& settings) {
  UcxConfig config;
  config.set = settings.ucx_config;
  if (settings.spin_us >= 0) {
    config.spin = std::chrono::microseconds(settings.spin_us);
  }
  return config;
}

} // namespace

Connection connect_hosts(
    Group& group,
    const Deadline& deadline,
    const std::function<void()>& check) {
  const Settings& settings = group.settings;
  BoundedRendezvous rendezvous(
      c10::make_intrusive<c10d::PrefixStore>("fusedpg-transport", group.store),
      deadline,
      check);
  const auto offers = [&](const std::function<std::string()>& word) {
    return exchange(group, offer_of(word), rendezvous, deadline, check);
  };
  if (settings.transport == TransportChoice::kUcx) {
    const ucx::Api* api = nullptr;
    check_versions(settings, offers([&] {
                     api = &ucx::load(settings.ucx_lib);
                     return api->version;
                   }));
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
  std::unique_ptr<TcpEndpoint> endpoint;
  const auto addresses = offers([&] {
    endpoint = open_endpoint(group);
    return endpoint->address();
  });
  return {
      std::make_unique<TcpTransport>(
          tcp_config(settings), std::move(endpoint), addresses),
      "tcp"};
}

std::unique_ptr<aggregate::Client> connect_aggregators(
    Group& group,
    bool alone,
    const Deadline& deadline,
    const std::function<void()>& check) {
  const Settings& settings = group.settings;
  const std::vector<std::string>& places = settings.aggregators;
  if (places.empty()) {
    return nullptr;
  }
  if (!alone) {
    fail(
        ErrorKind::kInvalid,
        "fused: Options.aggregators (FUSEDPG_AGGREGATORS) add up in rank "
        "order: where ranks share hosts that is order=\"flat\" "
        "(FUSEDPG_ORDER)");
  }
  const Key128 key = aggregate::key_of(settings.aggregator_key);
  BoundedRendezvous rendezvous(
      c10::make_intrusive<c10d::PrefixStore>("fusedpg-aggregate", group.store),
      deadline,
      check);
  std::unique_ptr<TcpEndpoint> endpoint;
  const Offer mine = offer_of([&] {
    endpoint = open_endpoint(group, static_cast<int>(places.size()));
    return endpoint->address();
  });
  const auto workers = exchange(group, mine, rendezvous, deadline, check);
  // Rank 0 opens the jobs, and says where they are, or why there is none, before
  // the others have waited too long.
  const Deadline patience(
      std::min(deadline.left() / 2, std::chrono::milliseconds(10'000)));
  const auto job_key = [](size_t a) { return formatted("job/{}", a); };
  for (size_t a = 0; group.rank == 0 && a < places.size(); ++a) {
    const auto opens = [&] {
      return aggregate::open_job(
          places[a], key, {workers, places.size(), a}, patience, check);
    };
    const Offer job = offer_of(opens);
    rendezvous.set(job_key(a), job.text());
    if (!job.why_not.empty()) {
      break;
    }
  }
  auto transport =
      std::make_unique<TcpTransport>(tcp_config(settings), std::move(endpoint));
  for (size_t a = 0; a < places.size(); ++a) {
    const Offer job = Offer::of(
        await_word(rendezvous, job_key(a), group.rank, 0, deadline, check));
    if (!job.why_not.empty()) {
      fail(ErrorKind::kSystem, "{}", job.why_not);
    }
    transport->connect(group.size + static_cast<int>(a), job.word);
  }
  return std::make_unique<aggregate::Client>(
      places, std::move(transport), group.size);
}

std::string host_address(Group& group) {
  if (group.settings.transport == TransportChoice::kUcx) {
    return "";
  }
  try {
    return address_here(group).host();
  } catch (const Error&) {
    return "";
  }
}

std::unique_ptr<PolledTransport> open_transport(Group& group) {
  const Settings& settings = group.settings;
  if (settings.transport == TransportChoice::kUcx) {
    return std::make_unique<UcxTransport>(
        ucx::load(settings.ucx_lib),
        ucx_config(settings),
        group.rank,
        group.size);
  }
  return std::make_unique<TcpTransport>(
      tcp_config(settings), open_endpoint(group));
}

} // namespace fusedpg
