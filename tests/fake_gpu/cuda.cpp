// The fake's CudaApi: the runtime's calls, and the kernels' host versions.

#include <cstring>

#include "calls.hpp"
#include "comm.hpp"
#include "cuda/kernels/serial.hpp"
#include "direct.hpp"
#include "memory.hpp"
#include "streams.hpp"

namespace fusedpg::fake {

using namespace cuda; // NOLINT: the launch arguments' names

namespace {

constexpr int kNoDevice = 100;
constexpr int kRuntimeVersion = 12080;

const char* error_string(int error) {
  switch (error) {
    case kSuccess:
      return "no error";
    case kInvalidValue:
      return "invalid argument";
    case kOutOfMemory:
      return "out of memory";
    case kNoDevice:
      return "no CUDA-capable device is detected";
    case kInvalidDevice:
      return "invalid device ordinal";
    case kInvalidHandle:
      return "invalid resource handle";
    case kNotReady:
      return "device not ready";
    case kCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case kCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case kCaptureMerge:
      return "operation would result in a merge of separate capture sequences";
    case kCaptureUnmatched:
      return "capture was not ended in the same stream as it began";
    case kCaptureUnjoined:
      return "capturing stream has unjoined work";
    case kCaptureIsolation:
      return "dependency created on uncaptured work in another stream";
    case kCapturedEvent:
      return "operation not permitted on an event last recorded in a capturing "
             "stream";
    case kUnknownError:
      return "unknown error";
    case kCaptureWrongThread:
      return "attempt to terminate a thread-local capture sequence from "
             "another "
             "thread";
    default:
      return "unrecognized error code";
  }
}

// Counts the call, makes its fault, or calls `body`.
template <typename Body>
int faulty(const char* function, Body&& body) {
  const int fault = calls().enter(function);
  return fault != 0 ? fault : body();
}

template <typename Args>
int kernel(
    const char* name,
    void (*body)(const Args&),
    const Args* args,
    Stream stream) {
  return faulty(name, [&] {
    return streams().enqueue(
        stream, [body, copied = *args] { body(copied); }, current_device());
  });
}

int get_device_count(int* count) {
  return faulty("device_count", [&] {
    *count = device_count();
    return *count == 0 ? kNoDevice : kSuccess;
  });
}

int set_device(int device) {
  return faulty("set_device", [&] {
    if (device < 0 || device >= device_count()) {
      return kInvalidDevice;
    }
    current_device() = device;
    return kSuccess;
  });
}

int copy(void* dst, const void* src, size_t bytes, Stream stream) {
  return faulty("copy", [&] {
    return streams().enqueue(stream, [=] { std::memmove(dst, src, bytes); });
  });
}

int clear(void* block, size_t bytes, Stream stream) {
  return faulty("clear", [&] {
    return streams().enqueue(stream, [=] { std::memset(block, 0, bytes); });
  });
}

struct Table : CudaApi {
  Table() : CudaApi{} {
    version = kCudaApiVersion;
    bytes = sizeof(CudaApi);
    name = "fake";
    runtime_version = kRuntimeVersion;
    CudaApi::error_string = fake::error_string;
    CudaApi::device_count = get_device_count;
    get_device = [](int* device) {
      return faulty("get_device", [&] {
        *device = current_device();
        return kSuccess;
      });
    };
    CudaApi::set_device = fake::set_device;
    fill_streams();
    fill_memory();
    fill_kernels();
    if (from_environment("FUSEDPG_FAKE_NO_DIRECT", 0) == 0) {
      fill_direct();
    }
  }

  void fill_streams() {
    stream_create = [](Stream* stream) {
      return faulty("stream_create", [&] { return streams().create(stream); });
    };
    stream_destroy = [](Stream stream) {
      return faulty(
          "stream_destroy", [&] { return streams().destroy(stream); });
    };
    stream_synchronize = [](Stream stream) {
      return faulty(
          "stream_synchronize", [&] { return streams().synchronize(stream); });
    };
    stream_wait_event = [](Stream stream, Event event) {
      return faulty(
          "stream_wait_event", [&] { return streams().wait(stream, event); });
    };
    stream_is_capturing = [](Stream stream, int* capturing) {
      return faulty("stream_is_capturing", [&] {
        return streams().is_capturing(stream, capturing);
      });
    };
    event_create = [](Event* event) {
      return faulty(
          "event_create", [&] { return streams().create_event(event); });
    };
    event_destroy = [](Event event) {
      return faulty(
          "event_destroy", [&] { return streams().destroy_event(event); });
    };
    event_record = [](Event event, Stream stream) {
      return faulty(
          "event_record", [&] { return streams().record(event, stream); });
    };
    event_query = [](Event event) {
      return faulty("event_query", [&] { return streams().query(event); });
    };
  }

  void fill_memory() {
    allocate = [](void** out, size_t size) {
      return faulty("allocate", [&] { return memory().allocate(out, size); });
    };
    release = [](void* block) {
      return faulty("release", [&] { return memory().release(block); });
    };
    host_allocate = [](void** out, size_t size) {
      return faulty(
          "host_allocate", [&] { return memory().host_allocate(out, size); });
    };
    host_release = [](void* block) {
      return faulty(
          "host_release", [&] { return memory().host_release(block); });
    };
    CudaApi::copy = fake::copy;
    CudaApi::clear = fake::clear;
  }

  void fill_kernels() {
    propose = [](const ProposeArgs* args, Stream stream) {
      return kernel("propose", serial::propose, args, stream);
    };
    prepare = [](const PrepareArgs* args, Stream stream) {
      return kernel("prepare", serial::prepare, args, stream);
    };
    pack = [](const PackArgs* args, Stream stream) {
      return kernel("pack", serial::pack, args, stream);
    };
    unpack = [](const UnpackArgs* args, Stream stream) {
      return kernel("unpack", serial::unpack, args, stream);
    };
    update = [](const UpdateArgs* args, Stream stream) {
      return kernel("update", serial::update, args, stream);
    };
    lamb_moments = [](const MomentsArgs* args, Stream stream) {
      return kernel("lamb_moments", serial::lamb_moments, args, stream);
    };
    add_sums = [](const AddSumsArgs* args, Stream stream) {
      return kernel("add_sums", serial::add_sums, args, stream);
    };
    trust = [](const TrustArgs* args, Stream stream) {
      return kernel("trust", serial::trust, args, stream);
    };
    CudaApi::find_blocks = [](const FindBlocksArgs* args, Stream stream) {
      return kernel("find_blocks", serial::find_blocks, args, stream);
    };
    CudaApi::list_blocks = [](const ListBlocksArgs* args, Stream stream) {
      return kernel("list_blocks", serial::list_blocks, args, stream);
    };
    CudaApi::move_blocks = [](const MoveBlocksArgs* args, Stream stream) {
      return kernel("move_blocks", serial::move_blocks, args, stream);
    };
  }

  void fill_direct() {
    direct_nccl_version = direct_version();
    CudaApi::direct_create =
        [](const DirectCreateArgs* args, void** context, int* usable) {
          return faulty("direct_create", [&] {
            return fake::direct_create(args, context, usable);
          });
        };
    CudaApi::direct_destroy = [](void* context) {
      return faulty(
          "direct_destroy", [&] { return fake::direct_destroy(context); });
    };
    CudaApi::direct_step = [](const DirectArgs* args, Stream stream) {
      return faulty(
          "direct_step", [&] { return fake::direct_step(args, stream); });
    };
    CudaApi::direct_sum = [](const DirectSumArgs* args, Stream stream) {
      return faulty(
          "direct_sum", [&] { return fake::direct_sum(args, stream); });
    };
  }
};

} // namespace

FUSEDPG_FAKE_EXPORT const CudaApi* fusedpg_cuda_api() {
  return &global<Table>();
}

FUSEDPG_FAKE_EXPORT void fusedpg_fake_stats(Stats* stats) {
  *stats = Stats{};
  streams().fill(*stats);
  memory().fill(*stats);
  stats->communicators = comms().size();
  stats->windows = alive().windows;
  stats->direct_contexts = alive().direct_contexts;
  calls().fill(*stats);
}

FUSEDPG_FAKE_EXPORT uint64_t fusedpg_fake_reset() {
  streams().reset();
  Stats s{};
  fusedpg_fake_stats(&s);
  calls().reset(); // after stats, which look at freed memory
  return s.device_allocations + s.host_allocations + s.nccl_allocations +
      s.streams + s.events + s.graphs + s.communicators + s.windows +
      s.direct_contexts;
}

} // namespace fusedpg::fake
