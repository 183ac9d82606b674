#pragma once

#include <chrono>
#include <functional>

namespace fusedpg {

// Runs `fn` soon on a thread that executes no collective. `fn` may block for as
// long as it likes: when all threads are busy another one is started, and idle
// ones end by themselves.
void complete_elsewhere(std::function<void()> fn);

// At the interpreter's exit: waits until all of these have run, at most so long.
// From then on each runs at once, on the thread that gives it.
void finish_completions(std::chrono::milliseconds timeout);

} // namespace fusedpg
