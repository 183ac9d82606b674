"""A plain state_dict() of a fused optimizer: whole or an error, never a part."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

from checks.cases import randn
from checks.optim_state import BF16, KINDS, Net, equal, fused, steps
from harness import Context

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
        import fusedpg

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


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [value]


CHANGES = ("step", "overlap", "load", "write", "clear", "group")


def never_old(context: Context, change: str) -> None:
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


def fresh(context: Context) -> None:
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


def hooks(context: Context) -> None:
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


def refuses(context: Context) -> None:
    module = Net()
    optimizer = fused(module, "adamw")
    for to in (-1, context.world_size):
        try:
            optimizer.consolidate_state_dict(to=to)
        except ValueError as error:
            assert "rank of the group" in str(error)
        else:
            raise AssertionError("there is no such rank")


def stateful(context: Context, path: str) -> None:
    """dcp.save() with the optimizer itself, which asks by itself for a state dict."""
    module = Net()
    optimizer = fused(module, "adamw")
    steps(context, module, optimizer, 0)
    want = copy.deepcopy(optimizer.local_state_dict())
    dcp.save({"optimizer": optimizer}, checkpoint_id=path)
    steps(context, module, optimizer, 5)
    dcp.load({"optimizer": optimizer}, checkpoint_id=path)
    assert equal(optimizer.local_state_dict(), want)
    dist.barrier()
