#include <functional>

#include "base/call.hpp"
#include "base/program_call.hpp"
#include "check.hpp"

namespace {

using namespace fusedpg;

// Every change makes ranks disagree, and GPUs, which compare the hash alone, too.
template <typename Call, typename Facts>
void check_all_differ(
    const Call& call,
    const std::vector<std::function<void(Call&)>>& changes,
    const Facts& facts_of) {
  const OpDescriptor mine = facts_of(call);
  CHECK_EQ(difference(mine, facts_of(call)), std::string());
  for (size_t i = 0; i < changes.size(); ++i) {
    Call other = call;
    changes[i](other);
    const OpDescriptor theirs = facts_of(other);
    if (difference(mine, theirs).empty() || hash_of(mine) == hash_of(theirs)) {
      fusedpg::test::report_failure(
          __FILE__, __LINE__, "change " + std::to_string(i) + " is not seen");
    }
  }
}

template <typename Call>
OpDescriptor facts_of(const Call& call) {
  return facts(call);
}

} // namespace

TEST(calls_of_steps_differ_in_each_fact) {
  static float steps[] = {1, 2};
  static float scales[] = {1, 2};
  static uint8_t used = 1;
  StepCall call;
  call.tensors = {{}, {}};
  call.tensors[0].count = call.tensors[1].count = 100;
  call.tensors[0].step = call.tensors[1].step = &steps[0];
  call.hypers = {{}, {}};
  call.grad_scale = &scales[0];
  using Changes = std::vector<std::function<void(StepCall&)>>;
  // What a device keeps to itself is not among the facts.
  const Changes on_host{
      [](StepCall& c) { c.tensors[1].step = &steps[1]; },
      [](StepCall& c) { c.grad_scale = &scales[1]; }};
  const Changes anywhere{
      [](StepCall& c) { c.op = OpCode::kFusedAdam; },
      [](StepCall& c) { c.param_type = DType::kBFloat16; },
      [](StepCall& c) { c.grad_type = DType::kBFloat16; },
      [](StepCall& c) { c.state_type = DType::kBFloat16; },
      [](StepCall& c) { c.tensors.pop_back(); },
      [](StepCall& c) { c.tensors[1].count = 99; },
      [](StepCall& c) {
        c.tensors[0].count = 99;
        c.tensors[1].count = 101;
      },
      [](StepCall& c) { c.tensors[1].layout_hash = 1; },
      [](StepCall& c) { c.tensors[1].hyper = 1; },
      [](StepCall& c) { c.hypers[1].lr = 1; },
      [](StepCall& c) { c.hypers[1].beta1 = 1; },
      [](StepCall& c) { c.hypers[1].beta2 = 1; },
      [](StepCall& c) { c.hypers[1].eps = 1; },
      [](StepCall& c) { c.hypers[1].weight_decay = 1; },
      [](StepCall& c) { c.hypers[1].momentum = 1; },
      [](StepCall& c) { c.hypers[1].dampening = 1; },
      [](StepCall& c) { c.hypers[1].nesterov = true; },
      [](StepCall& c) { c.hypers[1].first_step = true; },
      [](StepCall& c) { c.hypers[1].decoupled = false; },
      [](StepCall& c) { c.hypers[1].amsgrad = true; },
      [](StepCall& c) { c.hypers[1].maximize = true; },
      [](StepCall& c) { c.hypers[1].trust_clip = true; },
      [](StepCall& c) { c.hypers[1].always_adapt = true; },
      [](StepCall& c) { c.reduction.mean = false; },
      [](StepCall& c) { c.reduction.weight = 1; },
      [](StepCall& c) { c.has_masters = true; },
      [](StepCall& c) { c.follow = true; },
      [](StepCall& c) { c.reduced = true; },
      [](StepCall& c) { c.shared_params = true; },
      [](StepCall& c) { c.skip_block = 64; },
      [](StepCall& c) { c.used = &used; },
      [](StepCall& c) { c.call_hash = 1; }};
  for (const bool on_device : {false, true}) {
    const auto facts_there = [&](const StepCall& c) {
      return facts(c, on_device);
    };
    check_all_differ(call, anywhere, facts_there);
    if (!on_device) {
      check_all_differ(call, on_host, facts_there);
    }
  }
}

TEST(calls_of_sums_differ_in_each_fact) {
  static uint8_t used = 1;
  static const std::vector<Buffer> two{{nullptr, 3}, {nullptr, 5}};
  static const std::vector<Buffer> swapped{{nullptr, 5}, {nullptr, 3}};
  static const Buffer joined{nullptr, 8};
  Call sum{.op = OpCode::kAllReduce, .inputs = two, .skip = SkipOptions{0}};
  check_all_differ<Call>(
      sum,
      {[](Call& c) { c.op = OpCode::kReduce; },
       [](Call& c) { c.dtype = DType::kInt32; },
       [](Call& c) { c.red_op = RedOp::kMax; },
       [](Call& c) { c.factor = 2; },
       [](Call& c) { c.root = 0; },
       [](Call& c) { c.inputs = single(joined); },
       [](Call& c) { c.inputs = swapped; },
       [](Call& c) { c.skip->block = 64; },
       [](Call& c) { c.skip->threshold = 1; },
       [](Call& c) { c.skip->may_go_dense = true; }},
      facts_of<Call>);
  for (const OpCode op :
       {OpCode::kBroadcast,
        OpCode::kAllGather,
        OpCode::kGather,
        OpCode::kScatter}) {
    const bool out = op == OpCode::kAllGather || op == OpCode::kScatter;
    static const Buffer other{nullptr, 7};
    Call move{.op = op};
    (out ? move.outputs : move.inputs) = single(joined);
    check_all_differ<Call>(
        move,
        {[](Call& c) { c.op = OpCode::kAllToAll; },
         [](Call& c) { c.dtype = DType::kInt32; },
         [](Call& c) { c.root = 1; },
         [out](Call& c) { (out ? c.outputs : c.inputs) = single(other); }},
        facts_of<Call>);
  }
  ShardsCall shards;
  shards.counts = {3, 5};
  check_all_differ<ShardsCall>(
      shards,
      {[](ShardsCall& c) { c.dtype = DType::kFloat64; },
       [](ShardsCall& c) { c.counts = {5, 3}; },
       [](ShardsCall& c) { c.layout_hash = 1; },
       [](ShardsCall& c) { c.reduction.mean = false; },
       [](ShardsCall& c) { c.reduction.weight = 1; },
       [](ShardsCall& c) { c.used = &used; }},
      facts_of<ShardsCall>);
}

TEST(calls_of_programs_differ_in_each_fact) {
  static float missing = 0;
  ProgramCall program;
  program.numbers = {1};
  program.seeds = {1};
  check_all_differ<ProgramCall>(
      program,
      {[](ProgramCall& c) { c.program = 1; },
       [](ProgramCall& c) { c.dtype = DType::kFloat64; },
       [](ProgramCall& c) { c.op = RedOp::kMax; },
       [](ProgramCall& c) { c.count = 1; },
       [](ProgramCall& c) { c.first = 1; },
       [](ProgramCall& c) { c.runs = 1; },
       [](ProgramCall& c) { c.spacing = 1; },
       [](ProgramCall& c) { c.row = 2; },
       [](ProgramCall& c) { c.sums = {{RedOp::kSum}}; },
       [](ProgramCall& c) { c.sums = {{RedOp::kMax}}; },
       [](ProgramCall& c) { c.numbers = {2}; },
       [](ProgramCall& c) { c.seeds = {2}; },
       [](ProgramCall& c) { c.missing = &missing; }},
      facts_of<ProgramCall>);
}

TEST(calls_take_what_their_function_reads) {
  ProgramCall call;
  call.inputs = {{nullptr, 4, ProgramCall::Operand::kAsIs, 3, 3}};
  CHECK(misfit(call).empty());
  for (const size_t count : {2, 4}) {
    call.inputs[0].count = count;
    CHECK(!misfit(call).empty());
  }
  const ProgramCall::Output of_rows{nullptr, 8, true, false, true};
  const ProgramCall::Output own{nullptr, 8, false, false, false};
  CHECK_EQ(place(of_rows, 12, 4, 4), size_t{24});
  CHECK_EQ(place(own, 12, 4, 4), size_t{64});
}

TEST(descriptors_differ_where_ranks_must_not) {
  const OpDescriptor mine;
  const std::vector<std::function<void(OpDescriptor&)>> changes{
      [](OpDescriptor& d) { d.sequence = 1; },
      [](OpDescriptor& d) { d.list_index = 1; },
      [](OpDescriptor& d) { d.list_length = 2; },
      [](OpDescriptor& d) { d.async_call = 1; },
      [](OpDescriptor& d) { d.items = 2; },
      [](OpDescriptor& d) { d.path = GpuPath::kDirect; }};
  for (const auto& change : changes) {
    OpDescriptor theirs;
    change(theirs);
    CHECK(!difference(mine, theirs).empty());
  }
  OpDescriptor theirs;
  theirs.flags = kHasNan;
  theirs.table_entries = 1;
  theirs.weight = 2;
  CHECK(difference(mine, theirs).empty());
}
