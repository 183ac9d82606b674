#pragma once

#include <functional>

namespace fusedpg {

// Runs `fn` soon on a thread that executes no collective. `fn` may block for as
// long as it likes: when all threads are busy another one is started, and idle
// ones end by themselves.
void complete_elsewhere(std::function<void()> fn);

} // namespace fusedpg
