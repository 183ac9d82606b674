#include "c10d/delegate.hpp"

#include <mutex>
#include <set>

#include "base/options.hpp"

namespace fusedpg {
namespace {

DelegateFactory& registered() {
  static auto* factory = new DelegateFactory();
  return *factory;
}

} // namespace

void set_delegate_factory(DelegateFactory factory) {
  registered() = std::move(factory);
}

c10::intrusive_ptr<c10d::Backend> make_delegate(
    const std::string& device,
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    std::chrono::milliseconds timeout) {
  TORCH_CHECK(
      registered(),
      "fused: no backend to delegate to; import fusedpg before creating the "
      "group");
  return registered()(device, store, rank, size, timeout);
}

void log_once(const std::string& text) {
  static auto* mutex = new std::mutex();
  static auto* logged = new std::set<std::string>();
  std::lock_guard<std::mutex> lock(*mutex);
  if (logged->insert(text).second) {
    log_line(text);
  }
}

} // namespace fusedpg
