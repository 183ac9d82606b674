#pragma once

#include <Python.h>

namespace fusedpg {

// Releases the GIL for a scope if this thread holds it: threads that are waited
// for there may need it to drop their last tensors.
class ReleaseGil {
 public:
  ReleaseGil()
      : state_(
            Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread()
                                                     : nullptr) {}
  ~ReleaseGil() {
    if (state_ != nullptr) {
      PyEval_RestoreThread(state_);
    }
  }
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;

 private:
  PyThreadState* state_;
};

} // namespace fusedpg
