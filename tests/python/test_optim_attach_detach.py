"""Fused optimizers come and go: attach, detach, several on one DDP, and what is left of them."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import fusedpg
import harness
from checks.optim_script import Net, Script, Setup, Several, in_mode, of_torch
from checks.refused import refused
from fusedpg._registration import minor_release
from harness import Context, on_ranks

Program = list[tuple[Any, ...]]
HALVES = 2


def refuses(call: Callable[[], Any], kind: type[Exception], text: str) -> None:
    with refused(text, kind):
        call()


def used_bytes() -> int:
    return int(fusedpg.group_info()["arena_used"])


class Life(Script):
    """A script whose halves have optimizers of their own, ours or (the twin) torch's only."""

    def __init__(self, context: Context, setup: Setup, fused: bool) -> None:
        super().__init__(context, setup, fused)
        middle = len(self.params) // HALVES
        self.halves = [self.params[:middle], self.params[middle:]]
        self.current: list[Any] = [self.torch(half) for half in range(HALVES)]
        self.parked: list[Any] = [None] * HALVES
        self.shares = [False] * HALVES

    def build(self, make: Callable[[], nn.Module] = Net) -> None:
        """Without an optimizer."""
        self.fresh(make)
        self.wrap()

    def torch(self, half: int) -> Any:
        return of_torch("SGD", self.halves[half])

    def is_ours(self, half: int) -> bool:
        return isinstance(self.current[half], fusedpg.optim.SGD)

    def new(self, half: int, kind: str, drop: bool) -> None:
        """Another optimizer; the one before is detached, or only forgotten.

        Forgetting leaves parameters shared, and then no other optimizer may write to them.
        """
        self.net.zero_grad()
        if self.is_ours(half) and (self.shares[half] or not drop):
            self.current[half].detach()
        self.shares[half] = self.fused and kind == "shared"
        self.current[half] = None
        gc.collect()
        if not self.fused or kind == "torch":
            self.current[half] = self.torch(half)
        elif kind == "late":
            # Nothing has been done with it before it knows its module.
            self.current[half] = self.optimizer(self.halves[half], None)
            self.current[half].attach(self.net)
        else:
            self.current[half] = self.optimizer(
                self.halves[half],
                self.net,
                overlap=kind == "overlap",
                share_parameters=kind == "shared",
            )

    def park(self, half: int, zero: bool) -> None:
        """An optimizer of torch's takes its place for a while."""
        if self.parked[half] is not None:
            return
        if zero:
            self.net.zero_grad()
        if self.is_ours(half):
            self.current[half].detach()
            refuses(self.current[half].step, RuntimeError, "detached")
        self.parked[half], self.current[half] = self.current[half], self.torch(half)

    def back(self, half: int) -> None:
        if self.parked[half] is None:
            return
        self.net.zero_grad()
        self.current[half], self.parked[half] = self.parked[half], None
        if self.is_ours(half):
            self.current[half].attach(self.net)

    def live(self, steps: int, accumulate: bool, skip: tuple[int, ...], zero_first: bool) -> None:
        together = Several(*self.current)
        for _ in range(steps):
            if zero_first:
                together.zero_grad()
            if accumulate:
                with self.net.no_sync():
                    self.loss(self.net(self.x(), skip=skip)).backward()
            self.loss(self.net(self.x(), skip=skip)).backward()
            together.step()
            if not zero_first:
                together.zero_grad()


pytestmark = pytest.mark.fused_only

SETUPS = [
    Setup(view=view, graph=graph)
    for view, graph in (
        *((False, ""), (True, ""), (False, "find_unused"), (True, "find_unused")),
        (False, "static"),
    )
]


def freed(context: Context, mode: str, zero: bool, fails: bool) -> None:
    """All of it, whatever stands in ``p.grad`` and however backward ended."""
    gc.collect()
    before = used_bytes()
    hooks = nn.modules.module._global_forward_pre_hooks
    hooked = list(hooks)  # tests before this one may have left optimizers
    module: Any = nn.Sequential(*(nn.Linear(40, 40) for _ in range(5)))
    net, optimizer = in_mode(mode, module)
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.randn(3, 40)).sum().backward()
        optimizer.step()
    if fails:
        # The hook is the last to run: gradients of the others have been taken, or updated.
        optimizer.zero_grad()
        handle = module[0].weight.register_post_accumulate_grad_hook(lambda _: 1 // 0)
        refuses(net(torch.randn(3, 40)).sum().backward, ZeroDivisionError, "zero")
        handle.remove()
        del handle
    if zero:
        optimizer.zero_grad()
    alive = [weakref.ref(one) for one in (net, module, optimizer, *module.parameters())]
    if mode != "manual":
        alive.append(weakref.ref(net.reducer))
    del net, module, optimizer
    gc.collect()
    assert not [type(one()).__name__ for one in alive if one() is not None]
    assert used_bytes() <= before, (used_bytes(), before)
    assert not set(hooks) - set(hooked)


@pytest.mark.parametrize("mode", ["manual", "ddp", "overlap"])
def test_everything_is_freed(pair: harness.Workers, mode: str) -> None:
    for zero in (True, False):
        pair.run(freed, mode, zero, False)


@pytest.mark.parametrize("mode", ["ddp", "overlap"])
def test_everything_is_freed_after_a_failure(mode: str) -> None:
    # One rank: the others would wait for what it did not start.
    harness.pool(1).run(freed, mode, False, True)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("static", [False, True])
@on_ranks(2)
def test_detach_leaves_plain_ddp(context: Context, view: bool, static: bool) -> None:
    """After detach() and a forward nothing of ours is left on DDP and its parameters."""
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    ddp: Any = DistributedDataParallel(
        module, gradient_as_bucket_view=view, static_graph=static, find_unused_parameters=not static
    )
    hooks = [len(ddp._forward_hooks), len(ddp._forward_pre_hooks)]
    optimizers = [
        fusedpg.optim.SGD(half.parameters(), lr=0.1, ddp=ddp, overlap=i == 1)
        for i, half in enumerate(module)
    ]
    frozen = module[0].bias.requires_grad_(False)
    x = torch.randn(2, 5)
    for _ in range(2):
        ddp(x).sum().backward()
        refuses(optimizers[0].detach, RuntimeError, "step")
        refuses(optimizers[1].detach, RuntimeError, "step")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    reference = weakref.ref(ddp.reducer)
    for optimizer in optimizers:
        optimizer.detach()
        optimizer.detach()  # harmless
    for param in module.parameters():
        assert not param._post_accumulate_grad_hooks
    with torch.no_grad():
        ddp(x)
    assert reference() is not None  # a backward that has not come yet may need it
    loss = ddp(x * (1 + context.rank)).sum()
    assert reference() is None
    assert not frozen.requires_grad
    assert not ddp._comm_hooks
    assert [len(ddp._forward_hooks), len(ddp._forward_pre_hooks)] == hooks
    frozen.requires_grad_(True)
    loss = ddp(x * (1 + context.rank)).sum()
    loss.backward()
    for param in module.parameters():
        whole = param.grad.clone()
        dist.broadcast(whole, 0)
        assert type(param.grad) is torch.Tensor and torch.equal(whole, param.grad)
    # Whoever wants to may register a hook now.
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)


@pytest.mark.parametrize("attached", [False, True])
@on_ranks(2)
def test_detached_parameters_are_the_ranks_own(context: Context, attached: bool) -> None:
    """Another optimizer, on each rank, would write to one copy of parameters that stay shared."""
    module = nn.Linear(5, 7)
    ddp = DistributedDataParallel(module) if attached else None
    params = list(module.parameters())
    optimizer = fusedpg.optim.SGD(params, lr=0.1, ddp=ddp, share_parameters=True)
    optimizer.detach()
    with torch.no_grad():
        for param in params:
            param.fill_(context.rank)
    dist.barrier()
    assert all(param.unique().tolist() == [context.rank] for param in params)


@pytest.mark.parametrize("attached", [False, True])
@on_ranks(2)
def test_detach_with_what_came_after_the_step(context: Context, attached: bool) -> None:
    """detach() would lose what backward has added to a gradient that step() has applied."""
    torch.manual_seed(0)
    module = nn.Linear(5, 7)
    ddp = DistributedDataParallel(module) if attached else None
    optimizer = fusedpg.optim.SGD(module.parameters(), lr=0.1, ddp=ddp)
    x = torch.randn(2, 5)
    (ddp or module)(x).sum().backward()
    if ddp is None:
        optimizer.reduce_gradients()
    optimizer.step()
    with ddp.no_sync() if ddp else contextlib.nullcontext():
        (ddp or module)(x).sum().backward()
    refuses(optimizer.detach, RuntimeError, "was not applied")
    optimizer.zero_grad()
    optimizer.detach()


@pytest.mark.parametrize("view", (False, True))
@pytest.mark.parametrize("hook", (False, True))
@pytest.mark.parametrize("first", (False, True))
@on_ranks(2)
def test_forgotten_ddp(context: Context, view: bool, hook: bool, first: bool) -> None:
    """DDP without a word to the optimizer raises in the first backward."""
    # DDP is in the middle of a backward then.
    module = nn.Linear(5, 7)
    optimizer: Any = fusedpg.optim.SGD(module.parameters(), lr=0.1) if first else None
    ddp = DistributedDataParallel(module, gradient_as_bucket_view=view)
    if hook:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    if optimizer is None:
        optimizer = fusedpg.optim.SGD(module.parameters(), lr=0.1)
    loss = ddp(torch.randn(2, 5)).sum()
    refuses(loss.backward, RuntimeError, "ddp=ddp")


@on_ranks(2)
def test_wrong_modules(context: Context) -> None:
    """What is no DistributedDataParallel, or not the right one, and what to write instead."""
    a, b = nn.Linear(5, 7), nn.Linear(5, 7)
    first, second = DistributedDataParallel(a), DistributedDataParallel(b)

    def make(params: Any, ddp: Any) -> Any:
        return fusedpg.optim.SGD(params, lr=0.1, ddp=ddp)

    both = [*a.parameters(), *b.parameters()]
    compiled = torch.compile(first, backend="eager")
    refuses(lambda: make(a.parameters(), a), TypeError, "DistributedDataParallel(model)")
    refuses(lambda: make(a.parameters(), compiled), TypeError, "_orig_mod")
    refuses(lambda: make(both, [first, second]), TypeError, "one optimizer for each")
    refuses(lambda: make(both, first), ValueError, "one optimizer for each")
    # Nothing of the attempts is left.
    assert not first._comm_hooks
    optimizer = make(a.parameters(), first)
    refuses(lambda: optimizer.attach(second), RuntimeError, "one optimizer for each")
    refuses(lambda: make(a.parameters(), first), ValueError, "two optimizers")
    optimizer.attach(first)  # it is already
    hooked = DistributedDataParallel(nn.Linear(2, 2))
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    refuses(lambda: make(hooked.parameters(), hooked), RuntimeError, "already has")
    # That DDP goes on as it was.
    hooked(torch.full((1, 2), 1.0 + context.rank)).sum().backward()
    mean = sum(range(1, context.world_size + 1)) / context.world_size
    assert torch.allclose(hooked.module.weight.grad, torch.full((2, 2), mean))


@on_ranks(2)
def test_sharded_elsewhere(context: Context) -> None:
    """Parameters of FSDP, also when it came after the optimizer."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    model: Any = nn.Linear(6, 6)
    early = fusedpg.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model, mesh=mesh)
    refuses(lambda: fusedpg.optim.SGD(model.parameters(), lr=0.1), TypeError, "DistributedData")
    refuses(
        lambda: fusedpg.optim.SGD(model.parameters(), lr=0.1, ddp=model), TypeError, "fully_shard"
    )
    model(torch.randn(2, 6)).sum().backward()
    if minor_release(torch.__version__) >= (2, 12):  # docs/reference/limits.md says what 2.11 does
        refuses(early.step, TypeError, "fully_shard")
    else:
        old_weight = early.param_groups[0]["params"][0]
        before = old_weight.detach().clone()
        early.step()
        assert torch.equal(old_weight, before)
    for whole in (False, True):
        old: Any = FullyShardedDataParallel(
            nn.Linear(6, 6), use_orig_params=whole, device_id=torch.device("cpu")
        )
        refuses(lambda: fusedpg.optim.SGD(old.parameters(), lr=0.1), TypeError, "FullySharded")  # noqa: B023
        refuses(
            lambda: fusedpg.optim.SGD(old.parameters(), lr=0.1, ddp=old),  # noqa: B023
            TypeError,
            "DistributedDataParallel",
        )


def lives(context: Context, program: Program, setup: Setup) -> str:
    """Runs a program with ours and with torch's; what differs, if anything."""
    gc.collect()
    before = used_bytes()
    ours, twin = Life(context, setup, True), Life(context, setup, False)
    found = ""
    for number, (action, *arguments) in enumerate(program):
        for life in (ours, twin):
            getattr(life, action)(*arguments)
        pairs = zip(ours.module.parameters(), twin.module.parameters(), strict=True)
        apart = max(float((p - q).detach().abs().max()) for p, q in pairs)
        if not apart < 1e-9 and not found:
            found = f"{apart} apart after {number}: {program[number]}"
    # The garbage collector does not see every cycle, so nothing may be in one of those.
    watched = [ours.net, ours.module, *ours.current, *ours.parked, *ours.module.parameters()]
    alive = [weakref.ref(one) for one in watched if one is not None]
    shared = any(action[0] == "new" and action[2] == "shared" for action in program)
    del ours, twin, life, watched, pairs
    gc.collect()
    left = [type(one()).__name__ for one in alive if one() is not None]
    if left:
        found += f"; still there: {left}"
    if used_bytes() != before and not shared:
        found += f"; the arena has {used_bytes()} bytes in use, {before} before"
    return found


@pytest.mark.long
@pytest.mark.parametrize("setup", [SETUPS[0], *map(harness.slow, SETUPS[1:3]), *SETUPS[3:]])
def test_coming_and_going(pair: harness.Workers, setup: Setup) -> None:
    program: Program = [("live", 2, False, (), True)]
    for kind in ("ddp", "overlap", "late", "shared"):
        for half in range(HALVES):
            program.append(("new", half, kind, half == 1))
            program.append(("live", 3, half == 0, (), half == 1))
        for half in range(HALVES):
            program.append(("park", half, half == 0))
            program.append(("live", 2, half == 1, (), True))
        for half in range(HALVES):
            program.append(("back", half))
            program.append(("live", 2, False, (), False))
    found = pair.run(lives, program, setup)
    assert not any(found), found


@st.composite
def programs(draw: st.DrawFn) -> tuple[Program, Setup]:
    setup = draw(st.sampled_from(SETUPS))
    half = st.integers(0, HALVES - 1)
    kind = st.sampled_from(["ddp", "overlap", "late", "torch", "shared"])
    change = st.one_of(
        st.tuples(st.just("new"), half, kind, st.booleans()),
        st.tuples(st.just("park"), half, st.booleans()),
        st.tuples(st.just("back"), half),
    )
    program: Program = []
    for _ in range(draw(st.integers(1, 6))):
        program += draw(st.lists(change, min_size=1, max_size=2))
        skip = draw(st.lists(st.integers(0, 5), max_size=2, unique=True))
        skip = skip if setup.graph == "find_unused" else []
        accumulate = draw(st.booleans()) and setup.graph != "static"
        steps = draw(st.integers(1, 3))
        program.append(("live", steps, accumulate, tuple(skip), draw(st.booleans())))
    return program, setup


@pytest.mark.long
@hypothesis.settings(max_examples=12)
@hypothesis.given(programs(), st.integers(1, 3))
def test_drawn_lives(drawn: tuple[Program, Setup], size: int) -> None:
    program, setup = drawn
    found = harness.pool(size).run(lives, program, setup)
    assert not any(found), found
