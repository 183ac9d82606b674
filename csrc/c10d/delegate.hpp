#pragma once

#include <functional>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace fusedpg {

// Makes the backend that executes what the engines do not: torch's own Gloo for
// device "cpu", NCCL for "cuda". Their C++ headers do not ship or need CUDA's,
// so Python registers how to construct them. `options` are the group's.
using DelegateFactory = std::function<c10::intrusive_ptr<c10d::Backend>(
    const std::string& device,
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    const c10::intrusive_ptr<c10d::Backend::Options>& options)>;

void set_delegate_factory(DelegateFactory factory);

// Throws when none is registered. A collective call.
c10::intrusive_ptr<c10d::Backend> make_delegate(
    const std::string& device,
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    const c10::intrusive_ptr<c10d::Backend::Options>& options);

// Logs a line the first time it is called with this text in this process.
void log_once(const std::string& text);

} // namespace fusedpg
