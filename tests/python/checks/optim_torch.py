"""What is expected of an optimizer of torch.optim, with torch.optim as the oracle."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from checks.cases import distance, randn, same
from checks.refused import refused
from harness import Context

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
        import fusedpg

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


# --- state dicts --------------------------------------------------------------------


def older_state_dict(context: Context, kind: str) -> None:
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


def other_kind(context: Context, source: str, target: str) -> None:
    """Adam into AdamW decouples its weight decay, as in torch; AdamW into Adam stays AdamW."""
    state_dict = trained(source)
    twins = Twins(target)
    twins.load(state_dict)
    twins.groups_agree()
    twins.steps(3, 4)


def without_momentum(context: Context) -> None:
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


class Named(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 11), nn.Linear(11, 13)
        for i, param in enumerate(self.parameters()):
            param.data.copy_(randn(8, i, numel=param.numel()).reshape(param.shape))
        self.first.weight.requires_grad_(not frozen)

    def gradients(self, number: int) -> None:
        for i, param in enumerate(self.parameters()):
            if param.requires_grad:
                param.grad = randn(9, i, number, numel=param.numel()).reshape(param.shape)


def through_dcp(context: Context, kind: str, to_torch: bool, frozen: bool, path: str) -> None:
    """torch.distributed.checkpoint from torch.optim to ours, and back."""
    import fusedpg

    def make(fused: bool) -> tuple[Named, Any]:
        module = Named(frozen)
        where = fusedpg.optim if fused else torch.optim
        return module, getattr(where, kind)(module.parameters(), **OPTIONS[kind])

    def train(module: Named, optimizer: Any, numbers: Iterable[int]) -> None:
        for number in numbers:
            module.gradients(number)
            optimizer.step()
            optimizer.zero_grad()

    source, optimizer = make(fused=to_torch)
    train(source, optimizer, range(3))
    saved = {"optimizer": get_optimizer_state_dict(source, optimizer)}
    dcp.save(saved, checkpoint_id=Path(path) / "dcp")
    target, other = make(fused=not to_torch)
    target.load_state_dict(source.state_dict())
    loaded = {"optimizer": get_optimizer_state_dict(target, other)}
    dcp.load(loaded, checkpoint_id=Path(path) / "dcp")
    set_optimizer_state_dict(target, other, loaded["optimizer"])
    train(source, optimizer, range(3, 6))
    train(target, other, range(3, 6))
    for (name, mine), want in zip(target.named_parameters(), source.parameters(), strict=True):
        assert distance(mine.detach(), want.detach()) <= 1e-6, name
    if frozen:
        assert source.first.weight not in optimizer.state
        assert target.first.weight not in other.state


def empty_parameter(context: Context, kind: str) -> None:
    """A parameter without elements has state without elements."""
    import fusedpg

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


def lazy(context: Context, kind: str) -> None:
    """No state without a gradient; a parameter unfrozen later begins then."""
    twins = Twins(kind)
    for params in (twins.mine, twins.theirs):
        params[0].requires_grad_(False)
    twins.agree()
    twins.step(0, used=(2,))
    twins.agree()
    twins.step(1, used=(1, 2))
    twins.agree()
    for params in (twins.mine, twins.theirs):
        params[0].requires_grad_(True)
    twins.steps(2, 3)


def frozen_memory(context: Context, mode: str) -> int:
    """Bytes of state with large frozen and unused parameters."""
    import fusedpg

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Parameter(torch.ones(1 << 20), requires_grad=False)
            self.unused = nn.Parameter(torch.ones(1 << 20))
            self.used = nn.Parameter(torch.ones(64))

        def forward(self) -> torch.Tensor:
            return (self.used * self.frozen[:64]).sum()

    model = Model()
    ddp = None
    if mode != "manual":
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = fusedpg.optim.AdamW(model.parameters(), ddp=ddp, overlap=mode == "overlap")
    for _ in range(3):
        (ddp or model)().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert set(optimizer.state) == {model.used}
    assert optimizer.local_state_dict()["state"].keys() == {2}
    return int(optimizer.memory_stats()["state"])


def dropped_after_overflow(context: Context, kind: str) -> None:
    """GradScaler skips the first step: it remains the first."""
    import fusedpg

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


def later_momentum(context: Context) -> None:
    twins = Twins("SGD", momentum=0, dampening=0, nesterov=False)
    twins.steps(0, 1)
    for changes in (
        {"momentum": 0.9, "dampening": 0.3},
        {"momentum": 0.0},
        {"momentum": 0.5, "dampening": 0.0, "nesterov": True},
    ):
        for optimizer in twins.both:
            optimizer.param_groups[0].update(changes)
        twins.steps(2, 3)


def later_amsgrad(context: Context, kind: str) -> None:
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


def cleared(context: Context, kind: str, how: str) -> None:
    twins = Twins(kind)
    twins.steps(0, 1)
    for optimizer, params in zip(twins.both, (twins.mine, twins.theirs), strict=True):
        if how == "clear":
            optimizer.state.clear()
        elif how == "one":
            del optimizer.state[params[1]]
        else:
            optimizer.state[params[1]] = {}
    twins.steps(2, 3)


def cleared_on_one_rank(context: Context) -> None:
    """Ranks that differ raise; nothing hangs."""
    twins = Twins("AdamW")
    twins.steps(0, 1)
    if context.rank == 0:
        del twins.fused.state[twins.mine[0]]
    with refused("ranks have state of different parameters"):
        twins.fused.full_state_dict()


def edited_groups(context: Context) -> None:
    """Groups and parameters may be taken out of param_groups; not put in by hand."""
    import fusedpg

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


def copies(context: Context) -> None:
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


def arguments(context: Context, kind: str) -> None:
    """What torch refuses, with its words; and NaN, which its SGD takes."""
    import fusedpg

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


def hooks(context: Context) -> None:
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


def fused_hooks(context: Context) -> None:
    """``fuse()`` takes over what was registered."""
    import fusedpg

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
