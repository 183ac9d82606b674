#pragma once

#include <cstddef>
#include <vector>

namespace fusedpg {

// Tells which ranks of a group share a machine.
class HostMap {
 public:
  // The ranks of every host, ascending.
  explicit HostMap(std::vector<std::vector<int>> hosts)
      : hosts_(std::move(hosts)) {
    for (size_t h = 0; h < hosts_.size(); ++h) {
      for (size_t i = 0; i < hosts_[h].size(); ++i) {
        const auto rank = static_cast<size_t>(hosts_[h][i]);
        if (places_.size() <= rank) {
          places_.resize(rank + 1);
        }
        places_[rank] = {static_cast<int>(h), static_cast<int>(i)};
      }
    }
  }
  // Every rank on a machine of its own.
  static HostMap apart(int world_size) {
    std::vector<std::vector<int>> hosts;
    for (int p = 0; p < world_size; ++p) {
      hosts.push_back({p});
    }
    return HostMap(std::move(hosts));
  }

  int num_hosts() const {
    return static_cast<int>(hosts_.size());
  }
  const std::vector<int>& ranks(int host) const {
    return hosts_[host];
  }
  int host(int rank) const {
    return places_[rank].host;
  }
  // A rank's place among those of its host.
  int local(int rank) const {
    return places_[rank].local;
  }
  bool shared() const {
    return hosts_.size() < places_.size();
  }
  // The rank of a host that works for `rank`: itself on its own host, the same
  // local rank on others, so that work and links are shared out evenly.
  int proxy(int rank, int host) const {
    const auto& ranks = hosts_[host];
    return host == places_[rank].host
        ? rank
        : ranks[static_cast<size_t>(places_[rank].local) % ranks.size()];
  }

 private:
  struct Place {
    int host = 0;
    int local = 0;
  };
  std::vector<std::vector<int>> hosts_;
  std::vector<Place> places_; // by rank
};

} // namespace fusedpg
