"""fusedpg.hvd: optimizers against one process that has all ranks' data, objects and batch norm."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedpg.hvd as hvd
import fusedpg.optim
import harness
from harness import Context, on_ranks
from test_hvd import session

pytestmark = pytest.mark.timeout(180)

STEPS = 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 2))


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * number + rank))


def loss(net: nn.Module, rank: int, number: int) -> Tensor:
    return net(batch(rank, number)).square().mean()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.2, momentum=0.9)


def trained_alone(size: int, passes: int = 1, divide: bool = True) -> nn.Module:
    """The weights after steps on everybody's batches."""
    net = model()
    optimizer = sgd(net.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(passes):
            total = sum(loss(net, rank, step * passes + number) for rank in range(size))
            (total / size if divide else total).backward()
        optimizer.step()
    return net


def train(net: nn.Module, optimizer: Any, rank: int, steps: int = STEPS) -> None:
    """Steps on this rank's batches."""
    for step in range(steps):
        optimizer.zero_grad()
        loss(net, rank, step).backward()
        optimizer.step()


def same(net: nn.Module, other: nn.Module, **tolerance: float) -> None:
    for ours, theirs in zip(net.parameters(), other.parameters()):
        torch.testing.assert_close(ours, theirs, **tolerance)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"op": hvd.Sum},
    "groups": {"groups": 2},
    # The others go by themselves.
    "groups of parameters": {"groups": lambda net: [[net[0].weight, net[4].bias], [net[2].weight]]},
    "predivide": {"gradient_predivide_factor": 4.0},
    # Horovod forgets the factor there.
    "predivide in groups": {"gradient_predivide_factor": 4.0, "groups": 3},
    "passes": {"backward_passes_per_step": 2},
    "passes in groups": {"backward_passes_per_step": 2, "groups": 2},
    "fused": {"fused": True},
    "fused sum": {"fused": True, "op": hvd.Sum},
    "float16": {"compression": hvd.Compression.fp16},
    "grace": {"grace": {"compressor": "none", "memory": "none", "communicator": "allreduce"}},
}


@pytest.mark.parametrize(
    "way",
    [pytest.param(w, marks=[pytest.mark.fused_only] * w.startswith("fused")) for w in WAYS],
)
@on_ranks(2, 3)
def test_steps_are_those_of_one_process(context: Context, way: str) -> None:
    net = model()
    given = {
        key: value(net) if key == "groups" and callable(value) else value
        for key, value in WAYS[way].items()
    }
    passes = given.get("backward_passes_per_step", 1)
    with session():
        optimizer = hvd.DistributedOptimizer(sgd(net.parameters()), net.named_parameters(), **given)
        assert isinstance(optimizer, torch.optim.Optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in range(passes):
                loss(net, context.rank, step * passes + number).backward()
            if step != 1:
                optimizer.step()
                continue
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e6)
            with optimizer.skip_synchronize():
                optimizer.step()
    want = trained_alone(context.world_size, passes, given.get("op") != hvd.Sum)
    same(net, want, **({"rtol": 1e-2, "atol": 1e-3} if way == "float16" else {}))


class Twice(torch.optim.SGD):
    """Looks at the gradients before the closure, and asks for it twice, as far as the loss says."""

    def step(self, closure: Any = None) -> Any:
        held = [p.detach().clone() for p in self.param_groups[0]["params"]]
        super().step()
        value = closure()
        for _ in range(1 + (value > 0.1)):
            value = closure()
        with torch.no_grad():
            for param, before in zip(self.param_groups[0]["params"], held):
                param.copy_(before)
        super().step()
        return value


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.3, max_iter=5, line_search_fn="strong_wolfe")


def twice(params: Any) -> torch.optim.Optimizer:
    return Twice(params, lr=0.2)


CLOSURES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "plain": (sgd, {}),
    "clipped": (sgd, {}),
    "LBFGS": (lbfgs, {}),
    "twice": (twice, {"groups": 2}),
    "sum": (sgd, {"op": hvd.Sum}),
    "passes": (sgd, {"backward_passes_per_step": 2}),
    "Adam": (torch.optim.Adam, {"compression": hvd.Compression.none}),
    "grace": (sgd, WAYS["grace"]),
    "fused": (sgd, {"fused": True}),
}


def _train_by_closure(context: Context, way: str) -> None:
    make, given = CLOSURES[way]
    size, passes = context.world_size, given.get("backward_passes_per_step", 1)
    net, alone = model(), model()
    ours = hvd.DistributedOptimizer(make(net.parameters()), net.named_parameters(), **given)
    theirs = make(alone.parameters())

    def closure(step: int) -> Tensor:
        ours.zero_grad()
        values = [loss(net, context.rank, step * 2 + n) for n in range(passes)]
        for value in values:
            value.backward()
        if way == "clipped":
            ours.synchronize()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        return values[-1]

    def alones(step: int) -> Tensor:
        theirs.zero_grad()
        numbers = range(step * 2, step * 2 + passes)
        value = sum(loss(alone, r, n) for n in numbers for r in range(size))
        value = value / (1 if given.get("op") == hvd.Sum else size)
        value.backward()
        if way == "clipped":
            nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        return value

    for step in range(STEPS):
        if way == "twice":  # which looks at gradients that are there
            ours.zero_grad()
            loss(net, context.rank, 1).backward()
            theirs.zero_grad()
            (sum(loss(alone, r, 1) for r in range(size)) / size).backward()
        got = ours.step(functools.partial(closure, step))
        want = theirs.step(functools.partial(alones, step))
        if make in (lbfgs, twice):  # they decide by the loss, so it is all ranks'
            torch.testing.assert_close(got, want.detach(), rtol=1e-3, atol=1e-5)
        if way == "plain":
            assert len(hvd.allgather(got.detach().view(1)).unique()) == size
    same(net, alone, rtol=1e-3, atol=1e-5)
    flat = nn.utils.parameters_to_vector(net.parameters()).detach()
    assert all(torch.equal(row, flat) for row in hvd.allgather(flat[None])), way


@on_ranks(2, 3)
def test_a_closure_is_run_before_gradients_are_waited_for(context: Context) -> None:
    """Each evaluation's gradients are all ranks', and ranks stay alike to the bit."""
    with session():
        for way in CLOSURES:
            if way != "fused" or harness.IS_FUSED:
                _train_by_closure(context, way)


@on_ranks(2)
def test_gradients_in_flight_are_not_touched(context: Context) -> None:
    """Who changes them before they are waited for is told, on all ranks, and can go on."""
    net = model()
    with session():
        optimizer = hvd.DistributedOptimizer(sgd(net.parameters()), net.named_parameters())
        clip = functools.partial(nn.utils.clip_grad_norm_, net.parameters(), 1e-3)
        for change in (clip, net.zero_grad, functools.partial(net.zero_grad, set_to_none=False)):
            loss(net, context.rank, 0).backward()
            change()
            before = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
            with pytest.raises(RuntimeError, match=r"synchronize\(\) after backward"):
                optimizer.step()
            assert torch.equal(nn.utils.parameters_to_vector(net.parameters()), before)
            optimizer.zero_grad()
        loss(net, context.rank, 0).backward()
        with pytest.raises(AssertionError, match="set_backward_passes_per_step"):
            optimizer.set_backward_passes_per_step(2)
        with pytest.raises(RuntimeError, match="skip_synchronize"), optimizer.skip_synchronize():
            optimizer.step(lambda: loss(net, context.rank, 0))
        train(net, optimizer, context.rank)
        with pytest.raises(ValueError, match="LBFGS"):
            hvd.DistributedOptimizer(lbfgs(net.parameters()), op=hvd.Adasum)
    same(net, trained_alone(2))


@pytest.mark.fused_only
@on_ranks(2, 3)
def test_a_joined_rank_serves_fused_steps(context: Context) -> None:
    """It takes part with zeros, so that ranks stay alike; means divide by the number of all."""
    rank, size = context.rank, context.world_size
    clipping = functools.partial(fusedpg.optim.SGD, lr=0.2, momentum=0.9, max_grad_norm=0.1)
    for make in (sgd, clipping):
        # Two optimizers in turn, and operations of the engine between them.
        nets, alone = [model(), model()], [model(), model()]
        with session():
            ours = [hvd.DistributedOptimizer(make(net.parameters()), fused=True) for net in nets]
            for step in range(3 + 2 * rank):
                for net, optimizer in zip(nets, ours):
                    optimizer.zero_grad()
                    loss(net, rank, step).backward()
                    optimizer.step()
                here = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="here")
                assert here.item() == sum(step < 3 + 2 * r for r in range(size))
            assert hvd.join() == size - 1
            theirs = [sgd(net.parameters()) for net in alone]
            for step in range(3 + 2 * (size - 1)):
                for net, optimizer in zip(alone, theirs):
                    optimizer.zero_grad()
                    active = [r for r in range(size) if step < 3 + 2 * r]
                    (sum(loss(net, r, step) for r in active) / size).backward()
                    if make is clipping:
                        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                    optimizer.step()
            same(nets[0], alone[0])
            same(nets[1], alone[1])
            # All have joined: the next steps are those of everybody again.
            ours[0].zero_grad()
            loss(nets[0], rank, 0).backward()
            ours[0].synchronize()
            ours[0].step()
            if rank == 0:
                with pytest.raises(hvd.HorovodInternalError, match=r"ranks \[0\] have joined"):
                    hvd.join()
                time.sleep(0.05)
            else:
                ours[0].zero_grad()
                loss(nets[0], rank, 0).backward()
                with pytest.raises(Exception, match=r"have joined|mismatch|rank 0"):
                    ours[0].synchronize()
            # It has not joined then: the others wait for it again.
            here = hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after")
            assert here.item() == size


@pytest.mark.fused_only
@on_ranks(2, 3)
def test_states_of_fused_optimizers_are_broadcast(context: Context) -> None:
    """The root's, which it alone has loaded, or of which all ranks have slices."""
    net, alone = model(), model()
    theirs = sgd(alone.parameters())
    loss(alone, 0, 0).backward()
    theirs.step()
    with session():
        plain = sgd(net.parameters())
        if context.rank == 1:  # as from a checkpoint
            # A copy, as torch would take the tensors themselves, which theirs goes on to change.
            plain.load_state_dict(copy.deepcopy(theirs.state_dict()))
            net.load_state_dict(alone.state_dict())
        hvd.broadcast_parameters(net.state_dict(), root_rank=1)
        optimizer = hvd.DistributedOptimizer(plain, net.named_parameters(), fused=True)
        hvd.broadcast_parameters(net.state_dict(), root_rank=1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        for step in range(4):
            if step == 2:
                if context.rank == 1:
                    optimizer.param_groups[0]["lr"] = 0.1
                theirs.param_groups[0]["lr"] = 0.1
                hvd.broadcast_optimizer_state(optimizer, root_rank=1)
            optimizer.zero_grad()
            loss(net, context.rank, step).backward()
            optimizer.step()
            theirs.zero_grad()
            total = sum(loss(alone, r, step) for r in range(context.world_size))
            (total / context.world_size).backward()
            theirs.step()
        same(net, alone)
        state = hvd.elastic.TorchState(model=net, optimizer=optimizer, step=4)
        state.commit()
        weights = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
        for _ in range(2):
            train(net, optimizer, context.rank, 2)
            after = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
            assert not torch.equal(after, weights)
            state.sync()  # the state of now
            assert torch.equal(nn.utils.parameters_to_vector(net.parameters()), after)
            state.restore()  # what sync() has saved
            assert torch.equal(nn.utils.parameters_to_vector(net.parameters()), after)
            weights = after


@pytest.mark.parametrize("groups", [None, 1])
@on_ranks(2, 3)
def test_unused_parameters(context: Context, groups: int | None) -> None:
    """A rank without a gradient sends zeros; one that nobody uses changes nothing but momentum."""
    net = model()
    unused = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    with session():
        named = [*net.named_parameters(), ("some", unused[0]), ("none", unused[1])]
        optimizer = hvd.DistributedOptimizer(sgd(p for _, p in named), named, groups=groups)
        for _ in range(2):
            optimizer.zero_grad()
            value = loss(net, context.rank, 0)
            if context.rank == 0:
                value = value + unused[0].sum()
            value.backward()
            optimizer.synchronize()
            grad = torch.full((3,), 1 / context.world_size)
            torch.testing.assert_close(unused[0].grad, grad)
            assert unused[1].grad is not None and not unused[1].grad.any()
            with optimizer.skip_synchronize():
                optimizer.step()
        with pytest.warns(UserWarning, match="skip_synchronize"):
            optimizer.synchronize()
            optimizer.step()


@on_ranks(2, 3)
def test_an_error_leaves_nothing_in_flight(context: Context) -> None:
    """Training goes on after a step whose gradients ranks disagree about."""
    net = model()
    with session():
        given = {"named_parameters": list(net.named_parameters()), "groups": 3}
        wrong = hvd.Compression.fp16 if context.rank else hvd.Compression.none
        optimizer = hvd.DistributedOptimizer(sgd(net.parameters()), compression=wrong, **given)
        loss(net, context.rank, 0).backward()
        with pytest.raises(hvd.HorovodInternalError, match="different data types"):
            optimizer.step()
        optimizer = hvd.DistributedOptimizer(sgd(net.parameters()), **given)
        train(net, optimizer, context.rank)
    same(net, trained_alone(context.world_size))


@on_ranks(2)
def test_misuse(context: Context) -> None:
    net = model()
    with session():
        make = hvd.DistributedOptimizer
        own = sgd(net.parameters())
        for words, given in {
            "unique": {"named_parameters": [("x", p) for p in net.parameters()]},
            "lacks": {"named_parameters": list(net.named_parameters())[1:]},
            "pairs": {"named_parameters": net.parameters()},
            "op=Average": {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
            "one group only": {"groups": [[net[0].weight], [net[0].weight]]},
            "does not go with groups": {"fused": True, "groups": 1},
            "backward_passes_per_step": {"backward_passes_per_step": 0},
        }.items():
            with pytest.raises(ValueError, match=words):
                make(own, **given)
        optimizer = make(own)
        loss(net, context.rank, 0).backward()
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
            loss(net, context.rank, 0).backward()
        with pytest.raises(RuntimeError, match="while it was being reduced"):
            optimizer.step()  # the second pass has been added to a gradient in flight
        optimizer.zero_grad()
        loss(net, context.rank, 0).backward()
        optimizer.step()


@on_ranks(2)
def test_it_takes_over(context: Context) -> None:
    """State, schedulers, and parameters that are added later; an earlier one has no say."""
    net, late = model(), nn.Parameter(torch.zeros(2))
    with session():
        first = sgd(net.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(first, 1, gamma=0.5)
        hvd.DistributedOptimizer(first, net.named_parameters())
        optimizer = hvd.DistributedOptimizer(first, net.named_parameters())
        loss(net, context.rank, 0).backward()
        optimizer.step()
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.1
        optimizer.zero_grad()
        optimizer.add_param_group({"params": [late]})
        (late * (context.rank + 1)).sum().backward()
        optimizer.synchronize()
        torch.testing.assert_close(late.grad, torch.full((2,), 1.5))
        state = copy.deepcopy(optimizer.state_dict())
        with optimizer.skip_synchronize():
            optimizer.step()
        optimizer.load_state_dict(state)
        assert torch.equal(
            optimizer.state[net[0].weight]["momentum_buffer"], state["state"][0]["momentum_buffer"]
        )


@pytest.mark.parametrize("as_dense", [False, True])
@on_ranks(2, 3)
def test_sparse_gradients(context: Context, as_dense: bool) -> None:
    """As dense ones, also in groups with dense ones, and where a rank has none."""
    size = context.world_size

    def make() -> tuple[nn.Embedding, nn.Linear]:
        torch.manual_seed(0)
        return nn.Embedding(10, 3, sparse=True), nn.Linear(3, 1)

    def value(net: tuple[nn.Embedding, nn.Linear], rank: int, step: int) -> Tensor:
        rows = torch.tensor([rank, step, step + rank])
        return net[1](net[0](rows)).square().sum()

    net, alone = make(), make()
    with session():
        named = [(f"{i}.{n}", p) for i, m in enumerate(net) for n, p in m.named_parameters()]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p for _, p in named], lr=0.1),
            named,
            groups=1,
            sparse_as_dense=as_dense,
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            if step < 2 or context.rank == 0:
                value(net, context.rank, step).backward()
            optimizer.step()
    own = torch.optim.SGD([*alone[0].parameters(), *alone[1].parameters()], lr=0.1)
    for step in range(STEPS):
        own.zero_grad()
        ranks = range(size if step < 2 else 1)
        (sum(value(alone, rank, step) for rank in ranks) / size).backward()
        own.step()
    for ours, theirs in zip(net, alone):
        same(ours, theirs)


def adasum(terms: list[Tensor]) -> Tensor:
    """The tree of Maleki et al. 2020, pair by pair."""
    while len(terms) > 1:
        pairs = zip(terms[::2], terms[1::2])
        terms = [
            (1 - (a @ b) / (2 * (a @ a))) * a + (1 - (a @ b) / (2 * (b @ b))) * b for a, b in pairs
        ]
    return terms[0]


@on_ranks(2, 4)
def test_adasum(context: Context) -> None:
    rank, size = context.rank, context.world_size
    draw = [torch.randn(20, generator=torch.Generator().manual_seed(r)).double() for r in range(4)]
    with session():
        torch.testing.assert_close(hvd.allreduce(draw[rank], op=hvd.Adasum), adasum(draw[:size]))
        zeros = hvd.allreduce(torch.zeros(3) if rank else torch.ones(3), op=hvd.Adasum)
        assert zeros.tolist() == [1, 1, 1]
        param = nn.Parameter(torch.ones(20, dtype=torch.double))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.5), op=hvd.Adasum)
        want = torch.ones(20, dtype=torch.double)
        for step in range(2):
            optimizer.zero_grad()
            (param * draw[(rank + step) % size]).sum().backward()
            optimizer.step()
            want += adasum([-0.5 * draw[(r + step) % size] for r in range(size)])
        torch.testing.assert_close(param.detach(), want)


@on_ranks(3)
def test_adasum_needs_a_power_of_two(context: Context) -> None:
    with session():
        with pytest.raises(NotImplementedError, match="power of two"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum)


def with_tensor_lr(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=torch.tensor(0.1), amsgrad=True)


@pytest.mark.parametrize(
    "make",
    [
        sgd,
        torch.optim.Adam,
        torch.optim.Adagrad,
        with_tensor_lr,
    ],
    ids=["sgd", "adam", "adagrad", "tensor lr"],
)
@on_ranks(2, 3)
def test_broadcast_of_states(context: Context, make: Callable[..., Any]) -> None:
    """Ranks without state, or with other numbers, have the root's afterwards."""
    net = model()
    with session():
        optimizer = make(net.parameters())
        if context.rank == 1:
            loss(net, 5, 5).backward()
            optimizer.step()
            optimizer.param_groups[0]["weight_decay"] = 0.25
        hvd.broadcast_parameters(net.state_dict(), root_rank=1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        states = hvd.allgather_object(optimizer.state_dict())
        for state in states:
            assert str(state) == str(states[1])
        assert optimizer.param_groups[0]["weight_decay"] == 0.25
        assert optimizer.param_groups[0]["params"][0] is net[0].weight
        values = hvd.allgather(torch.cat([p.detach().flatten() for p in net.parameters()])[None])
        assert torch.equal(values, values[:1].expand_as(values))


@on_ranks(2, 3)
def test_objects(context: Context) -> None:
    with session():
        own = {"rank": context.rank, "text": "x" * 1000 * context.rank}
        got = hvd.allgather_object(own)
        assert got == [{"rank": r, "text": "x" * 1000 * r} for r in range(context.world_size)]
        assert hvd.broadcast_object(own, root_rank=1) == got[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("momentum", [0.1, None])
@on_ranks(2, 3)
def test_sync_batch_norm(context: Context, momentum: float | None, dtype: torch.dtype) -> None:
    """As BatchNorm on everybody's batch, whose parts have other sizes."""
    rank, size = context.rank, context.world_size
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(size * (size + 1), 3, 4, generator=generator, dtype=dtype) * 2 + 1
    sizes = [2 * (r + 1) for r in range(size)]
    weights = torch.randn(whole.shape, generator=generator, dtype=dtype)
    ours = hvd.SyncBatchNorm(3, momentum=momentum).to(dtype)
    theirs = nn.BatchNorm1d(3, momentum=momentum).to(dtype)
    with session():
        for _ in range(2):
            part = whole.split(sizes)[rank].clone().requires_grad_()
            full = whole.clone().requires_grad_()
            out, want = ours(part), theirs(full)
            torch.testing.assert_close(out, want.split(sizes)[rank])
            (out * weights.split(sizes)[rank]).sum().backward()
            (want * weights).sum().backward()
            torch.testing.assert_close(part.grad, full.grad.split(sizes)[rank])
        for name, own in ours.named_parameters():
            total = hvd.allreduce(own.grad, op=hvd.Sum, name=name)
            torch.testing.assert_close(total, theirs.get_parameter(name).grad)
        for name, buffer in ours.named_buffers():
            torch.testing.assert_close(buffer, theirs.get_buffer(name))
        ours.eval()
        theirs.eval()
        torch.testing.assert_close(ours(whole), theirs(whole))


class _Grace:
    """An object of GRACE's: its communicator's two steps, with a compressor that sends signs."""

    def send_step(self, tensor: Tensor, name: str) -> tuple[Any, Any]:
        return [hvd.allgather_async(tensor.sign().flatten().to(torch.int8), name)], tensor.shape

    def receive_step(self, handles: Any, ctx: Any) -> Tensor:
        votes = hvd.synchronize(handles[0]).view(hvd.size(), *ctx)
        return votes.sum(0).sign().float()


class _GraceInOneStep:
    """The same as GRACE's variant for torch.distributed has it."""

    def send_receive(self, tensors: Any, name: str, ctx: Any) -> Tensor:
        return _Grace().receive_step(tensors, ctx)

    def step(self, tensor: Tensor, name: str) -> Tensor:
        handles, ctx = _Grace().send_step(tensor, name)
        return self.send_receive(handles, name, ctx)


@on_ranks(2, 3)
def test_objects_of_grace(context: Context) -> None:
    """In Horovod's order of arguments, and in GRACE's."""
    for grace in (_Grace(), _GraceInOneStep()):
        param = nn.Parameter(torch.zeros(3))
        for number in range(3):
            with session():
                made = torch.optim.SGD([param], lr=1.0)
                named = [("x", param)]
                if number == 0:
                    optimizer = hvd.DistributedOptimizer(made, named, grace=grace)
                elif number == 1:
                    optimizer = hvd.DistributedOptimizer(made, grace, named_parameters=named)
                else:
                    optimizer = hvd.DistributedOptimizer(made, grace, named)
                signs = torch.tensor([1.0, -1.0, 1.0 if context.rank else -1.0])
                (param * signs * 7).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert param.tolist() == [-3.0, 3.0, 0.0 if context.world_size == 2 else -3.0]
