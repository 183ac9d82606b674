// Finds libucp and the functions in it.

#include <dlfcn.h>

#include <memory>
#include <mutex>

#include "base/error.hpp"
#include "net/ucx_api.hpp"

namespace fusedpg::ucx {
namespace {

constexpr unsigned kMajor = 1;
constexpr unsigned kOldestMinor = 13;

std::string& default_path() {
  static auto* path = new std::string();
  return *path;
}

// Two copies of UCX in one process do not get on with each other.
void* open(const std::string& path) {
  constexpr const char* kSystem = "libucp.so.0";
  void* library = dlopen(kSystem, RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr && !path.empty()) {
    library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  } else if (library == nullptr) {
    const std::string& wheel = default_path();
    library =
        wheel.empty() ? nullptr : dlopen(wheel.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      library = dlopen(kSystem, RTLD_NOW | RTLD_LOCAL);
    }
  }
  if (library == nullptr) {
    const char* text = dlerror();
    fail(
        ErrorKind::kSystem,
        "cannot load UCX: {}. Install libucx-cu12 (pip install fusedpg[ucx]) "
        "or "
        "a system UCX, or set FUSEDPG_UCX_LIB to a libucp.so.0",
        text == nullptr ? "unknown error" : text);
  }
  return library;
}

Api load_from(void* library) {
  Api api{};
  bool complete = true;
  const auto find = [&](auto& function, const char* name) {
    using Function = std::remove_reference_t<decltype(function)>;
    function = reinterpret_cast<Function>(dlsym(library, name));
    complete = complete && function != nullptr;
  };
  find(api.get_version, "ucp_get_version");
  find(api.status_string, "ucs_status_string");
  find(api.config_read, "ucp_config_read");
  find(api.config_modify, "ucp_config_modify");
  find(api.config_release, "ucp_config_release");
  find(api.init, "ucp_init_version");
  find(api.cleanup, "ucp_cleanup");
  find(api.worker_create, "ucp_worker_create");
  find(api.worker_destroy, "ucp_worker_destroy");
  find(api.worker_get_address, "ucp_worker_get_address");
  find(api.worker_release_address, "ucp_worker_release_address");
  find(api.worker_get_efd, "ucp_worker_get_efd");
  find(api.worker_arm, "ucp_worker_arm");
  find(api.worker_progress, "ucp_worker_progress");
  find(api.worker_flush, "ucp_worker_flush_nbx");
  find(api.ep_create, "ucp_ep_create");
  find(api.ep_close, "ucp_ep_close_nbx");
  find(api.tag_send, "ucp_tag_send_nbx");
  find(api.tag_receive, "ucp_tag_recv_nbx");
  find(api.request_check, "ucp_request_check_status");
  find(api.request_cancel, "ucp_request_cancel");
  find(api.request_free, "ucp_request_free");
  unsigned major = 0, minor = 0, release = 0;
  if (complete) {
    api.get_version(&major, &minor, &release);
  }
  api.version = formatted("{}.{}.{}", major, minor, release);
  if (major != kMajor || minor < kOldestMinor) {
    fail(
        ErrorKind::kSystem,
        "UCX {}.{} or newer is needed, found {}",
        kMajor,
        kOldestMinor,
        complete ? api.version : "a library without its functions");
  }
  Dl_info where{};
  if (dladdr(reinterpret_cast<void*>(api.get_version), &where) != 0) {
    api.path = where.dli_fname;
  }
  // The process' signals are not UCX's, which would print a trace of its own.
  const auto leave_signals =
      reinterpret_cast<void (*)()>(dlsym(library, "ucs_debug_disable_signals"));
  if (leave_signals != nullptr) {
    leave_signals();
  }
  return api;
}

} // namespace

void set_default_path(const std::string& path) {
  default_path() = path;
}

std::string described(const std::string& path) {
  const Api& api = load(path);
  return formatted("UCX {}, {}", api.version, api.path);
}

const Api& load(const std::string& path) {
  static auto* mutex = new std::mutex();
  static std::unique_ptr<Api>* loaded = new std::unique_ptr<Api>();
  std::lock_guard<std::mutex> lock(*mutex);
  if (!*loaded) {
    *loaded = std::make_unique<Api>(load_from(open(path)));
  }
  return **loaded;
}

} // namespace fusedpg::ucx
