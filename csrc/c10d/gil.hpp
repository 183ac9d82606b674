#pragma once

#include <Python.h>

#include <chrono>
#include <exception>
#include <thread>

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

// To be called when the interpreter is about to end. CPython before 3.14 ends
// other threads that ask for the GIL from then on by pthread_exit, and a thread
// that does so below a C++ destructor (torch's binding of wait(), a future's
// callback) ends the whole process by std::terminate. They stop here instead,
// as 3.14 has them do.
inline void park_threads_that_python_ends() {
  static const std::thread::id main = std::this_thread::get_id();
  static const std::terminate_handler before = std::get_terminate();
  std::set_terminate([] {
    while (std::this_thread::get_id() != main && !std::current_exception()) {
      std::this_thread::sleep_for(std::chrono::hours(1));
    }
    before();
  });
}

} // namespace fusedpg
