#include "c10d/store_rendezvous.hpp"

#include <map>
#include <mutex>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace fusedpg {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

} // namespace

StorePtr own_client(const StorePtr& store) {
  try {
    return store->clone();
  } catch (const std::exception&) {
    return store; // written in Python, without clone()
  }
}

std::shared_ptr<CommonClient> CommonClient::get(const StorePtr& store) {
  static std::mutex mutex;
  // Not weak pointers of c10: a store closes its sockets when these are gone, too.
  static auto* known =
      new std::map<const c10d::Store*, std::weak_ptr<CommonClient>>();
  StorePtr root = store;
  while (auto* prefix = dynamic_cast<c10d::PrefixStore*>(root.get())) {
    root = prefix->getUnderlyingStore();
  }
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto one = known->begin(); one != known->end();) {
    one = one->second.expired() ? known->erase(one) : std::next(one);
  }
  std::weak_ptr<CommonClient>& one = (*known)[root.get()];
  auto common = one.lock();
  if (!common) {
    common.reset(new CommonClient{root, own_client(root)});
    one = common;
  }
  return common;
}

} // namespace fusedpg
