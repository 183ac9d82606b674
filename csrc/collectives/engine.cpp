#include "collectives/engine.hpp"

#include "collectives/way.hpp"
#include "messages/messages.hpp"

namespace fusedpg {

const kernels::Table& select_kernels(const Settings& settings) {
  const std::string& isa = settings.isa;
  const kernels::Table* table =
      kernels::table(isa.empty() ? nullptr : isa.c_str());
  if (table == nullptr) {
    fail(
        ErrorKind::kInvalid,
        "fused: FUSEDPG_ISA={} names no instruction set of this build and CPU",
        isa);
  }
  return *table;
}

bool Engine::stays_in_step(Way& way, const std::exception& thrown) {
  const auto* error = dynamic_cast<const Error*>(&thrown);
  if (error != nullptr && error->kind() == ErrorKind::kAborted) {
    return false;
  }
  if (!way.op().entered) {
    way.refuse(group_.describe(thrown));
    return true;
  }
  return error != nullptr &&
      (error->kind() == ErrorKind::kInvalid ||
       error->kind() == ErrorKind::kMismatch);
}

void Engine::run(Way& way, const Operation& op, const char* title) {
  std::exception_ptr alike;
  try {
    try {
      begin(way);
      op(way);
    } catch (const std::exception& thrown) {
      if (!stays_in_step(way, thrown)) {
        throw;
      }
      alike = std::current_exception();
    }
    end(way);
  } catch (const Error& error) {
    fail_group(error, title, way.op().sequence);
    throw;
  } catch (const std::exception& thrown) {
    // Not foreseen (no memory, no thread): the peers are somewhere inside the
    // operation that this rank has left.
    const Error error(ErrorKind::kSystem, group_.describe(thrown));
    fail_group(error, title, way.op().sequence);
    throw;
  }
  if (alike) {
    std::rethrow_exception(alike);
  }
}

std::shared_ptr<Messages> Engine::messages(
    const std::function<void()>& check_open) {
  check_failed();
  std::lock_guard<std::mutex> lock(mailbox_mutex_);
  check_open(); // not after shutdown() has stopped it
  if (!mailbox_) {
    mailbox_ = open_messages();
  }
  return mailbox_;
}

void Engine::stop_messages() {
  std::lock_guard<std::mutex> lock(mailbox_mutex_);
  if (mailbox_) {
    mailbox_->stop();
  }
}

std::shared_ptr<Arena> Engine::arena() {
  return host() != nullptr ? host()->arena() : nullptr;
}

void Engine::describe(GroupInfo& info) {
  if (arena() != nullptr) {
    info.arena_reserved = arena()->heap_bytes();
    info.arena_used = arena()->used_bytes();
  }
}

} // namespace fusedpg
