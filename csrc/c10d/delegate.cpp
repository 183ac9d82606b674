#include "c10d/delegate.hpp"

#include <mutex>
#include <set>

#include "base/fork.hpp"
#include "base/options.hpp"

namespace fusedpg {
namespace {

struct Logged {
  std::mutex mutex;
  std::set<std::string> texts;
};
PerProcess<Logged> logged;

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
    const c10::intrusive_ptr<c10d::Backend::Options>& options) {
  TORCH_CHECK(
      registered(),
      "fused: no backend to delegate to; import fusedpg before creating the "
      "group");
  return registered()(device, store, rank, size, options);
}

void log_once(const std::string& text) {
  Logged& all = logged.get();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.texts.insert(text).second) {
    log_line(text);
  }
}

} // namespace fusedpg
