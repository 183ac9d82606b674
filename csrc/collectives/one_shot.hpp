#pragma once

#include <functional>

#include "collectives/context.hpp"

namespace fusedpg {

// Small reductions: every rank stages its whole input before the one barrier,
// then reads what it needs from everybody's staging buffer.
//
// After the barrier fn(srcs) gets every rank's staged input in rank order.
// False when another rank has not staged its input: then the operation, which
// has been entered, is still to be done.
bool one_shot(
    Context& ctx,
    OpDescriptor& d,
    const Span& input,
    const std::function<void(const void* const* srcs)>& fn);

} // namespace fusedpg
