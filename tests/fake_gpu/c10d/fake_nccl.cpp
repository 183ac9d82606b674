// A Python module that gives torch a CUDA device on the fake GPU, and stands
// for ProcessGroupNCCL in a group of one rank: what is enqueued where, and who
// waits for it, is as there. Kernels only copy.

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <deque>
#include <thread>

#include "hooks.hpp"

namespace fusedpg::fake {
namespace {

std::unique_ptr<Hooks> loaded;

const cuda::CudaApi& gpu() {
  return *loaded->cuda;
}
void check(int error) {
  TORCH_CHECK(error == 0, "CUDA error: ", gpu().error_string(error));
}

// --- torch's streams and events ----------------------------------------------

c10::Stream stream_of(c10::Device device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, device, id);
}
void* handle(const c10::Stream& stream) {
  return reinterpret_cast<void*>(stream.id());
}
thread_local std::map<c10::DeviceIndex, int64_t> current;

struct OnDevice {
  explicit OnDevice(int device) {
    check(gpu().get_device(&before));
    check(gpu().set_device(device));
  }
  ~OnDevice() {
    gpu().set_device(before);
  }
  OnDevice(const OnDevice&) = delete;
  int before = 0;
};

int64_t new_stream(int device) {
  const OnDevice scope(device);
  void* made = nullptr;
  check(gpu().stream_create(&made));
  return reinterpret_cast<int64_t>(made);
}

// As c10::cuda's, which move to the stream's device themselves.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return c10::kCUDA;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    int device = 0;
    check(gpu().get_device(&device));
    return {c10::kCUDA, static_cast<c10::DeviceIndex>(device)};
  }
  void setDevice(c10::Device device) const override {
    check(gpu().set_device(device.index()));
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    gpu().set_device(device.index());
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream_of(device, current[device.index()]);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(
        stream.device(),
        std::exchange(current[stream.device_index()], stream.id()));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    static std::map<c10::DeviceIndex, std::deque<int64_t>> pools;
    auto& pool = pools[device.index()];
    if (pool.size() < 8) {
      pool.push_front(new_stream(device.index()));
    }
    pool.push_back(pool.front());
    pool.pop_front();
    return stream_of(device, pool.back());
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return handle(stream);
  }
  void record(
      void** event,
      const c10::Stream& stream,
      const c10::DeviceIndex,
      const c10::EventFlag) const override {
    const OnDevice scope(stream.device_index());
    if (*event == nullptr) {
      check(gpu().event_create(event));
    }
    check(gpu().event_record(*event, handle(stream)));
  }
  void block(void* event, const c10::Stream& stream) const override {
    const OnDevice scope(stream.device_index());
    check(gpu().stream_wait_event(handle(stream), event));
  }
  bool queryEvent(void* event) const override {
    const int state = gpu().event_query(event);
    check(state == cuda::kNotReady ? 0 : state);
    return state == 0;
  }
  void destroyEvent(void* event, const c10::DeviceIndex)
      const noexcept override {
    if (event != nullptr) {
      gpu().event_destroy(event);
    }
  }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    uint64_t id = 0;
    check(gpu().stream_capture(handle(stream), &id));
    return id != 0;
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    loaded->synchronize();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 8;
  }
};

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getStream(device);
}
void link(const c10::Stream& from, const c10::Stream& to) {
  c10::Event event(c10::kCUDA);
  event.record(from);
  event.block(to);
}

at::Tensor empty(
    c10::IntArrayRef sizes,
    std::optional<at::ScalarType> type,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat>) {
  const auto options =
      at::TensorOptions().dtype(type).device(device.value_or(c10::kCUDA));
  const auto at = options.device().has_index() ? options.device()
                                               : c10::Device(c10::kCUDA, 0);
  void* memory = nullptr;
  check(
      gpu().allocate(
          &memory,
          static_cast<size_t>(c10::multiply_integers(sizes)) *
                  options.dtype().itemsize() +
              1));
  return at::for_blob(memory, sizes)
      .deleter([](void* ending) { gpu().release(ending); })
      .options(options.device(at))
      .target_device(at)
      .make_tensor();
}

// --- ProcessGroupNCCL --------------------------------------------------------

class Work : public c10d::Work {
 public:
  using c10d::Work::Work;
  bool isCompleted() override {
    return end.query();
  }
  bool wait(std::chrono::milliseconds) override {
    end.block(current_stream(device));
    stash.clear(); // the allocator may give their memory away
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future;
  }

  c10::Device device{c10::kCUDA, 0};
  c10::Event end{c10::kCUDA};
  c10::intrusive_ptr<c10::ivalue::Future> future; // null of what is coalesced
  std::vector<at::Tensor> stash;
};

// A thread's ncclGroupStart and ncclGroupEnd.
thread_local int depth = 0;
thread_local std::vector<std::function<void()>> held_back;

class FakeNccl : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Result = c10::intrusive_ptr<c10d::Work>;

  FakeNccl() : Backend(0, 1) {}

  bool supportsCoalescing() const override {
    return true;
  }
  void startCoalescing() override {
    coalescing_ = true;
    coalesced_ = nullptr;
    ++depth;
  }
  Result endCoalescing() override {
    TORCH_CHECK(depth > 0, "NCCL error: invalid usage: ncclGroupEnd");
    if (--depth == 0) {
      for (const auto& launch : std::exchange(held_back, {})) {
        launch();
      }
    }
    coalescing_ = false;
    if (coalesced_ && async_) {
      coalesced_->end.record(*stream_);
      return coalesced_;
    }
    return nullptr;
  }

  Result _allgather_base(
      at::Tensor& to,
      at::Tensor& from,
      const c10d::AllgatherOptions& options) override {
    TORCH_CHECK_VALUE(to.nbytes() == from.nbytes(), "sizes differ");
    return call(to, from, options.asyncOp);
  }
  Result send(Tensors& tensors, int, int) override {
    return point_to_point("send", mailbox_, tensors[0]);
  }
  Result recv(Tensors& tensors, int, int) override {
    return point_to_point("recv", tensors[0], mailbox_);
  }
  void setSequenceNumberForGroup() override {}

 private:
  Result point_to_point(const char* name, at::Tensor to, at::Tensor from) {
    TORCH_CHECK(coalescing_, name, " with this rank hangs outside a group");
    if (!to.defined()) {
      to = mailbox_ = at::empty(from.sizes(), from.options());
    }
    call(to, from.defined() ? from : mailbox_, true);
    return nullptr;
  }
  Result call(const at::Tensor& to, const at::Tensor& from, bool async) {
    const c10::Device device = to.device();
    if (!stream_) {
      stream_ = stream_of(device, new_stream(device.index()));
    }
    const c10::Stream now = current_stream(device);
    const c10::Stream stream = async ? *stream_ : now;
    if (async) {
      link(now, stream);
    }
    const auto launch = [=, this] {
      const bool captured =
          c10::impl::VirtualGuardImpl(c10::kCUDA).isStreamCapturing(stream);
      if (!captured) {
        last_.block(stream); // a communicator's operations have an order
      }
      const OnDevice scope(device.index());
      // It takes its time, or who does not wait could be lucky.
      check(loaded->sleep(handle(stream), 3));
      check(
          gpu().copy(
              to.data_ptr(), from.data_ptr(), from.nbytes(), handle(stream)));
      if (!captured) {
        last_.record(stream);
      }
    };
    if (depth > 0) {
      held_back.push_back(launch);
    } else {
      launch();
    }
    auto work = c10::make_intrusive<Work>();
    work->device = device;
    if (coalescing_) {
      async_ = async;
      coalesced_ = coalesced_ ? coalesced_ : c10::make_intrusive<Work>();
      coalesced_->device = device;
      coalesced_->stash.insert(coalesced_->stash.end(), {to, from});
    } else {
      work->end.record(stream);
      work->stash = {to, from};
    }
    const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
    guard.exchangeStream(stream);
    work->future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()),
        std::vector<c10::Device>{device});
    work->future->markCompleted(c10::IValue(Tensors{to}));
    guard.exchangeStream(now);
    return async ? Result(work) : Result();
  }

  std::optional<c10::Stream> stream_;
  c10::Event last_{c10::kCUDA};
  bool coalescing_ = false;
  bool async_ = false;
  c10::intrusive_ptr<Work> coalesced_;
  at::Tensor mailbox_;
};

// --- what tests do -----------------------------------------------------------

// Work on a stream that lasts until release().
struct Hold {
  explicit Hold(int64_t stream) {
    check(loaded->hold(reinterpret_cast<void*>(stream), &go));
  }
  std::atomic<bool> go{false};
};

} // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
}

PYBIND11_MODULE(fusedpg_fake_nccl, m) {
  m.def("load", [](const char* path) {
    loaded = std::make_unique<Hooks>(path);
    c10::impl::registerDeviceGuard(c10::kCUDA, new Guard);
  });
  py::class_<FakeNccl, c10d::Backend, c10::intrusive_ptr<FakeNccl>>(
      m, "FakeNccl")
      .def(py::init<>());
  py::class_<Hold, std::shared_ptr<Hold>>(m, "Hold")
      .def(py::init<int64_t>())
      .def("release", [](Hold& hold) { hold.go = true; });
  m.def("tensor", [](const at::Tensor& values, int device) {
    const at::Tensor made = at::empty(
        values.sizes(),
        values.options().device(
            c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
    std::memcpy(made.data_ptr(), values.data_ptr(), values.nbytes());
    return made;
  });
  m.def("host", [](const at::Tensor& t) {
    return at::from_blob(
        t.data_ptr(), t.sizes(), [t](void*) {}, t.options().device(c10::kCPU));
  });
  m.def("new_stream", &new_stream);
  m.def("set_device", [](int device) { check(gpu().set_device(device)); });
  m.def("set_stream", [](int device, int64_t stream) {
    return std::exchange(
        current[static_cast<c10::DeviceIndex>(device)], stream);
  });
  m.def("copy", [](const at::Tensor& to, const at::Tensor& from) {
    check(
        gpu().copy(
            to.data_ptr(),
            from.data_ptr(),
            from.nbytes(),
            handle(current_stream(to.device()))));
  });
  m.def(
      "synchronize",
      [](int64_t stream) {
        check(gpu().stream_synchronize(reinterpret_cast<void*>(stream)));
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("set_delay", [](int microseconds) { loaded->set_delay(microseconds); });
  m.def("begin_capture", [](int64_t stream, int mode) {
    check(loaded->begin_capture(reinterpret_cast<void*>(stream), mode));
  });
  m.def("end_capture", [](int64_t stream) {
    void* graph = nullptr;
    check(loaded->end_capture(reinterpret_cast<void*>(stream), &graph));
    return reinterpret_cast<int64_t>(graph);
  });
  m.def("launch", [](int64_t graph, int64_t stream) {
    check(loaded->launch(
        reinterpret_cast<void*>(graph), reinterpret_cast<void*>(stream)));
  });
  m.def("destroy_graph", [](int64_t graph) {
    check(loaded->destroy_graph(reinterpret_cast<void*>(graph)));
  });
  m.def("bad_handles", [] { return loaded->now().bad_handles; });
}

} // namespace fusedpg::fake
