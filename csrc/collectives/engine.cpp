#include "collectives/engine.hpp"

#include <new>

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

Error GroupBase::error_of(const std::exception& thrown) const {
  if (const auto* error = dynamic_cast<const Error*>(&thrown)) {
    return *error;
  }
  const Error described = describe_(thrown);
  return dynamic_cast<const std::bad_alloc*>(&thrown) != nullptr
      ? Error(ErrorKind::kOutOfMemory, described.what())
      : described;
}

namespace {

// Which all ranks find, and stay in step.
bool alike(const Error& error) {
  return error.kind() == ErrorKind::kInvalid ||
      error.kind() == ErrorKind::kMismatch;
}

} // namespace

bool Engine::stays_in_step(Way& way, const std::exception& thrown) {
  const Error error = group_.error_of(thrown);
  if (error.kind() == ErrorKind::kAborted) {
    return false;
  }
  if (way.op().entered) {
    return alike(error);
  }
  const std::string reason = error.what();
  try {
    way.refuse(reason.substr(0, reason.find('\n')));
    return true;
  } catch (const std::exception& of_refusal) {
    const Error untold = group_.error_of(of_refusal);
    if (untold.kind() == ErrorKind::kAborted) {
      throw;
    }
    // A fault of this call alone is no reason for the group to end.
    throw Error(
        alike(error) ? untold.kind() : error.kind(),
        formatted(
            "{}; the other ranks cannot be told: {}", reason, untold.what()));
  }
}

std::shared_ptr<Messages> Engine::messages(FunctionRef<void()> check_open) {
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
