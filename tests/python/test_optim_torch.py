"""What users expect of an optimizer of torch.optim, with torch.optim as the oracle."""

from __future__ import annotations

import ast
import copy
import io
import pickle
import sys
import time
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedpg
import harness
from checks import optim_assumptions
from checks.cases import distance, randn, same
from checks.optim_script import in_mode
from checks.refused import refused
from fuzz import core, optimizers
from harness import Context, on_ranks, slow

NEWER = (
    "amsgrad",
    "capturable",
    "decoupled_weight_decay",
    "differentiable",
    "foreach",
    "fused",
    "maximize",
    "nesterov",
)
SHAPES = ((67,), (5, 13), (3,))
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    "Adam": {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1},
    "AdamW": {"lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1},
}


def parameters(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    sizes = [torch.Size(shape).numel() for shape in shapes]
    values = [randn(5, i, numel=size) for i, size in enumerate(sizes)]
    return [nn.Parameter(v.reshape(s)) for v, s in zip(values, shapes, strict=True)]


class Twins:
    """An optimizer of ours in manual mode and torch's, with the same gradients on all ranks."""

    def __init__(self, kind: str, **options: Any) -> None:
        self.options = {**OPTIONS[kind], **options}
        self.mine, self.theirs = parameters(), parameters()
        self.fused: Any = getattr(fusedpg.optim, kind)(self.mine, **self.options)
        self.torch: Any = getattr(torch.optim, kind)(self.theirs, foreach=False, **self.options)
        self.both = (self.fused, self.torch)

    def step(self, number: int, used: Iterable[int] | None = None) -> None:
        chosen = range(len(self.mine)) if used is None else set(used)
        for optimizer, params in zip(self.both, (self.mine, self.theirs), strict=True):
            for i, param in enumerate(params):
                grad = randn(6, i, number, numel=param.numel()).reshape(param.shape)
                param.grad = grad if i in chosen else None
            optimizer.step()

    def steps(self, *numbers: int) -> None:
        for number in numbers:
            self.step(number)
        self.agree()

    def agree(self) -> None:
        for i, (mine, theirs) in enumerate(zip(self.mine, self.theirs, strict=True)):
            assert distance(mine.detach(), theirs.detach()) <= 1e-6, i
            ours = self.fused.state.get(mine, {})
            want = self.torch.state.get(theirs, {})
            assert ours.keys() == want.keys(), (i, ours.keys(), want.keys())
            if "step" in want:
                assert float(ours["step"]) == float(want["step"]), i
        whole, want = self.fused.full_state_dict(rank0_only=False), self.torch.state_dict()
        assert whole["state"].keys() == want["state"].keys()
        for number, values in want["state"].items():
            for key, value in values.items():
                got = whole["state"][number][key]
                assert distance(got.double(), value.double()) <= 1e-5, (number, key)

    def groups_agree(self) -> None:
        for ours, want in zip(self.fused.param_groups, self.torch.param_groups, strict=True):
            assert ours.keys() == want.keys(), ours.keys() ^ want.keys()
            for key in ours.keys() - {"params", "foreach", "fused"}:
                assert ours[key] == want[key], key

    def load(self, state_dict: dict[str, Any]) -> None:
        kept = copy.deepcopy(state_dict)
        for optimizer in self.both:
            optimizer.load_state_dict(state_dict)
        assert repr(state_dict) == repr(kept)


def trained(kind: str, **options: Any) -> dict[str, Any]:
    """A state dict of torch.optim after three steps."""
    twins = Twins(kind, **options)
    twins.steps(0, 1, 2)
    return copy.deepcopy(twins.torch.state_dict())


NAN = float("nan")
BAD: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"lr": -1.0},
        {"lr": torch.tensor([1.0, 2.0])},
        {"momentum": -0.5},
        {"weight_decay": -0.1},
        {"nesterov": True},
        {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
    ],
    "Adam": [
        {"lr": -1.0},
        {"lr": NAN},
        {"lr": torch.tensor([1.0, 2.0])},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, 1.0)},
        {"betas": (-0.1, 0.9)},
        {"betas": (0, 0.9)},
        {"betas": (NAN, 0.9)},
        {"eps": -1e-8},
        {"eps": NAN},
        {"weight_decay": -0.1},
        {"weight_decay": NAN},
    ],
}
NOT_A_NUMBER = [{"lr": NAN}, {"momentum": NAN}, {"dampening": NAN}, {"weight_decay": NAN}]


def later(make: Any, text: str, options: dict[str, Any]) -> None:
    """The same of a group; a group that is refused leaves nothing behind."""
    params = parameters()
    optimizer = make(params[:1])
    with refused(text, ValueError):
        optimizer.add_param_group({"params": params[1:], **options})
    assert len(optimizer.param_groups) == 1
    with refused("complex", TypeError):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.cfloat))]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": params[1:]})
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()


# --- a torch that is not known -----------------------------------------------------------


def _in(module: str, source: str, name: str) -> Any:
    """A function as if it stood in that module of torch."""
    namespace = {**vars(sys.modules[module])}
    exec(compile(source, module, "exec"), namespace)
    return namespace[name]


def _reads() -> dict[str, Callable[[Any], Any]]:
    """What would be zeros, garbage or a crash if it went past the guard."""

    def buffer() -> torch.Tensor:
        return torch.full((6, 5), 7.0)

    sgd = {
        "weight_decay": 0.0,
        "momentum": 0.0,
        "lr": 0.1,
        "dampening": 0.0,
        "nesterov": False,
        "is_first_step": False,
    }
    return {
        "copy_": lambda g: buffer().copy_(g),
        "copy_ of data": lambda g: buffer().copy_(g.data),
        "copy_ of detached": lambda g: buffer().copy_(g.detach()),
        "foreach_copy_": lambda g: torch._foreach_copy_([buffer()], [g]),
        "setitem": lambda g: buffer().__setitem__(slice(None), g),
        "clone": torch.clone,
        "times": lambda g: g * 2,
        "add_": lambda g: buffer().add_(g),
        "add_ to it": lambda g: g.add_(1.0),
        "lerp_": lambda g: buffer().lerp_(g, 0.5),
        "out": lambda g: torch.mul(g, 2, out=buffer()),
        "norm out": lambda g: torch.linalg.vector_norm(g, out=torch.zeros(())),
        "norm keepdim": lambda g: torch.linalg.vector_norm(g, keepdim=True),
        "norm of rows": lambda g: g.norm(dim=0),
        "least": lambda g: g.norm(-float("inf")),
        "norm of order -1": lambda g: g.norm(-1),
        "foreach_norm, mixed": lambda g: torch._foreach_norm([buffer(), g]),
        "sum": torch.sum,
        "item": lambda g: g[0, 0].item(),
        "numpy": lambda g: g.numpy(),
        "asarray": lambda g: __import__("numpy").asarray(g),
        "tolist": lambda g: g.tolist(),
        "dlpack": lambda g: __import__("numpy").from_dlpack(g),
        "set_": lambda g: torch.empty(0).set_(g),
        "view": lambda g: g.view(-1),
        "isfinite": torch.isfinite,
        "equal": lambda g: torch.equal(g, buffer()),
        "double": lambda g: g.double(),
        "cat": lambda g: torch.cat([g, buffer()]),
        "autograd": lambda g: (nn.Parameter(buffer()) * g).sum(),
        "pickle": pickle.dumps,
        "save": lambda g: torch.save({"g": g}, io.BytesIO()),
        "deepcopy": copy.deepcopy,
        "copy": copy.copy,
        "share": lambda g: g.share_memory_(),
        "apply_": lambda g: g.apply_(abs),
        "map2_": lambda g: g.map2_(buffer(), buffer(), max),
        "all_reduce": dist.all_reduce,
        "all_gather_object": lambda g: pickle.dumps([g]),
        "sparse_all_reduce": fusedpg.sparse_all_reduce,
        "fused_sgd_": lambda g: fusedpg.fused_sgd_([buffer()], [g], [], **sgd),
        "fused_sgd_ async": lambda g: fusedpg.fused_sgd_([buffer()], [g], [], async_op=True, **sgd),
        "_fused_sgd_": lambda g: torch._fused_sgd_([buffer()], [g], [], maximize=False, **sgd),
        "new parameter": lambda g: nn.Parameter(g).sum(),
        "unflattened": lambda g: nn.utils.parameters_to_vector([g]),
    }


pytestmark = [
    pytest.mark.fused_only,
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]

KINDS = ("SGD", "Adam", "AdamW")
MODES = ("manual", "ddp", "overlap")
WRITES = ("copy_", "data", "set data", "one element", "numpy", "nothing")


# --- state dicts --------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_state_dicts_of_older_torch(context: Context, kind: str) -> None:
    """Of versions of torch without today's options, and with numbers for counters."""
    state_dict = trained(kind)
    for group in state_dict["param_groups"]:
        for key in list(group):
            if key in NEWER:
                del group[key]
    for values in state_dict["state"].values():
        if "step" in values:
            values["step"] = int(values["step"])
    twins = Twins(kind)
    twins.load(state_dict)
    twins.groups_agree()
    twins.steps(3, 4)


@pytest.mark.parametrize(("source", "target"), [("Adam", "AdamW"), ("AdamW", "Adam")])
@on_ranks(2)
def test_state_dicts_of_another_kind(context: Context, source: str, target: str) -> None:
    """Adam into AdamW decouples its weight decay, as in torch; AdamW into Adam stays AdamW."""
    state_dict = trained(source)
    twins = Twins(target)
    twins.load(state_dict)
    twins.groups_agree()
    twins.steps(3, 4)


@on_ranks(2)
def test_state_dict_of_sgd_without_momentum(context: Context) -> None:
    """Older versions saved buffers of None."""
    state_dict = trained("SGD", momentum=0, dampening=0)
    state_dict["state"] = {i: {"momentum_buffer": None} for i in range(len(SHAPES))}
    twins = Twins("SGD")
    for optimizer in twins.both:
        optimizer.load_state_dict(state_dict)
        optimizer.param_groups[0].update(momentum=0.9, dampening=0.3)
    for number in range(3):
        twins.step(number)
    for mine, theirs in zip(twins.mine, twins.theirs, strict=True):
        assert distance(mine.detach(), theirs.detach()) <= 1e-6


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(1, 2, 3, slow(4))
def test_parameter_without_elements(context: Context, kind: str) -> None:
    """A parameter without elements has state without elements."""
    params = parameters(((5,), (0, 3), (2,)))
    optimizer = getattr(fusedpg.optim, kind)(params, **OPTIONS[kind])
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    whole = optimizer.full_state_dict()
    if context.rank == 0:
        for value in whole["state"][1].values():
            assert tuple(value.shape) in ((0, 3), ())
        getattr(torch.optim, kind)(parameters(((5,), (0, 3), (2,)))).load_state_dict(whole)
    else:
        assert whole == {}
    again = getattr(fusedpg.optim, kind)(parameters(((5,), (0, 3), (2,))), **OPTIONS[kind])
    again.load_state_dict(optimizer.full_state_dict(rank0_only=False))


# --- state that comes with the first gradient ---------------------------------------
def frozen_memory(context: Context, mode: str) -> int:
    """Bytes of state with large frozen and unused parameters."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Parameter(torch.ones(1 << 20), requires_grad=False)
            self.unused = nn.Parameter(torch.ones(1 << 20))
            self.used = nn.Parameter(torch.ones(64))

        def forward(self) -> torch.Tensor:
            return (self.used * self.frozen[:64]).sum()

    model = Model()
    net, optimizer = in_mode(mode, model, ddp={"find_unused_parameters": True})
    for _ in range(3):
        net().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert set(optimizer.state) == {model.used}
    assert optimizer.local_state_dict()["state"].keys() == {2}
    return int(optimizer.memory_stats()["state"])


@pytest.mark.parametrize("mode", MODES)
def test_frozen_parameters_have_no_state(pair: harness.Workers, mode: str) -> None:
    assert pair.run(frozen_memory, mode) == [2 * 4 * 32 + 4] * 2


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_skipped_first_step_is_none(context: Context, kind: str) -> None:
    """GradScaler skips the first step: it remains the first."""
    params = parameters()
    optimizer = getattr(fusedpg.optim, kind)(params, **OPTIONS[kind])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    twins = Twins(kind)
    for overflow in (True, False, False):
        grads = [randn(6, i, 0, numel=p.numel()).reshape(p.shape) for i, p in enumerate(params)]
        loss = torch.stack([(p * g).sum() for p, g in zip(params, grads, strict=True)]).sum()
        scaler.scale(loss * (torch.inf if overflow and context.rank == 0 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if overflow:
            assert not optimizer.state
        else:
            twins.step(0)
    for mine, want in zip(params, twins.theirs, strict=True):
        assert distance(mine.detach(), want.detach()) <= 1e-6


# --- options and groups that change -------------------------------------------------
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@on_ranks(2)
def test_amsgrad_turned_on_later(context: Context, kind: str) -> None:
    """torch raises KeyError; so does clearing not help there, but begin anew."""
    twins = Twins(kind)
    twins.steps(0, 1)
    before = [param.detach().clone() for param in twins.mine]
    for optimizer in twins.both:
        optimizer.param_groups[0]["amsgrad"] = True
    with refused("max_exp_avg_sq"):
        twins.fused.step()
    with refused("max_exp_avg_sq", KeyError):
        twins.torch.step()
    assert all(same(a.detach(), b) for a, b in zip(twins.mine, before, strict=True))
    for optimizer in twins.both:
        optimizer.state.clear()
    twins.steps(2, 3)
    for optimizer in twins.both:
        optimizer.param_groups[0]["amsgrad"] = False
    twins.steps(4)
    for optimizer in twins.both:
        optimizer.param_groups[0]["amsgrad"] = True
    twins.steps(5)


@on_ranks(3)
def test_state_cleared_on_one_rank(context: Context) -> None:
    """Ranks that differ raise; nothing hangs."""
    twins = Twins("AdamW")
    twins.steps(0, 1)
    if context.rank == 0:
        del twins.fused.state[twins.mine[0]]
    with refused("ranks have state of different parameters"):
        twins.fused.full_state_dict()


@on_ranks(2)
def test_groups_edited_by_hand(context: Context) -> None:
    """Groups and parameters may be taken out of param_groups; not put in by hand."""
    for kind in ("SGD", "AdamW"):
        mine, theirs = parameters(), parameters()
        optimizers = [
            getattr(where, kind)([{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(ps)])
            for where, ps in ((fusedpg.optim, mine), (torch.optim, theirs))
        ]

        def step(number: int) -> None:
            for optimizer, params in zip(optimizers, (mine, theirs), strict=True):  # noqa: B023
                for i, param in enumerate(params):
                    param.grad = randn(6, i, number, numel=param.numel()).reshape(param.shape)
                optimizer.step()

        step(0)
        for optimizer in optimizers:
            del optimizer.param_groups[0]
        step(1)
        for optimizer in optimizers:
            moved = optimizer.param_groups.pop()["params"]
            optimizer.param_groups[0]["params"] += moved
        step(2)
        for a, b in zip(mine, theirs, strict=True):
            assert distance(a.detach(), b.detach()) <= 1e-6
        extra = nn.Parameter(torch.ones(3))
        optimizers[0].param_groups[0]["params"].append(extra)
        extra.grad = torch.ones(3)
        with refused("add_param_group"):
            optimizers[0].step()


# --- copies, arguments, hooks -------------------------------------------------------
@on_ranks(2)
def test_copies_are_refused(context: Context) -> None:
    """A copy would share slices and a group with the original."""
    twins = Twins("AdamW")
    twins.steps(0, 1)
    ways: tuple[Callable[[Any], Any], ...] = (
        copy.deepcopy,
        copy.copy,
        pickle.dumps,
        lambda optimizer: torch.save(optimizer, io.BytesIO()),
    )
    for way in ways:
        with refused("state_dict", TypeError):
            way(twins.fused)
    twins.steps(2, 3)


@pytest.mark.parametrize("kind", [*KINDS, "LAMB"])
@on_ranks(2)
def test_arguments_are_checked_when_given(context: Context, kind: str) -> None:
    """What torch refuses, with its words; and NaN, which its SGD takes."""
    make = getattr(fusedpg.optim, kind)
    oracle = getattr(torch.optim, "AdamW" if kind == "LAMB" else kind)
    for options in BAD["SGD" if kind == "SGD" else "Adam"]:
        try:
            oracle(parameters(), **options)
        except ValueError as error:
            text = str(error)
        with refused(text, ValueError):
            make(parameters(), **options)
        later(make, text, options)
    if kind == "SGD":
        for options in NOT_A_NUMBER:
            with refused("Invalid", ValueError):
                make(parameters(), **options)
            later(make, "Invalid", options)
    with refused("differentiable", ValueError):
        make(parameters(), differentiable=True)
    later(make, "differentiable", {"differentiable": True})


@on_ranks(2)
def test_hooks(context: Context) -> None:
    """All of torch's hooks, called when torch calls them, and with what it gives them."""
    twins = Twins("AdamW")
    twins.steps(0, 1)
    calls: dict[int, list[Any]] = {0: [], 1: []}

    for i, optimizer in enumerate(twins.both):

        def note(name: str, i: int = i) -> Callable[..., None]:
            return lambda *args: calls[i].append((name, len(args)))

        def rename(_: Any, state_dict: dict[str, Any], i: int = i) -> dict[str, Any]:
            calls[i].append(("load pre", sorted(state_dict)))
            state_dict["state"] = {
                number: {"step": values["step"], "exp_avg": values["m"], "exp_avg_sq": values["v"]}
                for number, values in state_dict["state"].items()
            }
            return state_dict

        def loaded(optimizer: Any, i: int = i) -> None:
            first = optimizer.param_groups[0]["params"][0]
            values = optimizer.state[first]
            calls[i].append(("load post", float(values["step"]), sorted(values)))

        def extra(_: Any, state_dict: dict[str, Any], i: int = i) -> None:
            calls[i].append(("save post", sorted(state_dict["state"])))
            state_dict["extra"] = 17

        optimizer.register_step_pre_hook(note("step pre"))
        optimizer.register_step_post_hook(note("step post"))
        optimizer.register_state_dict_pre_hook(note("save pre"))
        optimizer.register_state_dict_post_hook(extra)
        optimizer.register_load_state_dict_pre_hook(rename)
        optimizer.register_load_state_dict_post_hook(loaded)
        save = getattr(optimizer, "local_state_dict", optimizer.state_dict)
        assert save()["extra"] == 17
    other = trained("AdamW")
    other["state"] = {
        number: {"step": values["step"], "m": values["exp_avg"], "v": values["exp_avg_sq"]}
        for number, values in other["state"].items()
    }
    twins.load(other)
    twins.step(2)
    assert calls[0] == calls[1], calls
    assert len(calls[0]) == 6


@on_ranks(2)
def test_hooks_of_a_fused_optimizer(context: Context) -> None:
    """``from_torch()`` takes over what was registered."""
    params = parameters()
    optimizer = torch.optim.AdamW(params)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("save"))
    fused = fusedpg.optim.fuse(optimizer)
    for param in params:
        param.grad = torch.ones_like(param)
    fused.step()
    fused.local_state_dict()
    assert calls == ["pre", "post", "save"]


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_gradients_cannot_be_read(context: Context, mode: str) -> None:
    """Nothing can be read from a gradient of which a rank holds a slice, or nothing."""
    model = nn.Linear(5, 6)
    net, optimizer = in_mode(mode, model)
    net(torch.ones(2, 5)).sum().backward()
    wrong = []
    for name, read in _reads().items():
        try:
            read(model.weight.grad)
        except (RuntimeError, ValueError):
            continue
        wrong.append(name)
    assert not wrong, wrong
    optimizer.step()
    dist.barrier()


@on_ranks(2)
def test_norms_of_local_and_reduced_gradients(context: Context) -> None:
    """Manual mode: a plain gradient put in by hand is local, those of backward are not."""
    params = parameters()
    optimizer = fusedpg.optim.SGD(params, lr=0.1)
    torch.stack([param.sum() for param in params]).sum().backward()
    params[1].grad = torch.ones_like(params[1]) * (1 + context.rank)
    with refused("reduce_gradients"):
        nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.reduce_gradients()
    numel = [param.numel() for param in params]
    mean = (1 + context.world_size) / 2
    want = (numel[0] + numel[2] + numel[1] * mean**2) ** 0.5
    found = nn.utils.clip_grad_norm_(params, 1.0)
    assert abs(float(found) - want) < 1e-4 * want


@on_ranks(3)
def test_what_is_added_to_gradients(context: Context) -> None:
    """Manual mode: what is added to a gradient before it is reduced counts as this rank's."""
    param = nn.Parameter(torch.ones(5))
    optimizer = fusedpg.optim.SGD([param], lr=1.0)
    (param * 2).sum().backward()
    param.grad.add_(torch.full((5,), float(context.rank)))  # type: ignore[union-attr]
    optimizer.step()
    mean = 2 + (context.world_size - 1) / 2
    assert torch.allclose(param.detach(), torch.full((5,), 1 - mean))
    optimizer.zero_grad()
    (param * 2).sum().backward()
    optimizer.reduce_gradients()
    with refused("add_"):
        param.grad.add_(torch.ones(5))  # type: ignore[union-attr]


# --- precision, writes, devices -----------------------------------------------------
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("write", WRITES)
@on_ranks(2)
def test_masters_see_writes(context: Context, write: str, mode: str) -> None:
    """Whoever writes half parameters between steps is not overwritten by their masters."""
    model = nn.Linear(37, 11, bias=False).bfloat16()
    net, optimizer = in_mode(mode, model, lr=0.1, master_dtype=torch.float32)

    def step(lr: float) -> None:
        optimizer.param_groups[0].update(lr=lr, weight_decay=0.0)
        net(torch.ones(2, 37, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0.1)
    step(0.1)
    kept = optimizer.state[model.weight]["master_param"].clone()
    new = randn(3, 3, numel=37 * 11).view(11, 37).bfloat16()
    with torch.no_grad():
        if write == "copy_":
            model.weight.copy_(new)
        elif write == "data":
            model.weight.data.copy_(new)
        elif write == "set data":
            model.weight.data = new.clone()
        elif write == "one element":
            new = model.weight.detach().clone()
            new[3, 5] = 17.0
            model.weight.data[3, 5] = 17.0
        elif write == "numpy":
            memory = model.weight.detach().view(torch.int16).numpy()
            memory[...] = new.view(torch.int16).numpy()
        else:
            new = model.weight.detach().clone()
    step(0.0)
    assert same(model.weight.detach(), new)
    master = optimizer.state[model.weight]["master_param"]
    offset, length = fusedpg.shard_range(37 * 11, context.world_size, context.rank)
    own = new.flatten()[offset : offset + length]
    assert same(master.bfloat16(), own)
    if write in ("nothing", "one element"):
        # What nobody wrote keeps the bits that half precision has not.
        untouched = own != 17.0
        assert same(master[untouched], kept[untouched])


@pytest.mark.parametrize("op", ["fused_sgd_", "fused_adam_", "fused_adamw_", "fused_lamb_"])
@on_ranks(2)
def test_meta_tensors_are_refused(context: Context, op: str) -> None:
    """A tensor without values among others is refused, whichever it is."""

    def call(param: str, grad: str, state: str, **options: Any) -> Any:
        fused = getattr(fusedpg, op)
        params, grads = [torch.ones(70, device=param)], [torch.ones(70, device=grad)]
        length = fusedpg.shard_range(70, context.world_size, context.rank)[1]
        one = [torch.zeros(length, device=state)]
        if op == "fused_sgd_":
            return fused(
                params,
                grads,
                one,
                weight_decay=0.0,
                momentum=0.9,
                lr=0.1,
                dampening=0.0,
                nesterov=False,
                is_first_step=False,
                **options,
            )
        counters = [torch.zeros((), device=state)]
        states: list[Any] = [one, [one[0].clone()]] + ([[]] if op != "fused_lamb_" else [])
        numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
        return fused(params, grads, *states, counters, **numbers, **options)

    for places in (("cpu", "meta", "cpu"), ("meta", "cpu", "cpu"), ("cpu", "cpu", "meta")):
        for options in ({}, {"async_op": True}):
            with refused("meta", ValueError):
                call(*places, **options)
    with refused("meta", ValueError):
        call("meta", "meta", "meta", async_op=True)
    call("meta", "meta", "meta")  # what torch.export asks for
    call("cpu", "cpu", "cpu")


def test_torch_is_as_assumed() -> None:
    root = Path(torch.__file__).parent.parent
    assert not list(optim_assumptions.wrong(root))


@on_ranks(2)
def test_another_checkpoint(context: Context) -> None:
    """Who asks for state is not recognised: never slices where something whole is wanted."""
    params = parameters()
    optimizer = fusedpg.optim.AdamW(params, lr=0.1)
    torch.stack([param.sum() for param in params]).sum().backward()
    optimizer.step()
    ask = "def {0}(optim, info): return optim.state_dict()"
    for name, info in (
        ("_optim_state", types.SimpleNamespace()),
        ("_get_optim_state_dict", types.SimpleNamespace()),
        ("_get_optim_state_dict", types.SimpleNamespace(full_state_dict=True)),
        ("_get_optim_state_dict", None),
    ):
        asks = _in(dcp_state.__name__, ask.format(name), name)
        with refused("in a way that is not known"):
            asks(optimizer, info)
    # It has another name, and the same facts.
    asks = _in(dcp_state.__name__, ask.format("_optim_state"), "_optim_state")
    whole = asks(optimizer, types.SimpleNamespace(full_state_dict=True, cpu_offload=False))
    sizes = [state["exp_avg"].numel() for state in whole["state"].values()]
    assert sizes == [param.numel() for param in params], sizes


@on_ranks(2)
def test_another_init(context: Context) -> None:
    """What makes state by a step is not recognised: a step as torch's, or none at all."""
    source = Path(str(dcp_state.__file__)).read_text()
    function = next(
        ast.unparse(node) for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "_init_optim_state"
    )  # fmt: skip
    renamed = function.replace("def _init_optim_state", "def _make_optim_state")
    make = _in(dcp_state.__name__, renamed, "_make_optim_state")
    mine, theirs = parameters(), parameters()
    ours, torchs = fusedpg.optim.AdamW(mine, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    for one in (ours, torchs):
        make(one)
    assert ours.param_groups[0]["lr"] == 0.1
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)
        assert ours.state[a].keys() == torchs.state[b].keys()
        assert ours.state[a]["step"] == torchs.state[b]["step"]
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    for overlap in (False, True):
        bridged = fusedpg.optim.AdamW(ddp.parameters(), lr=0.1, ddp=ddp, overlap=overlap)
        with refused("never reduced"):
            make(bridged)
        ddp.zero_grad()
        bridged.detach()
        ddp(torch.ones(1, 3))  # gets a reducer of its own


@on_ranks(2)
def test_another_clip(context: Context) -> None:
    """Who asks for norms is not recognised: a mixture of gradients is refused."""
    params = parameters()
    optimizer = fusedpg.optim.AdamW(params, lr=0.1)
    torch.stack([param.sum() for param in params]).sum().backward()
    optimizer.reduce_gradients()
    grads = [params[0].grad, torch.ones(3), params[1].grad]
    ask = "def {0}(grads, {1}): return torch._foreach_norm(grads, 2.0)"
    asks = _in(
        "torch.nn.utils.clip_grad", ask.format("_get_total_norm", "foreach"), "_get_total_norm"
    )
    assert len(asks(grads, None)) == 3
    asks = _in("torch.nn.utils.clip_grad", ask.format("_norms", "way"), "_norms")
    with refused("cannot be mixed"):
        asks(grads, None)


@on_ranks(2)
def test_another_join(context: Context) -> None:
    """What DDP divides by under Join is not known."""
    from fusedpg.optim import _torch

    ddp = DistributedDataParallel(nn.Linear(3, 2))
    assert not _torch.divides_by_active(ddp)
    with mock.patch.object(ddp, "_join_config", types.SimpleNamespace(enable=True)):
        with refused("divides by under Join"):
            _torch.divides_by_active(ddp)
        for told in (True, False):
            ddp._divide_by_initial_world_size = told
            assert _torch.divides_by_active(ddp) != told
    dist.barrier()


@pytest.mark.parametrize("where", optimizers.WHERE)
def test_sequences(where: str) -> None:
    core.search("optimizers", where, core.seed(0))


@pytest.mark.parametrize("asked", ["clip", "clip one by one", "norm", "unscale", "scaler step"])
@harness.on_ranks(2, 3)
def test_a_gradient_of_other_ranks_is_named(context: harness.Context, asked: str) -> None:
    """The caller's list of gradients lacks it on a rank: all ranks raise, and go on together."""
    params = [torch.nn.Parameter(torch.ones(5)) for _ in range(3)]
    optimizer = fusedpg.optim.SGD(params, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    last = context.world_size - 1

    def ask() -> None:
        if asked == "norm":
            params[0].grad.norm()
        elif asked == "unscale":
            scaler.unscale_(optimizer)
        elif asked == "scaler step":
            scaler.step(optimizer)
        else:
            foreach = None if asked == "clip" else False
            torch.nn.utils.clip_grad_norm_(params, 1e9, foreach=foreach)

    loss = sum(p.sum() for p in params[: 3 if context.rank == last else 2])
    (scaler.scale(loss) if "scale" in asked else loss).backward()
    begin = time.monotonic()
    rank = last - 1
    with refused(f"rank {rank} has no gradient of parameter 2 of group 0, and other ranks have"):
        ask()
    assert time.monotonic() - begin < 1
    # Now all ranks have it.
    assert params[2].grad is not None
    if "scale" not in asked:
        ask()
        optimizer.step()
        share = 1 / context.world_size
        for p, factor in zip(params, (1, 1, share), strict=True):
            torch.testing.assert_close(p.detach(), torch.full((5,), 1 - 0.1 * factor))
