"""State of the fused optimizers: checkpoints, resharding, memory."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import fusedpg
import harness
from checks import optim_state
from checks.cases import randn, same
from checks.optim_state import (
    BF16,
    KINDS,
    STEPS,
    Net,
    Reference,
    equal,
    fused,
    set_gradients,
    steps,
    storages,
)
from checks.refused import refused
from harness import Context, on_ranks

WORLDS = (1, 2, 3, harness.slow(4))

# Options of the optimizer, whether under DDP, and the type of the parameters.
ARMS: dict[str, tuple[dict[str, Any], bool, torch.dtype]] = {
    "manual": ({}, False, torch.float32),
    "masters": ({"master_dtype": torch.float32}, False, BF16),
    "shared": ({"share_parameters": True}, False, torch.float32),
    "ddp": ({}, True, torch.float32),
    "overlap": ({"overlap": True}, True, torch.float32),
}


class Layers(torch.nn.Module):
    """Two parameter groups, and a frozen parameter in one of them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(9, 37, dtype=dtype)
        self.frozen = torch.nn.Linear(37, 37, dtype=dtype).requires_grad_(False)
        self.last = torch.nn.Linear(37, 5, dtype=dtype)

    def groups(self) -> list[dict[str, Any]]:
        rest = [*self.frozen.parameters(), *self.last.parameters()]
        return [{"params": list(self.first.parameters())}, {"params": rest, "lr": 0.01}]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.first(x)).tanh())


class Training:
    def __init__(self, kind: str, arm: str) -> None:
        self.options, with_ddp, self.dtype = ARMS[arm]
        self.net = Layers(self.dtype)
        name, arguments = KINDS[kind]
        self.ddp = DistributedDataParallel(self.net) if with_ddp else None
        self.optimizer = getattr(fusedpg.optim, name)(
            self.net.groups(), **arguments, **self.options, ddp=self.ddp
        )

    def backward(self, step: int, rank: int) -> None:
        x = randn(5, step, rank, numel=4 * 9).view(4, 9).to(self.dtype)
        (self.ddp or self.net)(x).float().square().mean().backward()

    def steps(self, context: Context, begin: int, count: int = 3) -> None:
        for step in range(begin, begin + count):
            self.backward(step, context.rank)
            self.optimizer.step()
            self.optimizer.zero_grad()


@contextmanager
def partial(context: Context) -> Iterator[None]:
    """What happens inside asks for state of which this rank has a part."""
    try:
        yield
    except RuntimeError as error:
        for name in ("consolidate_state_dict", "full_state_dict", "get_optimizer_state_dict"):
            assert name in str(error), error
        assert f"rank {context.rank} of {context.world_size}" in str(error)
    else:
        raise AssertionError("a rank's part was given as if it were whole")


def saved(value: Any) -> Any:
    """Through a file."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [value]


CHANGES = ("step", "overlap", "load", "write", "clear", "group")

pytestmark = [
    pytest.mark.fused_only,
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]

WAYS = (*optim_state.OPTIONS, "dcp whole", "dcp offload", "full", "merge", "consolidate")


def skip_whole(kind: str) -> None:
    if kind == "sgd":
        pytest.skip("torch loads no whole state that has no tensor")


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_two_then_four_then_one(way: str, kind: str, layout: str, tmp_path: Path) -> None:
    if layout != "contiguous" and kind not in ("adam", "lamb"):
        pytest.skip("the layout of all state is the same")
    if way in ("dcp whole", "dcp offload"):
        skip_whole(kind)
    folders = [str(tmp_path / name) for name in "ab"]
    for folder in folders:
        Path(folder).mkdir()
    run = optim_state.leg
    harness.pool(2).run(run, way, kind, "", folders[0], 0, layout)
    harness.pool(4).run(run, way, kind, folders[0], folders[1], 1, layout)
    harness.pool(1).run(run, way, kind, folders[1], "", 2, layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16 master"])
@pytest.mark.parametrize("kind", ["momentum", "adam", "lamb"])
@pytest.mark.parametrize("way", ["own", *WAYS[::-1]])
def test_same_world_same_bits(way: str, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    if way in ("dcp whole", "dcp offload"):
        skip_whole(kind)
    harness.pool(2).run(optim_state.same_world, way, kind, str(tmp_path), dtype)


@pytest.mark.parametrize("how", ["load", "fuse"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("lamb", "sgd")])
def test_from_torch_and_back(workers: harness.Workers, kind: str, how: str) -> None:
    workers.run(optim_state.from_torch, kind, 1, how)


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adamw"])
def test_from_a_torch_optimizer_without_state(pair: harness.Workers, kind: str) -> None:
    for how in ("load", "fuse"):
        pair.run(optim_state.from_torch, kind, 0, how)


@pytest.mark.parametrize("how", ["own", "full", "to torch"])
@on_ranks(2)
def test_checkpoint_before_the_first_step(context: Context, how: str) -> None:
    """A checkpoint of an SGD that has not stepped: the first step has no dampening."""
    module = Net()
    optimizer = fused(module, "momentum")
    reference = Reference("momentum")
    if how == "to torch":
        last = Reference("momentum")
        last.optimizer.load_state_dict(optimizer.full_state_dict(rank0_only=False))
        last.steps(0)
        module = last.module
    else:
        own = how == "own"
        state = optimizer.local_state_dict() if own else optimizer.full_state_dict(False)
        module = Net()
        optimizer = fused(module, "momentum")
        optimizer.load_state_dict(state)
        steps(context, module, optimizer, 0)
    reference.steps(0)
    reference.check(module)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(*WORLDS)
def test_only_rank_0_saves(context: Context, kind: str) -> None:
    """state_dict() is not a collective: only rank 0 calls it."""
    module = Net()
    optimizer = fused(module, kind)
    steps(context, module, optimizer, 0)
    if context.rank == 0:
        buffer = io.BytesIO()
        torch.save(optimizer.local_state_dict(), buffer)
        buffer.seek(0)
        again = torch.load(buffer, weights_only=True)
        assert equal(again, optimizer.local_state_dict())
        optimizer.load_state_dict(again)
    steps(context, module, optimizer, STEPS)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert bool((tensor == context.world_size).all())


@pytest.mark.parametrize("form", ["own", "full"])
@pytest.mark.parametrize("kind", ["momentum", "adam", "lamb"])
@on_ranks(2)
def test_loading_leaves_the_input_alone(context: Context, kind: str, form: str) -> None:
    """load_state_dict neither changes its argument nor keeps parts of it."""
    module = Net()
    optimizer = fused(module, kind)
    steps(context, module, optimizer, 0)
    if form == "own":
        state = copy.deepcopy(optimizer.local_state_dict())
    else:
        state = optimizer.full_state_dict(rank0_only=False)
    state["param_groups"][0]["lr"] = 0.01
    kept = copy.deepcopy(state)
    optimizer.load_state_dict(state)
    assert equal(state, kept), "load_state_dict changed its input"
    steps(context, module, optimizer, STEPS)
    optimizer.param_groups[0]["lr"] = 0.5
    assert equal(state, kept), "steps changed what was loaded"
    held = storages([list(one.values()) for one in optimizer.state.values()])
    assert held.isdisjoint(storages(state))
    # And what was given out does not follow later steps, or says so by being local.
    full = optimizer.full_state_dict(rank0_only=False)
    assert held.isdisjoint(storages(full))


def test_foreign_slices_are_refused(trio: harness.Workers, tmp_path: Path) -> None:
    for foreign, small in trio.run(optim_state.foreign_slices, str(tmp_path)):
        assert "another rank" in foreign
        assert "full_state_dict" in foreign and "merge_state_dicts" in foreign
        assert "exp_avg" in small and "(3,)" in small


def whole_or_raises(context: Context, kind: str, arm: str) -> None:
    training = Training(kind, arm)
    optimizer = training.optimizer
    training.steps(context, 0)
    alone = context.world_size == 1
    if kind != "sgd" or arm == "masters":
        if not alone:
            with partial(context):
                optimizer.state_dict()
        # In the middle of an accumulation, which is no part of the state.
        if arm in ("manual", "masters", "shared"):
            training.backward(3, context.rank)
    full = optimizer.full_state_dict(rank0_only=False)
    for to in (0, context.world_size - 1, None):
        optimizer.consolidate_state_dict(to=to)
        if to in (None, context.rank):
            mine = optimizer.state_dict()
            assert equal(saved(mine), full), (mine, full)
            assert not any(hasattr(value, "local") for value in leaves(mine))
        elif kind != "sgd" or arm == "masters":
            with partial(context):
                optimizer.state_dict()
    # It loads everywhere, into a new optimizer that then does what the first one does.
    mine = saved(optimizer.state_dict())
    optimizer.zero_grad()
    again = Training(kind, arm)
    weights = copy.deepcopy(training.net.state_dict())
    with torch.no_grad(), again.optimizer.writing_parameters():
        if "share_parameters" not in again.options or context.rank == 0:
            again.net.load_state_dict(weights)
    again.optimizer.load_state_dict(mine)
    for one in (training, again):
        one.steps(context, 4)
    for a, b in zip(training.net.parameters(), again.net.parameters(), strict=True):
        assert torch.equal(a, b)
    if kind != "lamb" and training.dtype == torch.float32:
        name, arguments = KINDS[kind]
        theirs = getattr(torch.optim, name)(training.net.groups(), **arguments)
        theirs.load_state_dict(mine)
        assert len(theirs.state_dict()["param_groups"]) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_is_whole_or_raises(workers: harness.Workers, kind: str) -> None:
    for arm in ARMS:
        workers.run(whole_or_raises, kind, arm)


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_what_was_consolidated_is_never_old(context: Context, change: str) -> None:
    """After the state has changed, nobody gets what was consolidated before."""
    training = Training("adamw", "overlap" if change == "overlap" else "manual")
    optimizer = training.optimizer
    training.steps(context, 0)
    optimizer.consolidate_state_dict(to=None)
    optimizer.param_groups[0]["lr"] = 0.125  # no state
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.125
    if change == "step":
        training.steps(context, 4, 1)
    elif change == "overlap":
        training.backward(4, context.rank)  # has updated
    elif change == "load":
        optimizer.load_state_dict(optimizer.state_dict())
    elif change == "write":
        param = training.net.first.weight
        optimizer.state[param]["exp_avg"].mul_(0.5)
    elif change == "clear":
        del optimizer.state[training.net.first.weight]["exp_avg"]
    else:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(77))]})
    with partial(context):
        optimizer.state_dict()
    dist.barrier()


@on_ranks(2)
def test_a_fresh_state_dict_is_whole(context: Context) -> None:
    """Before the first step all state is what a new optimizer has, as in torch."""
    module = Net(BF16)
    optimizer = fused(module, "adamw", master_dtype=torch.float32)
    for _ in range(2):  # frameworks do this when they wrap an optimizer
        state = optimizer.state_dict()
        assert state["state"] == {}
        optimizer.load_state_dict(saved(state))
    theirs = torch.optim.AdamW(Net(BF16).parameters())
    theirs.load_state_dict(state)
    steps(context, module, optimizer, 0)
    with partial(context):
        optimizer.state_dict()
    dist.barrier()


@on_ranks(2)
def test_hooks_of_state_dicts_see_what_is_given(context: Context) -> None:
    """A user's hook runs on what the caller gets, once a call."""
    module = Net()
    optimizer = fused(module, "adamw")
    steps(context, module, optimizer, 0)
    seen = []

    def note(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append(type(state_dict["state"][0]["exp_avg"]).__name__)
        return {**state_dict, "note": len(seen)}

    optimizer.register_state_dict_post_hook(note)
    assert optimizer.local_state_dict()["note"] == 1
    optimizer.consolidate_state_dict(to=None)
    assert optimizer.state_dict()["note"] == 2
    assert optimizer.full_state_dict(rank0_only=False)["note"] == 3
    assert seen == ["SliceTensor", "Tensor", "Tensor"]


@on_ranks(2)
def test_consolidates_to_a_rank_only(context: Context) -> None:
    module = Net()
    optimizer = fused(module, "adamw")
    for to in (-1, context.world_size):
        with refused("rank of the group", ValueError):
            optimizer.consolidate_state_dict(to=to)


@on_ranks(2)
def test_dcp_saves_an_optimizer_by_itself(context: Context, tmp_path: Path) -> None:
    """dcp.save() with the optimizer itself, which asks by itself for a state dict."""
    module = Net()
    optimizer = fused(module, "adamw")
    steps(context, module, optimizer, 0)
    want = copy.deepcopy(optimizer.local_state_dict())
    dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path)
    steps(context, module, optimizer, 5)
    dcp.load({"optimizer": optimizer}, checkpoint_id=tmp_path)
    assert equal(optimizer.local_state_dict(), want)
    dist.barrier()


@on_ranks(2)
def test_masters(context: Context) -> None:
    """What the fp32 copies of half parameters are loaded from."""
    net = Net(BF16)
    optimizer = fused(net, "adamw", master_dtype=torch.float32)
    steps(context, net, optimizer, 0)
    for module_state in optimizer.local_state_dict()["state"].values():
        assert module_state["master_param"].dtype == torch.float32
        assert module_state["exp_avg"].dtype == torch.float32
    whole = optimizer.full_state_dict(rank0_only=False)
    assert any(
        not same(state["master_param"], state["master_param"].to(BF16).float())
        for state in whole["state"].values()
    ), "nothing is lost by rounding, so this shows nothing"
    # A checkpoint of torch has moments of the parameters' type and no masters.
    plain = Net(BF16)
    plain.load_state_dict(net.state_dict())
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.02)
    set_gradients(plain, 0, 0, 1)
    theirs.step()
    mine = fusedpg.optim.AdamW(plain.parameters(), lr=0.02, master_dtype=torch.float32)
    mine.load_state_dict(theirs.state_dict())
    for param in plain.parameters():
        offset, length = fusedpg.shard_range(param.numel(), context.world_size, context.rank)
        rounded = param.detach().flatten()[offset : offset + length].float()
        assert same(mine.state[param]["master_param"], rounded)
        assert mine.state[param]["exp_avg"].dtype == torch.float32
        assert float(mine.state[param]["step"]) == 1
    # model.load_state_dict after construction, to values that no master rounds to.
    late = Net(BF16)
    optimizer = fused(late, "sgd", master_dtype=torch.float32)
    steps(context, late, optimizer, 0)
    new = {name: torch.full_like(value, 7.0) for name, value in late.state_dict().items()}
    late.load_state_dict(new)
    for param in late.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    for param in late.parameters():
        assert same(param.detach(), torch.full_like(param, 7.0 - 0.05))
        master = optimizer.state[param]["master_param"]
        assert bool(((master - (7.0 - 0.05)).abs() < 1e-6).all())


# --- memory ---------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["momentum", "adamw", "lamb"])
def test_state_is_split(workers: harness.Workers, kind: str) -> None:
    factor = 4 if kind == "momentum" else 8
    for reported, held, count in workers.run(optim_state.state_bytes, kind, 701, 5):
        assert reported <= factor * count / workers.world_size * 1.01
        assert reported <= held <= reported * 1.01


@pytest.mark.long
def test_memory_of_processes() -> None:
    width, depth = 1009, 6
    mib = 4 * depth * (width * width + width) / 2**20
    added = {}
    for which in ("fused", "torch", "zero"):
        with harness.Workers(2) as workers:
            answers = workers.run(optim_state.ddp_memory, which, width, depth)
            added[which] = sum(answers)
    # Of two ranks: two moments each with torch, two between them when split.
    assert added["torch"] > 3.6 * mib, added
    assert added["fused"] < 2 * mib * 1.15 + 4, added
    assert added["fused"] < 0.7 * added["torch"], added
    assert added["fused"] < added["zero"] * 1.1 + 4, added


def test_memory_of_shared_parameters() -> None:
    numel = 8 << 20
    mib = 4 * numel / 2**20
    size = 2
    added = {}
    for share in (False, True):
        with harness.Workers(size, oracle=False) as workers:
            added[share] = sum(workers.run(optim_state.shared_memory, share, numel))
    assert added[False] > 0.9 * mib * size, added
    assert added[True] < 1.2 * mib + 4 * size, added


@pytest.mark.parametrize("with_ddp", [False, True], ids=["manual", "ddp"])
def test_sharing_changes_no_bit(workers: harness.Workers, with_ddp: bool) -> None:
    answers = workers.run(optim_state.sharing, with_ddp)
    assert all(one == answers[0] for one in answers)


@on_ranks(*WORLDS)
def test_writing_shared_parameters(context: Context) -> None:
    """A write by rank 0 is seen by the others; a write outside is an error."""
    module = Net()
    optimizer = fused(module, "adamw", share_parameters=True)
    steps(context, module, optimizer, 0)
    with torch.no_grad(), optimizer.writing_parameters():
        if context.rank == 0:
            module.body.fill_(17)
    assert bool((module.body == 17).all())
    steps(context, module, optimizer, STEPS)
    assert not bool((module.body == 17).any())
    with torch.no_grad():
        module.body.mul_(1)
    with refused("writing_parameters"):
        steps(context, module, optimizer, 2 * STEPS)
    dist.barrier()


@pytest.mark.parametrize("share", [False, True])
def test_parameters_outlive_their_group(share: bool) -> None:
    with harness.Workers(3, oracle=False) as workers:
        workers.run(optim_state.outlives, share)


@pytest.mark.parametrize(("saved", "loads"), sorted(optim_state.OTHER_KINDS))
@on_ranks(2)
def test_state_of_another_kind(context: Context, saved: str, loads: str) -> None:
    """A state dict of another kind of optimizer is refused at once, and nothing has changed."""
    module = Net()
    theirs, ours = fused(module, saved), fused(module, loads)
    steps(context, module, theirs, 0)
    steps(context, module, ours, 0)
    state = theirs.full_state_dict(rank0_only=False)
    before = ours.full_state_dict(rank0_only=False)
    with refused(f"not {type(ours).__name__}'s", ValueError):
        ours.load_state_dict(state)
    after = ours.full_state_dict(rank0_only=False)
    assert before["param_groups"] == after["param_groups"]
    for number, values in before["state"].items():
        assert all(same(after["state"][number][key], value) for key, value in values.items())


@pytest.mark.parametrize("how", ["value", "one rank", "all", "layout"])
@pytest.mark.parametrize("mode", ["manual", "ddp", "overlap"])
@pytest.mark.parametrize("kind", ["adamw", harness.slow("momentum")])
@on_ranks(2)
def test_values_that_differ_between_ranks(context: Context, kind: str, mode: str, how: str) -> None:
    """Ranks load state dicts whose values differ: the next step raises, and has moved nothing."""
    module = Net()
    net: Any = module if mode == "manual" else DistributedDataParallel(module, bucket_cap_mb=0.01)
    ddp = None if mode == "manual" else net
    optimizer = fused(module, kind, ddp=ddp, overlap=mode == "overlap")

    def step() -> None:
        loss = torch.zeros(())
        for i, param in enumerate(module.parameters()):
            loss = loss + (param * randn(3, i, numel=param.numel()).view_as(param)).sum()
        # DDP wants a forward of its own.
        module.forward = lambda: loss  # type: ignore[method-assign]
        net().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    state = optimizer.full_state_dict(rank0_only=False)
    other = copy.deepcopy(state)
    last = context.rank == context.world_size - 1
    key = "momentum_buffer" if kind == "momentum" else "exp_avg"
    if how == "value":
        # The last element belongs to the last rank alone.
        other["state"][1][key].view(-1)[0 if last else -1] += 1e-3
    optimizer.load_state_dict(other if last and how != "all" else state)
    if how == "one rank" and not last:
        optimizer.load_state_dict(optimizer.local_state_dict())
    before = [param.detach().clone() for param in module.parameters()]
    if how in ("all", "layout"):
        if how == "layout":
            for values in other["state"].values():
                if values[key].dim() == 4:
                    values[key] = values[key].contiguous(memory_format=torch.channels_last)
            optimizer.load_state_dict(other if last else state)
        step()
        step()
        return
    with refused("a state dict that was loaded", dist.DistBackendError):
        step()
    assert all(same(p.detach(), old) for p, old in zip(module.parameters(), before, strict=True))
    for param in module.parameters():
        param.grad = None
    if mode != "overlap":
        with refused("a state dict that was loaded", dist.DistBackendError):
            step()  # it does not go away by itself
    optimizer.zero_grad()
    optimizer.load_state_dict(state)
    step()
    step()
