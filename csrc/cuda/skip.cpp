// The all-reduce that skips blocks of zeros:
//
//   find:    compute: find_blocks      list_blocks -> host
//            wire:    agree     all-reduce(flags)
//   reduce:  compute: pack(0)     pack(1) unpack(0) ...
//            wire:        all-reduce(0) all-reduce(1)
//
// With the tensor in all ranks' arenas:
//
//   sum:     compute:                  direct_sum
//            wire:    agree offsets

#include <algorithm>
#include <thread>

#include "base/ownership.hpp"
#include "cuda/enqueuing.hpp"
#include "cuda/selector.hpp"

namespace fusedpg::cuda {

class SkipRun : Enqueuing {
 public:
  SkipRun(
      CudaEngine& engine,
      Operation& operation,
      const CudaEngine::SkipCall& call)
      : Enqueuing(engine, operation),
        call_(call),
        blocks_(call.blocks()) {}

  std::shared_ptr<Slot> find() {
    set_facts(GpuPath::kStock);
    const std::shared_ptr<Slot> slot = take_slot(lay_out_find());
    agree();
    FindBlocksArgs find{};
    find.tensor = tensor();
    find.num_blocks = blocks_;
    find.flags = device<uint8_t>(flags_);
    find.present = device<uint64_t>(present_);
    check(
        "cudaMemsetAsync",
        cuda_.clear(find.present, sizeof(uint64_t), compute_));
    check("find_blocks", cuda_.find_blocks(&find, compute_));
    if (!alone()) {
      order(compute_, e_.events_.packed[0], wire_);
      all_reduce(find.flags, blocks_, kNcclUint8, kNcclMax);
      order(wire_, e_.events_.reduced[0], compute_);
    }
    ListBlocksArgs list{};
    list.flags = find.flags;
    list.num_blocks = blocks_;
    list.list = device<uint32_t>(list_);
    list.present = find.present;
    list.found = host<uint64_t>(found_);
    check("list_blocks", cuda_.list_blocks(&list, compute_));
    return slot;
  }

  void reduce(std::shared_ptr<Slot> slot, uint64_t found) {
    lay_out_find();
    operation_.slot_ = std::move(slot);
    const size_t item = call_.block * dtype_size(call_.dtype);
    // By what all ranks know, and growing buffers waits for the GPU.
    const uint64_t items = std::max<uint64_t>(
        e_.chunk_bytes(call_.count * dtype_size(call_.dtype)) / item, 1);
    const uint64_t chunks = (found + items - 1) / items;
    CudaEngine::Needs needs;
    needs.grads = std::min<uint64_t>(items, blocks_) * item;
    acquire(needs);
    const CudaEngine::Events& ev = e_.events_;
    for (uint64_t t = 0; t < chunks + 1; ++t) {
      if (t < chunks) {
        move(t, items, found, true);
        order(compute_, ev.packed[t % 2], wire_);
        sum(e_.wire_.grads[t % 2].get(), call_.block * count(t, items, found));
        check(
            "cudaEventRecord",
            cuda_.event_record(ev.reduced[t % 2].get(), wire_));
      }
      if (t >= 1) {
        check(
            "cudaStreamWaitEvent",
            cuda_.stream_wait_event(compute_, ev.reduced[(t - 1) % 2].get()));
        move(t - 1, items, found, false);
      }
    }
  }

  std::shared_ptr<Slot> sum_directly() {
    Arrays arrays;
    found_ = arrays.add(kDirectBlocks * sizeof(DirectCounts));
    agree_ = arrays.add(kAgreeBytes);
    offset_ = arrays.add(sizeof(uint64_t));
    offsets_ = arrays.add(e_.size_ * sizeof(uint64_t));
    set_facts(GpuPath::kDirect);
    const std::shared_ptr<Slot> slot = take_slot(arrays);
    *host<uint64_t>(offset_) = static_cast<uint64_t>(
        static_cast<const char*>(call_.data) -
        static_cast<const char*>(e_.arena_));
    check(
        "cudaMemcpyAsync",
        cuda_.copy(
            device<char>(offset_),
            host<char>(offset_),
            sizeof(uint64_t),
            compute_));
    agree();
    gather(offset_, offsets_, 1, kNcclUint64);
    order(wire_, e_.events_.agreed, compute_);
    DirectSumArgs args{};
    args.tensor = tensor();
    args.num_blocks = blocks_;
    args.shard = static_cast<uint64_t>(
        shard_size(static_cast<int64_t>(call_.count), e_.size_));
    args.agree = device<uint8_t>(agree_);
    args.offsets = device<uint64_t>(offsets_);
    args.flags = e_.direct_flags();
    args.counts = host<DirectCounts>(found_);
    args.rank = e_.rank_;
    args.size = e_.size_;
    args.mean = call_.mean;
    args.signals = e_.signals();
    args.stop = &e_.flags_->stop;
    args.context = e_.direct_;
    check("direct_sum", cuda_.direct_sum(&args, compute_));
    return slot;
  }

  void reduce_all() {
    order(compute_, e_.events_.packed[0], wire_);
    sum(call_.data, call_.count);
    order(wire_, e_.events_.reduced[0], compute_);
  }

 private:
  TensorBlocks tensor() const {
    return {call_.data, call_.count, call_.block, call_.dtype};
  }

  // The same in both operations. First, where the host looks.
  Arrays lay_out_find() {
    Arrays arrays;
    found_ = arrays.add(2 * sizeof(uint64_t));
    present_ = arrays.add(sizeof(uint64_t));
    agree_ = arrays.add(kAgreeBytes);
    flags_ = arrays.add(blocks_);
    list_ = arrays.add(blocks_ * sizeof(uint32_t));
    return arrays;
  }

  // The caller keeps it: the operation gives its own up when it has ended.
  std::shared_ptr<Slot> take_slot(const Arrays& arrays) {
    CudaEngine::Needs needs;
    needs.slot = arrays.bytes();
    acquire(needs);
    return operation_.slot_;
  }

  void set_facts(GpuPath path) {
    OpDescriptor facts = call_.facts();
    facts.path = path;
    operation_.set_facts(facts);
  }

  void agree() {
    ProposeArgs propose{};
    propose.agree = device<uint8_t>(agree_);
    propose.hash = hash_of(operation_.facts());
    exchange(propose);
    if (!alone()) {
      report_mismatch(agree_);
    }
  }

  static uint64_t count(uint64_t t, uint64_t items, uint64_t found) {
    return std::min(items, found - t * items);
  }

  void move(uint64_t t, uint64_t items, uint64_t found, bool to_wire) {
    MoveBlocksArgs args{};
    args.tensor = tensor();
    args.list = device<uint32_t>(list_) + t * items;
    args.wire = e_.wire_.grads[t % 2].get();
    args.num_items = static_cast<uint32_t>(count(t, items, found));
    args.to_wire = to_wire;
    check("move_blocks", cuda_.move_blocks(&args, compute_));
  }

  void sum(void* data, size_t elements) {
    if (!alone()) {
      all_reduce(
          data,
          elements,
          nccl_type(call_.dtype),
          call_.mean ? kNcclAvg : kNcclSum);
    }
  }

  const CudaEngine::SkipCall& call_;
  const size_t blocks_;
  // Offsets in the slot.
  size_t agree_ = 0, found_ = 0, present_ = 0, flags_ = 0, list_ = 0,
         offset_ = 0, offsets_ = 0;
};

OpDescriptor CudaEngine::SkipCall::facts() const {
  return fusedpg::facts(
      SumCall{
          .op = OpCode::kSparseAllReduce,
          .dtype = dtype,
          .red_op = mean ? RedOp::kAvg : RedOp::kSum,
          .counts = {count},
          .block = block,
          .limit = limit});
}

CudaEngine::SkipFind CudaEngine::find_blocks(
    const SkipCall& call,
    const Submission& submission) {
  if (capturing(submission.current)) {
    fail(
        ErrorKind::kInvalid,
        "fused: sparse_all_reduce cannot be captured in a CUDA graph: what it "
        "sends depends on the data; use all_reduce there");
  }
  SkipFind found;
  found.operation =
      submit(call.facts(), "", submission, [&](Operation& operation) {
        found.slot = SkipRun(*this, operation, call).find();
      });
  return found;
}

bool CudaEngine::can_sum_directly(const SkipCall& call) const {
  if (call.count == 0) {
    return false;
  }
  return select_sum_path(
             {call.count,
              call.blocks(),
              in_arena(call.data, call.count * dtype_size(call.dtype)),
              direct_ != nullptr}) == GpuPath::kDirect;
}

CudaEngine::DirectSum CudaEngine::direct_sum(
    const SkipCall& call,
    const Submission& submission) {
  DirectSum sum;
  sum.operation = submit(
      call.facts(), " over the arenas", submission, [&](Operation& operation) {
        sum.slot = SkipRun(*this, operation, call).sum_directly();
      });
  return sum;
}

DirectCounts CudaEngine::counts_of(const DirectSum& sum) {
  await(*sum.operation);
  const auto* counts = static_cast<const DirectCounts*>(sum.slot->host.get());
  DirectCounts all{};
  for (uint32_t i = 0; i < kDirectBlocks; ++i) {
    all.blocks_union += counts[i].blocks_union;
    all.blocks_present += counts[i].blocks_present;
    all.sent += counts[i].sent;
    all.received += counts[i].received;
  }
  return all;
}

void CudaEngine::await(const Operation& operation) {
  const DeviceScope scope(cuda_, device_);
  if (operation.is_completed()) {
    check_failed();
  } else {
    await(operation.end_.get(), operation.sequence);
  }
}

void CudaEngine::await(Event event, uint64_t sequence) {
  // The watchdog sees what goes wrong.
  for (int looks = 0;; ++looks) {
    check_failed();
    const int state = cuda_.event_query(event);
    if (state == kSuccess) {
      break;
    }
    if (state != kNotReady) {
      check(cuda_, "cudaEventQuery", state);
    }
    if (looks > 100) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  // Unless ranks disagree, which the operation has said before it ended.
  while (__atomic_load_n(&flags_->mismatch, __ATOMIC_ACQUIRE) == sequence) {
    check_failed();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  check_failed();
}

CudaEngine::Found CudaEngine::found_blocks(const SkipFind& find) {
  await(*find.operation);
  const auto* found = static_cast<const uint64_t*>(find.slot->host.get());
  return {found[0], found[1]};
}

CudaEngine::OperationPtr CudaEngine::reduce_blocks(
    const SkipCall& call,
    const Submission& submission,
    const SkipFind& find,
    uint64_t found) {
  return submit(call.facts(), "", submission, [&](Operation& operation) {
    SkipRun(*this, operation, call).reduce(find.slot, found);
  });
}

CudaEngine::OperationPtr CudaEngine::reduce_all(
    const SkipCall& call,
    const Submission& submission) {
  return submit(call.facts(), "", submission, [&](Operation& operation) {
    SkipRun(*this, operation, call).reduce_all();
  });
}

} // namespace fusedpg::cuda
