#include "c10d/interruptible.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <torch/csrc/utils/pybind.h>

#include "base/error.hpp"
#include "c10d/gil.hpp"

namespace fusedpg {
namespace {

bool python_ends() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsInitialized() == 0 || Py_IsFinalizing() != 0;
#else
  return Py_IsInitialized() == 0 || _Py_IsFinalizing() != 0;
#endif
}

// The state of the main interpreter's main thread, if this is it: only there do
// signal handlers run. (Neither a subinterpreter nor a thread that Python does
// not know has one.)
PyThreadState* main_thread_state() {
  if (syscall(SYS_gettid) != getpid() || python_ends()) {
    return nullptr;
  }
  PyThreadState* state = PyGILState_GetThisThreadState();
  return state != nullptr &&
          PyThreadState_GetInterpreter(state) == PyInterpreterState_Main()
      ? state
      : nullptr;
}

} // namespace

void Interrupter::set(std::function<void(const std::string&)> interrupt) {
  std::lock_guard<std::mutex> lock(mutex_);
  interrupt_ = std::move(interrupt);
}

void Interrupter::interrupt(const std::string& how) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (interrupt_) {
    interrupt_(how);
  }
}

struct Interruptible::Raised {
  pybind11::error_already_set error;
};

Interruptible::Interruptible(Interrupter* group) : group_(group) {}

Interruptible::~Interruptible() = default;

void Interruptible::look() {
  if (never_ || raised_) {
    return;
  }
  PyThreadState* state = main_thread_state();
  if (state == nullptr) {
    never_ = true;
    return;
  }
  std::string type;
  {
    const bool held = PyGILState_Check() != 0;
    if (!held) {
      PyEval_RestoreThread(state);
    }
    if (PyErr_Occurred() == nullptr) { // not from within a destructor
      const c10::InferenceMode inference(inference_);
      const c10::AutoGradMode grad(grad_);
      const c10::impl::ForceDispatchKeyGuard keys(keys_);
      if (PyErr_CheckSignals() != 0) {
        raised_ = std::make_unique<Raised>();
        type = pybind11::str(raised_->error.type().attr("__name__"));
      }
    }
    if (!held) {
      PyEval_SaveThread();
    }
  }
  if (!raised_) {
    return;
  }
  const ReleaseGil release;
  const std::string how = "interrupted by " + type;
  if (group_ == nullptr) {
    fail(ErrorKind::kAborted, "fused: {}, in a signal handler", how);
  }
  group_->interrupt(how);
}

void Interruptible::raise() {
  if (raised_) {
    const auto raised = std::move(raised_);
    throw pybind11::error_already_set(raised->error);
  }
}

} // namespace fusedpg
