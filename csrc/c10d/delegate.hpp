#pragma once

#include <chrono>
#include <functional>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace fusedpg {

// Makes the backend that executes what the engine does not: torch's own Gloo.
// Its C++ headers do not ship, so Python registers how to construct it.
using DelegateFactory = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    std::chrono::milliseconds timeout)>;

void set_delegate_factory(DelegateFactory factory);

// Throws when none is registered. A collective call.
c10::intrusive_ptr<c10d::Backend> make_delegate(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    std::chrono::milliseconds timeout);

// Logs a line the first time it is called with this text in this process.
void log_once(const std::string& text);

} // namespace fusedpg
