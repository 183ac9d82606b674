#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fusedpg {

// For a scope, torch's modes as on a new thread: an operation that was
// submitted may run on any thread that waits, and what it does with tensors is
// not to be seen by that thread's modes (fake tensors, vmap, inference).
class FreshThreadState {
  const c10::InferenceMode inference_{false};
  const c10::NoGradGuard no_grad_{};
  // detach() looks at the stack of modes unless Python is excluded.
  const c10::impl::ForceDispatchKeyGuard keys_{
      c10::default_included_set,
      c10::default_excluded_set |
          c10::DispatchKeySet(
              {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

} // namespace fusedpg
