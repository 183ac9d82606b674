#include "c10d/store_rendezvous.hpp"

#include <poll.h>

#include <cerrno>
#include <cstdlib>
#include <map>
#include <mutex>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/fork.hpp"

namespace fusedpg {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

struct Clients {
  std::mutex mutex;
  // Not weak pointers of c10: a store closes its sockets when these are gone, too.
  std::map<const c10d::Store*, std::weak_ptr<CommonClient>> known;
};
PerProcess<Clients> clients;

StorePtr root_of(StorePtr store) {
  while (auto* prefix = dynamic_cast<c10d::PrefixStore*>(store.get())) {
    store = prefix->getUnderlyingStore();
  }
  return store;
}

// "TCPStore(client=TCPClient(SocketImpl(fd=13, ...)), server=TCPServer(...))": c10d
// has no other way to ask. Empty for other stores.
std::string described(const StorePtr& root) {
  const auto* store = dynamic_cast<const c10d::TCPStore*>(root.get());
  return store != nullptr ? store->repr() : std::string();
}

} // namespace

StorePtr own_client(const StorePtr& store) {
  try {
    return store->clone();
  } catch (const std::exception&) {
    return store; // written in Python, without clone()
  }
}

std::shared_ptr<CommonClient> CommonClient::get(const StorePtr& store) {
  const StorePtr root = root_of(store);
  Clients& all = clients.get();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (auto one = all.known.begin(); one != all.known.end();) {
    one = one->second.expired() ? all.known.erase(one) : std::next(one);
  }
  std::weak_ptr<CommonClient>& one = all.known[root.get()];
  auto common = one.lock();
  if (!common) {
    common.reset(new CommonClient{root, own_client(root)});
    one = common;
  }
  return common;
}

bool same_store(const StorePtr& one, const StorePtr& other) {
  return root_of(one) == root_of(other);
}

bool store_is_here(const StorePtr& store) {
  return described(root_of(store)).find("server=TCPServer") !=
      std::string::npos;
}

std::pair<std::string, uint16_t> store_address(const StorePtr& store) {
  const StorePtr root = root_of(store);
  const auto* tcp = dynamic_cast<const c10d::TCPStore*>(root.get());
  return tcp == nullptr ? std::pair<std::string, uint16_t>()
                        : std::pair(tcp->getHost(), tcp->getPort());
}

void await_store_end(const StorePtr& store, std::chrono::milliseconds most) {
  const StorePtr root = root_of(store);
  // This reference, the innermost prefix's, and a common client's.
  size_t ours = 2;
  {
    Clients& all = clients.get();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto common = all.known.find(root.get());
    if (common != all.known.end() && !common->second.expired()) {
      ++ours;
    }
  }
  const std::string text = described(root);
  const std::string mark = "client=TCPClient(SocketImpl(fd=";
  const size_t at = text.find(mark);
  if (root.use_count() > ours || at == std::string::npos) {
    return;
  }
  pollfd connection{std::atoi(text.c_str() + at + mark.size()), POLLRDHUP, 0};
  const Deadline deadline(most);
  while (poll(&connection, 1, static_cast<int>(deadline.left().count())) < 0 &&
         errno == EINTR) {
  }
}

} // namespace fusedpg
