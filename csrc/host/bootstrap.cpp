#include "host/bootstrap.hpp"

#include <unistd.h>

#include <algorithm>
#include <unordered_map>

#include "base/error.hpp"
#include "base/topology.hpp"
#include "host/hellos.hpp"

namespace fusedpg {

Bootstrap::Bootstrap(int rank, int world_size, const Settings& settings)
    : rank_(rank),
      world_size_(world_size),
      host_id_(settings.host_id) {
  std::string aggregators;
  for (const std::string& place : settings.aggregators) {
    aggregators += (aggregators.empty() ? "" : ",") + place;
  }
  constexpr double kGbit = 1e9 / 8;
  const LinkRates rates = settings.aggregate_rates.value_or(LinkRates{});
  self_.settings = formatted(
      "block_skip={}, block_size={}, order={}, aggregators={}, "
      "aggregate={}, aggregate_rates={},{}, aggregate_message_bytes={}",
      block_skip_name(settings.block_skip),
      settings.block_size,
      settings.flat_order ? "flat" : "hosts",
      aggregators,
      aggregate_name(settings.aggregate),
      rates.rank / kGbit,
      rates.aggregator / kGbit,
      settings.aggregate_message_bytes);
}

void Bootstrap::meet(Rendezvous& store, const Deadline& deadline) {
  self_.token = random_token();
  self_.pid = getpid();
  meeting_ = std::make_unique<Meeting>(store, rank_, world_size_, self_);
  try {
    self_.host_id = host_identity(host_id_);
    self_.host_name = host_name();
    self_.keeps_store = store.is_here();
    self_.cpus = cpu_mask();
    self_.start = start_time(self_.pid);
    listener_ = listen_for_hellos(world_size_, self_.address);
    peers_ = meeting_->run(self_, deadline);
  } catch (const std::exception& error) {
    withdraw(error.what());
    throw;
  }
  // All have the same list, so either none throws or all do.
  for (int p = 0; p < world_size_; ++p) {
    if (peers_[p].settings != self_.settings) {
      fail(
          ErrorKind::kMismatch,
          "fused: ranks have different settings; rank {}: {}; rank {}: {}",
          rank_,
          self_.settings,
          p,
          peers_[p].settings);
    }
  }
}

void Bootstrap::meet_again(
    std::shared_ptr<Links> links,
    const std::string& name,
    const std::vector<int>& ranks) {
  for (const int r : ranks) {
    peers_.push_back(links->info(r));
  }
  self_.host_id = peers_[rank_].host_id;
  reunion_ = std::make_unique<Reunion>(links, name, ranks, self_.settings);
  links_ = std::move(links);
}

std::string Bootstrap::id() const {
  const std::string bytes = reunion_
      ? std::string(reunion_->id().begin(), reunion_->id().end())
      : meeting_->id();
  std::string text;
  for (const char c : bytes) {
    constexpr const char* kDigits = "0123456789abcdef";
    text += kDigits[static_cast<unsigned char>(c) >> 4];
    text += kDigits[c & 15];
  }
  return text;
}

void Bootstrap::withdraw(const std::string& reason) noexcept {
  if (reunion_) {
    reunion_->withdraw(reason);
  } else {
    meeting_->withdraw(reason);
  }
}

std::vector<std::vector<int>> Bootstrap::hosts() const {
  std::vector<std::vector<int>> hosts;
  std::unordered_map<std::string, size_t> known;
  for (int p = 0; p < world_size_; ++p) {
    const size_t host =
        known.try_emplace(peers_[p].host_id, hosts.size()).first->second;
    if (host == hosts.size()) {
      hosts.emplace_back();
    }
    hosts[host].push_back(p);
  }
  return hosts;
}

std::vector<int> Bootstrap::host_ranks() const {
  std::vector<int> ranks;
  for (int p = 0; p < world_size_; ++p) {
    if (peers_[p].host_id == self_.host_id) {
      ranks.push_back(p);
    }
  }
  return ranks;
}

int Bootstrap::local_cpus() const {
  std::string all;
  for (const int r : host_ranks()) {
    const std::string& cpus = peers_[r].cpus;
    all.resize(std::max(all.size(), cpus.size()), '0');
    for (size_t i = 0; i < cpus.size(); ++i) {
      all[i] = cpus[i] == '1' ? '1' : all[i];
    }
  }
  return static_cast<int>(std::count(all.begin(), all.end(), '1'));
}

std::vector<Bootstrap::Peer> Bootstrap::exchange_memory(
    int memory_fd,
    const Deadline& deadline) {
  std::vector<Peer> result;
  try {
    if (reunion_) {
      return reunion_->exchange(memory_fd, deadline);
    }
    const std::vector<int> ranks = host_ranks();
    std::vector<PeerInfo> infos;
    for (const int r : ranks) {
      infos.push_back(peers_[r]);
    }
    Hellos hellos(rank_, ranks, infos, listener_.get(), memory_fd, *meeting_);
    result = hellos.exchange(deadline);
    std::vector<Fd> connections = hellos.connections();
    std::map<int, Links::Known> known;
    for (size_t p = 0; p < ranks.size(); ++p) {
      known[ranks[p]] = {
          infos[p], std::move(connections[p]), result[p].process};
    }
    links_ = std::make_shared<Links>(rank_, host_id_, std::move(known));
  } catch (const std::exception& error) {
    withdraw(error.what()); // before the sockets close: peers look then
    throw;
  }
  listener_.reset();
  return result;
}

} // namespace fusedpg
