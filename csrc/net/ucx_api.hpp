#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace fusedpg::ucx {

// The part of UCP's C ABI that we use (ucp.h of 1.13 and later), so that
// neither its header is needed to build nor its library to load the module.
// Structures say by a mask which of their fields count, and may be longer in
// the library: there is room behind those we know. tests/cpp/test_ucx_abi.cpp
// compares them with a header where there is one.
using Context = void*;
using Worker = void*;
using Endpoint = void*;
using Config = void*;
using Address = void*;

enum Status : int8_t {
  kOk = 0,
  kInProgress = 1,
  kTruncated = -9, // a message longer than its receive
  kNoElement = -12,
  kBusy = -15,
};

// What a call that may go on returns: null when it is done, a request, or an
// error in the guise of a pointer.
using StatusPtr = void*;
inline bool is_error(StatusPtr p) {
  return reinterpret_cast<uintptr_t>(p) >= static_cast<uintptr_t>(-100);
}
inline Status error_of(StatusPtr p) {
  return static_cast<Status>(reinterpret_cast<intptr_t>(p));
}

struct Params {
  uint64_t field_mask = 1 << 0 | 1 << 5; // features, mt_workers_shared
  uint64_t features = 1 << 0 | 1 << 4; // tag matching, wakeup
  size_t request_size = 0;
  void* request_init = nullptr;
  void* request_cleanup = nullptr;
  uint64_t tag_sender_mask = 0;
  int mt_workers_shared = 0;
  char more[128] = {};
};

struct WorkerParams {
  uint64_t field_mask = 1 << 0; // thread_mode
  int thread_mode = 1; // serialized: one thread at a time
  char more[512] = {};
};

struct EndpointParams {
  uint64_t field_mask = 1 << 0 | 1 << 1 | 1 << 2; // the next three
  const void* address = nullptr;
  int error_mode = 1; // tell us when the peer has failed
  struct {
    void (*callback)(void* argument, Endpoint, Status);
    void* argument;
  } error_handler{};
  char more[256] = {};
};

struct ReceiveInfo {
  uint64_t sender_tag;
  size_t length;
};

struct RequestParam {
  static constexpr uint32_t kCallback = 1 << 1;
  static constexpr uint32_t kUserData = 1 << 2;
  static constexpr uint32_t kFlags = 1 << 4;
  static constexpr uint32_t kReceiveInfo = 1 << 7; // if it is done at once
  static constexpr uint32_t kForce = 1 << 0; // a flag of ep_close

  uint32_t op_attr_mask = 0;
  uint32_t flags = 0;
  void* request = nullptr;
  union {
    void (*send)(void* request, Status, void* user_data);
    void (*receive)(void* request, Status, const ReceiveInfo*, void* user_data);
  } callback{};
  uint64_t datatype = 0; // contiguous bytes are the default
  void* user_data = nullptr;
  void* reply_buffer = nullptr;
  int memory_type = 0;
  ReceiveInfo* receive_info = nullptr;
  char more[128] = {};
};

struct Api {
  void (*get_version)(unsigned*, unsigned*, unsigned*);
  const char* (*status_string)(Status);
  Status (*config_read)(const char* prefix, const char* file, Config*);
  Status (*config_modify)(Config, const char* name, const char* value);
  void (*config_release)(Config);
  Status (*init)(unsigned, unsigned, const Params*, Config, Context*);
  void (*cleanup)(Context);
  Status (*worker_create)(Context, const WorkerParams*, Worker*);
  void (*worker_destroy)(Worker);
  Status (*worker_get_address)(Worker, Address*, size_t*);
  void (*worker_release_address)(Worker, Address);
  Status (*worker_get_efd)(Worker, int*);
  Status (*worker_arm)(Worker);
  unsigned (*worker_progress)(Worker);
  StatusPtr (*worker_flush)(Worker, const RequestParam*);
  Status (*ep_create)(Worker, const EndpointParams*, Endpoint*);
  StatusPtr (*ep_close)(Endpoint, const RequestParam*);
  StatusPtr (*tag_send)(
      Endpoint,
      const void*,
      size_t,
      uint64_t tag,
      const RequestParam*);
  StatusPtr (*tag_receive)(
      Worker,
      void*,
      size_t,
      uint64_t tag,
      uint64_t mask,
      const RequestParam*);
  Status (*request_check)(void*);
  void (*request_cancel)(Worker, void*);
  void (*request_free)(void*);

  std::string version;
  std::string path; // of the library
};

// Loads the library: the one that the process has, else `path`, or without one
// the default, or the system's. Throws Error(kSystem) saying what is missing.
// It stays loaded.
const Api& load(const std::string& path);
// Where a wheel has put it; empty: nowhere.
void set_default_path(const std::string& path);
// Loads it, for people: "UCX 1.22.0, /usr/lib/libucp.so.0".
std::string described(const std::string& path = "");

} // namespace fusedpg::ucx
