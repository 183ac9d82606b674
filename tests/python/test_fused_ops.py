"""The functional steps: SGD, Adam, AdamW, LAMB."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

import fusedpg
import harness
from checks import fused_ops, optim_faults
from checks.cases import MEMORY, same
from checks.faults import works
from checks.fused_ops import BF16, FP16, FP32, FP64, OPS, OWN_RUNS, RUNS, Model, Run
from checks.optim_faults import OF_ADAM, WRONG
from fusedpg._registration import load_extension
from harness import Context, on_ranks


def direct(model: Model, group_name: str) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of torch.ops.fusedpg.*."""
    options = model.options()
    missing = {"sgd": (), "lamb": ("trust_clip", "always_adapt")}.get(model.run.op, ("amsgrad",))
    for flag in ("maximize", *missing):
        options.setdefault(flag, False)
    del options["async_op"]
    return [list(one) for one in model.lists()], options | {"group_name": group_name}


def packet(op: str, tensor_lr: bool = False) -> Any:
    found = getattr(torch.ops.fusedpg, f"fused_{op}_")
    return found.tensor_lr if tensor_lr else found.default


pytestmark = pytest.mark.fused_only

COMMON: dict[str, dict[str, Any]] = {
    **RUNS,
    "long": {"steps": 60},
    "arena": {"memory": "arena"},
    "mixed memory": {"memory": "mixed"},
    "channels_last arena": {"layout": "channels_last", "memory": "arena"},
    "transposed mixed": {"layout": "transposed", "memory": "mixed"},
    "no elements for some ranks": {"shapes": ((5,), (33,), (64,), (97,), (1,), (127,))},
    "fp64 arena": {"dtypes": (FP64,), "memory": "arena"},
    "fp32 with fp16 gradients": {"grad_dtypes": (FP16,), "memory": "mixed"},
    "masters channels_last": {"dtypes": (BF16,), "master": True, "layout": "channels_last"},
    "types mixed with others": {"dtypes": (FP32, BF16, FP32), "grad_dtypes": (BF16, FP32)},
    "weighted scaled": RUNS["weighted scaled"] | {"memory": "mixed"},
    "fp16": RUNS["fp16"] | {"memory": "arena"},
    "fp16 with masters": RUNS["fp16 with masters"] | {"memory": "mixed"},
    "types mixed": RUNS["types mixed"] | {"memory": "mixed"},
}
OWN: dict[str, dict[str, Any]] = {
    **OWN_RUNS,
    "sgd without momentum, bf16 with masters": {
        "op": "sgd",
        "hyper": (("momentum", 0.0),),
        "dtypes": (BF16,),
        "master": True,
    },
    "sgd nesterov async": {"op": "sgd", "hyper": (("nesterov", True),), "async_op": True},
    "adamw amsgrad": {"op": "adamw", "hyper": (("amsgrad", True),), "memory": "mixed"},
    "adamw very long": {"op": "adamw", "steps": 100},
    "adamw amsgrad long": {"op": "adamw", "hyper": (("amsgrad", True),), "steps": 100},
    "adamw amsgrad maximize": {"op": "adamw", "hyper": (("amsgrad", True), ("maximize", True))},
    "adamw amsgrad async": {"op": "adamw", "hyper": (("amsgrad", True),), "async_op": True},
    "lamb both": {
        "op": "lamb",
        "hyper": (("always_adapt", True), ("trust_clip", True), ("weight_decay", 0.0)),
        "async_op": True,
    },
    "lamb large": {"op": "lamb", "shapes": ((200_003,), (257, 103), (1,)), "steps": 3},
}


# Where gradients cancel by chance, a small eps shows how their sum was rounded.
NOISE_FREE = (("eps", 1e-3),)


@pytest.mark.parametrize("variant", COMMON)
def test_parity(workers: harness.Workers, variant: str) -> None:
    for op in OPS:
        workers.agree(fused_ops.parity, Run(op, **COMMON[variant]))


@pytest.mark.parametrize("variant", OWN)
def test_own_options(workers: harness.Workers, variant: str) -> None:
    workers.agree(fused_ops.parity, Run(**OWN[variant]))


@pytest.mark.parametrize("op", OPS)
def test_memory_makes_no_difference(trio: harness.Workers, op: str) -> None:
    answers = [
        trio.run(fused_ops.digests, Run(op, memory=memory, async_op=async_op))
        for memory in MEMORY
        for async_op in (False, True)
    ]
    assert all(one == answers[0] for one in answers)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("memory", ["ordinary", "arena"])
def test_overflow_on_one_rank_stops_all(workers: harness.Workers, op: str, memory: str) -> None:
    workers.run(fused_ops.overflow, Run(op, memory=memory))
    mixed = Run(op, memory=memory, dtypes=(BF16, FP32), master=False, async_op=True)
    workers.run(fused_ops.overflow, mixed)
    workers.run(fused_ops.overflow, Run(op, memory=memory, dtypes=(BF16,), master=True))


@pytest.mark.parametrize("op", OPS)
def test_no_lr_moves_nothing(workers: harness.Workers, op: str) -> None:
    workers.run(fused_ops.unmoved, Run(op, hyper=(("lr", 0.0),)))
    workers.run(fused_ops.unmoved, Run(op, hyper=(("lr", 0.0),), dtypes=(BF16,)))


def small(count: int, most: int) -> tuple[tuple[int], ...]:
    return tuple((1 + i * 37 % most,) for i in range(count))


MANY = {
    **{memory: Run(shapes=small(397, 211), steps=5, memory=memory) for memory in MEMORY},
    "lamb, bert": Run("lamb", NOISE_FREE, fused_ops.bert(hidden=16, vocabulary=477), steps=2),
    "lamb, thousands": Run("lamb", NOISE_FREE, small(4100, 41), steps=1),
}
AS_ONE = {"bert": fused_ops.bert(), "thousands": small(8501, 41)}


@pytest.mark.parametrize("name", MANY)
def test_many_tensors(workers: harness.Workers, name: str) -> None:
    workers.agree(fused_ops.parity, MANY[name])


@pytest.mark.parametrize("op", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("name", AS_ONE)
def test_many_tensors_as_one(workers: harness.Workers, name: str, op: str) -> None:
    assert len(AS_ONE["bert"]) == 397
    memory = "arena" if op == "adam" else "ordinary"
    workers.run(fused_ops.like_flat, op, AS_ONE[name], memory)


@pytest.mark.parametrize("memory", MEMORY)
def test_large_tensors(workers: harness.Workers, memory: str) -> None:
    run = Run(shapes=((1_000_003,), (257, 1031)), steps=3, memory=memory)
    workers.agree(fused_ops.parity, run)
    assert workers.run(fused_ops.digests, run) == workers.run(fused_ops.digests, run)


def test_runs_are_identical(workers: harness.Workers) -> None:
    run = Run(hyper=(("amsgrad", True),), steps=20)
    assert workers.run(fused_ops.digests, run) == workers.run(fused_ops.digests, run)


@pytest.mark.parametrize("op", OPS)
@on_ranks(1, 2, 3, harness.slow(4))
def test_steps_in_flight(context: Context, op: str) -> None:
    """Asynchronous calls on different tensors, waited for at the end."""
    models, twins = ([Model(context, Run(op, seed=seed)) for seed in range(8)] for _ in range(2))
    works = []
    for model in models:
        model.set_gradients(0)
        works.append(model.start(async_op=True))
    for work in works:
        work.wait()
    for model, twin in zip(models, twins, strict=True):
        twin.set_gradients(0)
        twin.step()
        for mine, want in zip(model.state(), twin.state(), strict=True):
            assert same(mine, want)


@pytest.mark.parametrize("op", OPS)
@on_ranks(1, 2, 3, harness.slow(4))
def test_between_collectives(context: Context, op: str) -> None:
    """Fused steps and ordinary collectives on one queue, and in a subgroup."""
    model = Model(context, Run(op))
    for step in range(5):
        model.set_gradients(step)
        tensor = torch.ones(1000)
        work = dist.all_reduce(tensor, async_op=True)
        model.step()
        assert work is not None
        work.wait()
        assert bool((tensor == context.world_size).all())
    group = dist.new_group()
    model.step(group=group)
    dist.destroy_process_group(group)


@pytest.mark.parametrize("op", OPS)
@on_ranks(2)
def test_leaf_parameters(context: Context, op: str) -> None:
    """Parameters that require gradients work under no_grad."""
    model = Model(context, Run(op, shapes=((1021,),)))
    model.params[0].requires_grad_()
    model.params[0].pow(2).sum().backward()
    assert model.params[0].grad is not None
    model.grads[0] = model.params[0].grad
    before = model.params[0].detach().clone()
    with torch.no_grad():
        model.step()
    assert not same(model.params[0].detach(), before)
    assert model.params[0].requires_grad


@pytest.mark.parametrize("op", OPS)
@on_ranks(2)
def test_gradients_of_another_layout(context: Context, op: str) -> None:
    """A gradient whose strides are not the parameter's is understood or refused."""
    model, twin = (Model(context, Run(op, shapes=((64, 3), (9, 31)))) for _ in range(2))
    for one in (model, twin):
        one.set_gradients(0)
    model.grads[0] = model.grads[0].t().contiguous().t()
    twin.step()
    try:
        model.step()
    except (ValueError, RuntimeError) as error:
        assert "grads" in str(error)
    else:
        for mine, want in zip(model.state(), twin.state(), strict=True):
            assert same(mine, want)


SIZES = st.integers(0, 40) | st.sampled_from([63, 64, 65, 127, 128, 1021, 4096, 16_385, 70_001])


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    op=st.sampled_from(OPS),
    world_size=st.sampled_from([1, 2, 3, 4]),
    sizes=st.lists(SIZES, min_size=1, max_size=8),
    dtypes=st.lists(st.sampled_from([FP32, FP64, BF16, FP16]), min_size=1, max_size=4),
    half_state=st.booleans(),
    memory=st.sampled_from(["ordinary", "arena", "mixed"]),
    reduce=st.sampled_from(["mean", "sum", "weighted"]),
    async_op=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_mix(
    op: str,
    world_size: int,
    sizes: list[int],
    dtypes: list[Any],
    half_state: bool,
    memory: str,
    reduce: str,
    async_op: bool,
    seed: int,
) -> None:
    run = Run(
        op,
        shapes=tuple((size,) for size in sizes),
        steps=3,
        dtypes=tuple(dtypes),
        half_state=half_state,
        memory=memory,
        reduce="sum" if reduce == "sum" else "mean",
        weighted=reduce == "weighted",
        async_op=async_op,
        seed=seed,
    )
    harness.pool(world_size).agree(fused_ops.parity, run)


@pytest.mark.parametrize("what", [*WRONG, *OF_ADAM])
@pytest.mark.parametrize("op", OPS)
def test_wrong_arguments(pair: harness.Workers, op: str, what: str) -> None:
    if op == "sgd" and what in ("fewer steps", "step dtype", "beta1", "beta2"):
        pytest.skip("SGD has none")
    if what in OF_ADAM and not op.startswith("adam"):
        pytest.skip("of Adam")
    word = (WRONG | OF_ADAM)[what][1]
    if word == "state":
        word = "momentum_buffer_list" if op == "sgd" else "exp_avgs"
    for kind, text in pair.run(optim_faults.wrong, op, what):
        assert kind == "ValueError", text
        assert word in text, text
        assert f"fused_{op}_" in text, text


@pytest.mark.parametrize("op", OPS)
def test_sparse_gradients_are_refused(pair: harness.Workers, op: str) -> None:
    pair.run(fused_ops.sparse, op)


@pytest.fixture(params=[2, harness.slow(3)], ids=lambda size: f"world{size}")
def disagreeing(request: pytest.FixtureRequest) -> harness.Workers:
    return harness.pool(request.param, timeout=20, oracle=False)


DISAGREEMENTS = (
    "lr",
    "lr tensor",
    *optim_faults.OTHER_HYPERS,
    "step",
    "is_first_step",
    "dtype",
    "gradient dtype",
    "state dtype",
    "masters",
    "sizes",
    "fewer tensors",
    "layout",
    "weight",
    "reduce",
    "grad_scale",
    "a late tensor",
)


@pytest.mark.parametrize("what", DISAGREEMENTS)
@pytest.mark.parametrize("op", OPS)
def test_disagreement(disagreeing: harness.Workers, op: str, what: str) -> None:
    arguments = inspect.signature(getattr(fusedpg, f"fused_{op}_")).parameters
    hypers = {*optim_faults.OTHER_HYPERS, "is_first_step"}
    if (what == "step" and op == "sgd") or (what in hypers and what not in arguments):
        pytest.skip("no such argument")
    if what == "state dtype" and op == "lamb":
        pytest.skip("LAMB keeps float32")
    if what == "a late tensor" and op in ("adam", "adamw"):
        pytest.skip("slow, and the same as for SGD")
    for async_op in (False, True):
        for error in disagreeing.errors(optim_faults.disagree, op, what, async_op):
            assert error.kind == "DistBackendError", error.trace
            assert error.text.startswith("fused:"), error.text
            assert f"fused_{op}_" in error.text, error.text
            # Found by comparison, not by waiting.
            assert "ranks disagree" in error.text, error.text
    disagreeing.agree(optim_faults.usable, op)


# --- derivatives ----------------------------------------------------------------

Step = Callable[..., torch.Tensor]  # of a parameter and its gradient; the parameter after it


def under_func(transform: Callable[..., Any], **options: Any) -> Callable[[Step, Any, Any], Any]:
    return lambda step, p, g: transform(lambda p, g: step(p.clone(), g).sum(), **options)(p, g)


def with_tangent(step: Step, p: torch.Tensor, g: torch.Tensor) -> None:
    with forward_ad.dual_level():
        step(p, forward_ad.make_dual(g, g))


# What a step would lose: its derivative by the parameter, its gradient or the learning rate.
LOST: dict[str, Callable[[Step, torch.Tensor, torch.Tensor], Any]] = {
    "func.grad": under_func(torch.func.grad),
    "func.grad by gradients": under_func(torch.func.grad, argnums=1),
    "func.grad of a leaf": lambda step, p, g: torch.func.grad(lambda p: step(p, g).sum())(p),
    "func.jvp": lambda step, p, g: torch.func.jvp(lambda g: step(p.clone(), g), (g,), (g,)),
    "vmap": lambda step, p, g: torch.vmap(step)(p.expand(2, -1).clone(), g.expand(2, -1)),
    "functionalize": under_func(torch.func.functionalize),
    "tangent": with_tangent,
    "no leaf": lambda step, p, g: step(p.requires_grad_() * 1, g),
    "gradient": lambda step, p, g: step(p, g.requires_grad_()),
    "lr": lambda step, p, g: step(p, g, lr=torch.tensor(0.1, requires_grad=True)),
}


def lose(context: Context, how: str, what: str, odd: int) -> None:
    """All ranks raise soon where one would lose a derivative, and nothing is changed."""
    name = dist.distributed_c10d._get_default_group().group_name
    hyper = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False}

    def step(p: torch.Tensor, g: torch.Tensor, lr: Any = 0.1, reduce: str = "sum") -> torch.Tensor:
        options = {**hyper, "lr": lr, "is_first_step": True, "reduce": reduce}
        if how == "operator":
            operator = packet("sgd", isinstance(lr, torch.Tensor))
            operator([p], [g], [], master_params=[], maximize=False, group_name=name, **options)
        else:
            work = fusedpg.fused_sgd_([p], [g], [], async_op=how == "async", **options)
            assert how == "sync" or (work is not None and work.wait())
        return p

    p, g = torch.ones(100), torch.ones(100)
    begin = time.monotonic()
    with pytest.raises((RuntimeError, ValueError)) as caught:  # DistBackendError is the first
        if context.rank != odd:
            step(p, g)
        elif what == "reduce":
            step(p, g, reduce="max")
        else:
            LOST[what](step, p, g)
    assert "fused_sgd_" in str(caught.value) or context.rank != odd, caught.value
    assert f"rank {odd} refused" in str(caught.value) or context.rank == odd, caught.value
    assert time.monotonic() - begin < 5, "peers were not told"
    assert bool((p == 1).all())
    works()
    # Parameters of a model require grad, and what a transformation does not see has no derivative.
    leaf = torch.nn.Parameter(torch.ones(100))
    assert step(leaf, torch.ones(100)).unique().tolist() == [pytest.approx(1 - 0.1 * 2)]
    if how == "operator":
        torch.func.grad(lambda x: (step(leaf, torch.ones(100)), x.sum())[1])(torch.ones(2))
        assert leaf.unique().tolist() == [pytest.approx(1 - 0.2 * 2)]


@pytest.mark.parametrize("what", [*LOST, "reduce"])
@pytest.mark.parametrize("how", ["operator", "sync", "async"])
def test_derivatives_are_not_lost(how: str, what: str) -> None:
    if (how, what) == ("operator", "functionalize"):
        pytest.skip("torch raises before it calls anything of ours")
    workers = harness.pool(2, timeout=20, oracle=False)
    workers.run(lose, how, what, 1)
    workers.run(lose, how, what, 0)


# --- dispatcher ---------------------------------------------------------------

WRITTEN = {
    "sgd": {"params", "momentum_buffer_list"},
    "adam": {"params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"},
    "adamw": {"params", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"},
    "lamb": {"params", "exp_avgs", "exp_avg_sqs", "state_steps"},
}


def schema(context: Context, op: str, tensor_lr: bool) -> dict[str, bool]:
    """Which arguments the schema says are written."""
    written = {}
    for argument in packet(op, tensor_lr)._schema.arguments:
        written[argument.name] = argument.alias_info is not None and argument.alias_info.is_write
    return written


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_schema(op: str, tensor_lr: bool) -> None:
    [written] = harness.pool(1).run(schema, op, tensor_lr)
    mutated = {name for name, flag in written.items() if flag}
    assert mutated == WRITTEN[op] | {"master_params", "found_inf"}
    assert "grads" in written and "group_name" in written


def fake(context: Context, run: Run) -> None:
    """Fake and meta tensors pass, and nothing happens to real ones."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = Model(context, run)
    name = dist.distributed_c10d._get_default_group().group_name
    lists, options = direct(model, name)
    with FakeTensorMode() as mode:
        fakes = [[mode.from_tensor(one) for one in many] for many in lists]
        kwargs = {
            key: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for key, value in options.items()
        }
        kwargs["master_params"] = [mode.from_tensor(one) for one in model.masters]
        assert packet(run.op, run.lr_tensor)(*fakes, **kwargs) is None
        wrapper = getattr(fusedpg, f"fused_{run.op}_")
        del kwargs["group_name"]
        assert wrapper(*fakes, **kwargs) is None
    metas = [[one.to("meta") for one in many] for many in lists]
    kwargs = {
        key: value.to("meta") if isinstance(value, torch.Tensor) else value
        for key, value in options.items()
    }
    kwargs["master_params"] = [one.to("meta") for one in model.masters]
    assert packet(run.op, run.lr_tensor)(*metas, **kwargs) is None
    works()


@pytest.mark.parametrize("op", OPS)
def test_fake_tensors(pair: harness.Workers, op: str) -> None:
    pair.run(fake, Run(op))
    pair.run(fake, Run(op, lr_tensor=True, scale=2.0))
    pair.run(fake, Run(op, dtypes=(BF16,), master=True))


def opcheck(context: Context, run: Run) -> None:
    """torch's own test of the registration."""
    model = Model(context, run)
    model.set_gradients(0)
    name = dist.distributed_c10d._get_default_group().group_name
    lists, options = direct(model, name)
    torch.library.opcheck(
        packet(run.op, run.lr_tensor),
        tuple(lists),
        options,
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op: str) -> None:
    workers = harness.pool(1)
    shapes = ((37,), (3, 5))
    workers.run(opcheck, Run(op, shapes=shapes))
    workers.run(opcheck, Run(op, shapes=shapes, lr_tensor=True, scale=2.0))
    workers.run(opcheck, Run(op, shapes=shapes, dtypes=(BF16,), master=True))


def unknown_group(context: Context, op: str) -> tuple[str, str]:
    model = Model(context, Run(op))
    lists, options = direct(model, "nobody has this name")
    try:
        packet(op)(*lists, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("a group that does not exist was accepted")


@pytest.mark.parametrize("op", OPS)
def test_unknown_group(op: str) -> None:
    [(_, text)] = harness.pool(1).run(unknown_group, op)
    assert "nobody has this name" in text


def compiled(context: Context, run: Run, how: str, backend: str) -> None:
    """The same bits as in eager mode, in one graph."""
    import torch._dynamo

    torch._dynamo.reset()
    eager, model = Model(context, run), Model(context, run)
    name = dist.distributed_c10d._get_default_group().group_name
    wrapper = getattr(fusedpg, f"fused_{run.op}_")
    operator = packet(run.op, run.lr_tensor)

    def function(lists: list[list[torch.Tensor]], options: dict[str, Any]) -> torch.Tensor:
        params, grads, *rest = lists
        doubled = [grad * 2 for grad in grads]
        if how == "wrapper":
            wrapper(params, doubled, *rest, **options)
        else:
            operator(params, doubled, *rest, **options)
        return params[0] + 1

    fast = torch.compile(function, fullgraph=True, backend=backend)
    for step in range(3):
        results = []
        for one, call in ((eager, function), (model, fast)):
            one.set_gradients(step)
            lists, options = direct(one, name)
            if how == "wrapper":
                del options["group_name"]
            results.append(call(lists, options))
            one.calls += 1
        assert same(results[0], results[1])
        for mine, want in zip(model.state(), eager.state(), strict=True):
            assert same(mine, want)
    assert all(float(step) == 3 for step in model.steps)


@pytest.mark.parametrize("how", ["wrapper", "operator"])
@pytest.mark.parametrize("op", OPS)
def test_compiled(pair: harness.Workers, op: str, how: str) -> None:
    shapes = ((1021,), (64, 3))
    pair.run(compiled, Run(op, shapes=shapes), how, "aot_eager")
    options = Run(op, shapes=shapes, lr_tensor=True, scale=4.0)
    pair.run(compiled, options, how, "aot_eager")


@pytest.mark.long
@pytest.mark.parametrize("how", ["wrapper", "operator"])
def test_compiled_by_inductor(pair: harness.Workers, how: str) -> None:
    run = Run("adamw", shapes=((1021,), (64, 3)))
    pair.run(compiled, run, how, "inductor", timeout=200)


# --- groups that span hosts ----------------------------------------------------


@pytest.fixture(
    params=["two of two", "three", "two and one", *map(harness.slow, ("two", "crossed"))]
)
def spread(request: pytest.FixtureRequest) -> harness.Workers:
    return harness.pool_of_hosts(request.param)


@pytest.mark.parametrize("op", OPS)
def test_across_hosts(spread: harness.Workers, op: str) -> None:
    for options in (
        {},
        {"weighted": True, "memory": "mixed"},
        {"reduce": "sum", "async_op": True},
        {"scale": 8.0, "layout": "channels_last"},
        {"dtypes": (BF16,), "master": True, "lr_tensor": True},
        {"dtypes": (BF16,), "half_state": True},
        {"dtypes": (FP32, FP64, BF16), "layout": "transposed"},
        {"shapes": ((0,), (5,), (100,), (1,))},
        {"hyper": (("maximize", True),), "memory": "mixed", "async_op": True},
        {"memory": "arena", "dtypes": (BF16, FP32), "grad_dtypes": (FP16, BF16)},
    ):
        spread.agree(fused_ops.parity, Run(op, **options))  # type: ignore[arg-type]
    spread.run(fused_ops.overflow, Run(op))


@pytest.mark.parametrize("variant", [name for name, own in OWN.items() if "large" not in name])
def test_own_options_across_hosts(variant: str) -> None:
    workers = harness.pool_of_hosts("three")
    workers.agree(fused_ops.parity, Run(**OWN[variant]))


@pytest.mark.parametrize("op", OPS)
def test_classes_across_hosts(spread: harness.Workers, op: str) -> None:
    spread.agree(fused_ops.manual, op)
    if op.startswith("adam"):
        spread.agree(fused_ops.manual, op, (("amsgrad", True),))
    if op == "sgd":
        spread.agree(fused_ops.manual, op, (("dampening", 0.3),))


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool])
def test_sum_of_squares_refuses_other_types(dtype: torch.dtype) -> None:
    """They have no kernel, whose answer would be 0."""
    with pytest.raises(ValueError, match="sum_squares"):
        load_extension().sum_squares(torch.ones(3, dtype=dtype))


# --- who owns what ----------------------------------------------------------


@hypothesis.settings(max_examples=300)
@hypothesis.given(numel=st.integers(0, 1 << 40), world_size=st.integers(1, 1024))
def test_shards_partition_a_tensor(numel: int, world_size: int) -> None:
    ranges = [fusedpg.shard_range(numel, world_size, rank) for rank in range(world_size)]
    chunk = -(-numel // world_size)
    chunk = -(-chunk // 32) * 32
    end = 0
    for offset, length in ranges:
        assert length >= 0
        if length:
            assert offset == end
            assert offset % 32 == 0
        end = max(end, offset + length)
        assert length in (chunk, 0) or offset + length == numel
    assert end == numel
    assert sum(length for _, length in ranges) == numel


@pytest.mark.parametrize("arguments", [(-1, 2, 0), (10, 0, 0), (10, 2, 2), (10, 2, -1)])
def test_wrong_shards(arguments: tuple[int, int, int]) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        fusedpg.shard_range(*arguments)


def test_shards_by_hand() -> None:
    assert fusedpg.shard_range(100, 2, 0) == (0, 64)
    assert fusedpg.shard_range(100, 2, 1) == (64, 36)
    assert [fusedpg.shard_range(33, 4, rank)[1] for rank in range(4)] == [32, 1, 0, 0]
