// A Python module that gives torch a CUDA device on the fake GPU, and stands
// for ProcessGroupNCCL: what is enqueued where, and who waits for it, is as
// there. Its communicators are the fake's, between processes.

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/as_strided_native.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <array>
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
  const auto bytes = static_cast<size_t>(c10::multiply_integers(sizes)) *
      options.dtype().itemsize();
  void* memory = nullptr;
  int error = 0;
  if (bytes != 0) { // torch's allocator takes nothing for none
    // torch's cudaMalloc has no leave of its own while a graph is captured.
    error = loaded->unsafe();
    if (error == 0) {
      error = gpu().allocate(&memory, bytes + 1);
    }
  }
  if (error == cuda::kNoMemory) {
    C10_THROW_ERROR(OutOfMemoryError, "CUDA out of memory");
  }
  check(error);
  return at::for_blob(memory, sizes)
      .deleter([](void* ending) {
        if (ending != nullptr) {
          gpu().release(ending);
        }
      })
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

DType type_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kByte:
      return DType::kUInt8;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kInt:
      return DType::kInt32;
    case at::kLong:
      return DType::kInt64;
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    default:
      TORCH_CHECK(false, "a type that no test uses");
  }
}

// Both have the same numbers.
RedOp operation_of(const c10d::ReduceOp& op) {
  return static_cast<RedOp>(static_cast<uint8_t>(op.op_));
}

// A thread's ncclGroupStart and ncclGroupEnd. What is sent to one rank and
// received from it in a group runs at once: here in an order, {lower rank,
// higher rank, sender}, that is the same on both.
struct HeldBack {
  std::array<int, 3> order;
  std::function<void()> launch;
};
thread_local int depth = 0;
thread_local std::vector<HeldBack> held_back;

class FakeNccl : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Result = c10::intrusive_ptr<c10d::Work>;

  FakeNccl(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : Backend(rank, size),
        store_(std::move(store)) {}
  ~FakeNccl() override {
    try {
      abort();
    } catch (const std::exception&) {
    }
  }

  const std::string getBackendName() const override {
    return "nccl";
  }
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
      auto group = std::exchange(held_back, {});
      std::stable_sort(
          group.begin(), group.end(), [](const auto& a, const auto& b) {
            return a.order < b.order;
          });
      for (const HeldBack& held : group) {
        held.launch();
      }
    }
    coalescing_ = false;
    if (coalesced_ && async_) {
      coalesced_->end.record(*stream_);
      return coalesced_;
    }
    return nullptr;
  }

  Result allreduce(Tensors& tensors, const c10d::AllreduceOptions& options)
      override {
    const at::Tensor& t = tensors[0];
    return call(kAllReduce, t, t, t.numel(), options.asyncOp, options.reduceOp);
  }
  Result broadcast(Tensors& tensors, const c10d::BroadcastOptions& options)
      override {
    const at::Tensor& t = tensors[0];
    const auto root = static_cast<int>(options.rootRank);
    return call(kBroadcast, t, t, t.numel(), options.asyncOp, {}, root);
  }
  Result _allgather_base(
      at::Tensor& to,
      at::Tensor& from,
      const c10d::AllgatherOptions& options) override {
    TORCH_CHECK_VALUE(
        to.numel() == from.numel() * getSize(), "sizes do not fit");
    return call(kAllGather, to, from, from.numel(), options.asyncOp);
  }
  Result _reduce_scatter_base(
      at::Tensor& to,
      at::Tensor& from,
      const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK_VALUE(
        from.numel() == to.numel() * getSize(), "sizes do not fit");
    return call(
        kReduceScatter,
        to,
        from,
        to.numel(),
        options.asyncOp,
        options.reduceOp);
  }
  Result alltoall_base(
      at::Tensor& to,
      at::Tensor& from,
      std::vector<int64_t>& /* to_sizes */,
      std::vector<int64_t>& /* from_sizes */,
      const c10d::AllToAllOptions& options) override {
    return call(kAllToAll, to, from, from.numel() / getSize(), options.asyncOp);
  }
  Result send(Tensors& tensors, int peer, int) override {
    return point_to_point(tensors[0], peer, getRank());
  }
  Result recv(Tensors& tensors, int peer, int) override {
    return point_to_point(tensors[0], peer, peer);
  }
  void setSequenceNumberForGroup() override {}
  // As its Python class gives it: null before the first collective.
  int64_t communicator() const {
    return reinterpret_cast<int64_t>(group_);
  }

  void abort() override {
    for (const cuda::NcclComm comm : std::exchange(comms_, {})) {
      loaded->check("ncclCommAbort", loaded->disconnect(comm, true));
    }
  }
  void shutdown() override {
    for (const cuda::NcclComm comm : std::exchange(comms_, {})) {
      loaded->check("ncclCommDestroy", loaded->disconnect(comm, false));
    }
  }

 private:
  using Launch = std::function<cuda::NcclResult(cuda::NcclComm, cuda::Stream)>;

  cuda::NcclComm connect(const std::string& key, int rank, int size) {
    CommId id{};
    const auto* bytes = reinterpret_cast<const uint8_t*>(&id);
    if (rank == 0) {
      loaded->check("ncclGetUniqueId", loaded->make_id(&id));
      store_->set(key, std::vector<uint8_t>(bytes, bytes + sizeof id));
    } else {
      std::memcpy(&id, store_->get(key).data(), sizeof id);
    }
    cuda::NcclComm made = nullptr;
    loaded->check(
        "ncclCommInitRankConfig", loaded->connect(&made, &id, rank, size));
    comms_.push_back(made);
    return made;
  }
  // The first call of a group connects all ranks: also in pairs, which the
  // real one does when they first need it.
  void connect(const c10::Device& device) {
    if (stream_) {
      return;
    }
    const OnDevice scope(device.index());
    stream_ = stream_of(device, new_stream(device.index()));
    group_ = connect("all", getRank(), getSize());
    for (int low = 0; low < getSize(); ++low) {
      for (int high = low + 1; high < getSize(); ++high) {
        if (low == getRank() || high == getRank()) {
          const std::string key = c10::str(low, ":", high);
          pairs_[low == getRank() ? high : low] =
              connect(key, high == getRank(), 2);
        }
      }
    }
  }

  // `count` elements of each rank.
  Result call(
      Op op,
      const at::Tensor& to,
      const at::Tensor& from,
      int64_t count,
      bool async,
      const c10d::ReduceOp& reduction = {},
      int root = 0) {
    const Collective c{
        op,
        from.data_ptr(),
        to.data_ptr(),
        static_cast<size_t>(count),
        type_of(to),
        operation_of(reduction),
        root};
    const auto launch = [c](auto comm, auto stream) {
      return loaded->collective(comm, &c, stream);
    };
    return call(nccl_name(op), to, from, async, launch);
  }

  Result point_to_point(const at::Tensor& t, int peer, int sender) {
    TORCH_CHECK(coalescing_, "no test sends outside of a group");
    if (peer != getRank()) {
      const int root = sender == std::min(peer, getRank()) ? 0 : 1;
      void* data = t.data_ptr();
      const Collective c{
          kBroadcast, data, data, t.nbytes(), DType::kUInt8, {}, root};
      const auto launch = [c](auto comm, auto stream) {
        return loaded->collective(comm, &c, stream);
      };
      return call("ncclSend", t, t, true, launch, peer, sender);
    }
    if (sender == getRank() && !mailbox_.defined()) {
      mailbox_ = t; // sent before it is received, in tests
      return nullptr;
    }
    const at::Tensor from = std::exchange(mailbox_, {});
    return call("copy", t, from, true, [=](auto, auto stream) {
      check(gpu().copy(t.data_ptr(), from.data_ptr(), t.nbytes(), stream));
      return cuda::kNcclSuccess;
    });
  }

  Result call(
      const char* what,
      const at::Tensor& to,
      const at::Tensor& from,
      bool async,
      const Launch& enqueue,
      int peer = -1,
      int sender = -1) {
    const c10::Device device = to.device();
    connect(device);
    const c10::Stream now = current_stream(device);
    const c10::Stream stream = async ? *stream_ : now;
    if (async) {
      link(now, stream);
    }
    const cuda::NcclComm comm = peer >= 0 ? pairs_.at(peer) : group_;
    const auto launch = [=, this] {
      const bool ordered =
          !c10::impl::VirtualGuardImpl(c10::kCUDA).isStreamCapturing(stream);
      if (ordered) {
        last_.block(stream); // a communicator's operations have an order
      }
      const OnDevice scope(device.index());
      // It takes its time, or who does not wait could be lucky.
      check(loaded->sleep(handle(stream), 3));
      loaded->check(what, enqueue(comm, handle(stream)));
      if (ordered) {
        last_.record(stream);
      }
    };
    if (depth > 0) {
      held_back.push_back(
          {{std::min(peer, getRank()), std::max(peer, getRank()), sender},
           launch});
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
    return async && peer < 0 ? Result(work) : Result();
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  std::vector<cuda::NcclComm> comms_;
  cuda::NcclComm group_ = nullptr;
  std::map<int, cuda::NcclComm> pairs_; // by the other rank
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
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
}

PYBIND11_MODULE(fusedpg_fake_nccl, m) {
  m.def("load", [](const char* path) {
    loaded = std::make_unique<Hooks>(path);
    c10::impl::registerDeviceGuard(c10::kCUDA, new Guard);
  });
  py::class_<FakeNccl, c10d::Backend, c10::intrusive_ptr<FakeNccl>>(
      m, "FakeNccl")
      .def(py::init<c10::intrusive_ptr<c10d::Store>, int, int>())
      .def("_comm_ptr", &FakeNccl::communicator);
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
  m.def(
      "fail",
      [](const char* what, int code, int nth) {
        loaded->fail(what, nth, code);
      },
      py::arg("what"),
      py::arg("code"),
      py::arg("nth") = 1);
  m.def("mismatches", [] { return loaded->now().mismatches; });
  m.def("bad_handles", [] { return loaded->now().bad_handles; });
  m.def("modules", [] { return loaded->now().modules; });
}

} // namespace fusedpg::fake
