"""Calls that change from one to the next, beside the same calls of a function that knows none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import fusedpg
from checks.compiled import compiles
from checks.shortcuts import taken
from fusedpg import fusion
from harness import Context

scale = 2.0  # what `step` reads from outside
# What of a call may be another one.
NAMES = (
    *("dtype", "shape", "layout", "lr", "flag", "named"),
    *("kind", "autocast", "default", "into", "scale"),
)


def step(g: fusion.Partial, w: fusion.Replicate, lr: float, flag: Any = False) -> Any:
    s = scale * fusion.all_reduce(g, "mean" if flag == "mean" else "sum")
    if flag is None:
        s = s + 1
    if flag == "product":
        s = s @ (w.t() @ w)
    return w - lr * (torch.relu(s) if flag is True else s)


class Given:
    """Tensors of a kind, which lie where they lay when a call comes back to them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._made: dict[Any, tuple[Tensor, ...]] = {}

    def tensors(self, call: dict[str, Any], seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Contribution, whole tensor, target."""
        key = call["dtype"], call["shape"], call["layout"]
        if key not in self._made:
            empty = [torch.empty(call["shape"], dtype=call["dtype"]) for _ in range(3)]
            self._made[key] = tuple(empty)
        made = self._made[key]
        for number, tensor in enumerate(made):
            own = self._rank if number == 0 and call["layout"] != "one" else 0
            drawn = torch.Generator().manual_seed(100 * seed + 10 * number + own)
            tensor.copy_(torch.randint(-9, 9, call["shape"], generator=drawn))
        g, w, target = made
        if call["layout"] == "transposed" and g.dim() == 2:
            g = g.view(g.shape[::-1]).t()
            w = w.view(w.shape[::-1]).t()
        elif call["layout"] == "negated" and g.is_floating_point():
            g = torch._neg_view(g)
        elif call["layout"] == "one":
            w = g
        if call["kind"] in ("parameter", "grad") and w.is_floating_point():
            w = torch.nn.Parameter(w, call["kind"] == "grad")
        return g, w, target


@contextlib.contextmanager
def state(call: dict[str, Any]) -> Iterator[None]:
    global scale
    dtype = call["autocast"]
    cast = torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)
    before = torch.get_default_dtype()
    torch.set_default_dtype(call["default"])
    scale = call["scale"]
    try:
        with torch.set_grad_enabled(call["kind"] != "no_grad"), cast:
            yield
    finally:
        torch.set_default_dtype(before)
        scale = 2.0


def outcome(run: Any, call: dict[str, Any], given: tuple[Tensor, ...]) -> list[Any]:
    """What a call gives and leaves behind, or what it raises."""
    g, w, target = given
    flag = call["flag"]
    if flag == "product" and len(call["shape"]) != 2:
        flag = False
    numbers = {"lr": call["lr"], "flag": flag}
    args, kwargs = (g, w), numbers
    if call["named"]:
        args, kwargs = (), {"w": w, **numbers, "g": g}
    w.grad = None
    try:
        with state(call):
            if call["into"]:
                got = run.into(w if call["into"] == "argument" else target, *args, **kwargs)
            else:
                got = run(*args, **kwargs)
        if got.requires_grad:
            got.double().square().sum().backward()
    except (RuntimeError, TypeError, ValueError) as error:
        return [type(error), str(error)]
    kept = [x.detach().resolve_neg().clone() for x in (got, g, w, target)]
    return [got.requires_grad, got is w, got is target, w.grad, *kept]


def compared(context: Context, calls: list[dict[str, Any]]) -> int:
    """How many calls were like an earlier one."""
    made = Given(context.rank)
    with compiles(context), taken() as found:
        run = fusedpg.fuse(step)
        for number, call in enumerate(calls):
            got = outcome(run, call, made.tensors(call, number))
            count = len(found)
            want = outcome(fusedpg.fuse(step), call, made.tensors(call, number))
            assert not any(found[count:]), "a new function knows no call"
            assert len(got) == len(want), (number, call, got, want)
            for x, y in zip(got, want):
                if isinstance(y, Tensor):
                    assert x.dtype is y.dtype and torch.equal(x, y), (number, call, x, y)
                else:
                    assert x == y, (number, call, x, y)
    return sum(found)
