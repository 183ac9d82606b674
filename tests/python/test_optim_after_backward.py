"""Between backward and step(): looks at parameters, writes to gradients; and backwards that raise
or run elsewhere."""

from __future__ import annotations

import copy
import functools
import io
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedpg
import harness
from checks.faults import works
from checks.optim_script import in_mode
from checks.refused import refused
from harness import Context

pytestmark = pytest.mark.fused_only

WIDTH = 700  # a step of some milliseconds, which is still under way where nobody waits for it
LAYERS = 3
LR = 0.1
BUCKET_MB = 1.0  # less than a layer's weight


def _apply(layer: nn.Module, x: torch.Tensor) -> Any:
    return layer(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, reentrant: bool = False) -> torch.Tensor:
        for layer in self.layers:
            run: Any = functools.partial(checkpoint, use_reentrant=True) if reentrant else _apply
            x = run(layer, x.requires_grad_())
        return x


class Script:
    """A model whose steps take a while."""

    def __init__(self, context: Context, mode: str) -> None:
        torch.manual_seed(7)
        self.context, self.net = context, Net()
        self.params = list(self.net.parameters())
        buckets = {"bucket_cap_mb": BUCKET_MB}
        self.ddp, self.opt = in_mode(mode, self.net, "SGD", buckets, lr=LR, momentum=0.9)

    def loss(self, step: int, **forward: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + self.context.rank)
        x = torch.randn(4, WIDTH, generator=generator)
        return self.ddp(x, **forward).square().mean() * 10

    def values(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.params]

    def slices(self) -> list[torch.Tensor]:
        """This rank's, of gradients that step() will apply."""
        grads: list[Any] = [] if self.opt.overlap else [param.grad for param in self.params]
        return [grad.local() for grad in grads]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def plainly(s: Script, step: int) -> None:
    s.loss(step).backward()


def in_a_thread(s: Script, step: int) -> None:
    thread = threading.Thread(target=s.loss(step).backward)
    thread.start()
    thread.join()


def of_inputs(s: Script, step: int) -> None:
    torch.autograd.backward([s.loss(step)], inputs=s.params)


def nested(s: Script, step: int) -> None:
    s.loss(step, reentrant=True).backward()


BACKWARDS = {f.__name__: f for f in (plainly, in_a_thread, of_inputs, nested)}


@pytest.mark.parametrize("how", BACKWARDS)
@pytest.mark.parametrize("mode", ["ddp", "overlap"])
@harness.on_ranks(2)
def test_nothing_is_in_flight_after_backward(context: Context, mode: str, how: str) -> None:
    """Parameters are written in backward (overlap) or in step(), never between."""
    s = Script(context, mode)
    for step in range(3):
        before = s.values()
        BACKWARDS[how](s, step)
        looked = s.values()
        gradients = [grad.clone() for grad in s.slices()]
        threading.Event().wait(0.005)
        assert same(looked, s.values()), "somebody still writes"
        if mode == "ddp":
            assert same(before, looked)
            assert same(gradients, s.slices())
        s.opt.step()
        assert same(looked, s.values()) == (mode == "overlap")
        s.opt.zero_grad()


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("mode", ["ddp", "overlap"])
@harness.on_ranks(2)
def test_backward_that_raises(context: Context, mode: str, reentrant: bool) -> None:
    """What it has started ends before the exception is seen."""
    s = Script(context, mode)
    s.loss(0).backward()
    s.opt.step()
    s.opt.zero_grad()
    before = s.values()
    loss = s.loss(1, reentrant=reentrant)

    def fail(_: torch.Tensor) -> None:
        raise ValueError("a hook of the user")

    # The layers behind the first have been begun by then.
    s.params[0].register_hook(fail)
    if context.rank == 1:
        threading.Event().wait(0.2)  # what rank 0 has begun cannot end before
    with refused("a hook of the user", ValueError):
        loss.backward()
    looked = s.values()
    threading.Event().wait(0.4)
    assert same(looked, s.values()), "somebody still writes"
    assert torch.equal(before[0], looked[0])
    if mode == "overlap":
        assert not same(before, looked), "no bucket was begun: the test shows nothing"
    else:
        assert same(before, looked)
    works()


# --- gradients that are put in behind our back ------------------------------------------------


@pytest.mark.parametrize("mode", ["manual", "ddp", "overlap"])
@harness.on_ranks(2)
def test_data_of_a_gradient(context: Context, mode: str) -> None:
    net = nn.Linear(5, 3)
    called, opt = in_mode(mode, net, "SGD", lr=1.0)
    called(torch.ones(2, 5)).sum().backward()
    for param in net.parameters():
        with refused("p.grad.data"):
            param.grad.data = torch.full_like(param, 0.25)  # type: ignore[union-attr]
        param.grad.data = param.grad.data  # type: ignore[union-attr]
    net.to("cpu")  # puts back what it has found
    before = net.weight.detach().clone()
    opt.step()
    if mode != "overlap":
        # The gradient is the mean of two.
        torch.testing.assert_close(net.weight.detach(), before - 2.0)
    works()


@pytest.mark.parametrize("mode", ["manual", "ddp", "overlap"])
@harness.on_ranks(2)
def test_a_parameter_listed_twice(context: Context, mode: str) -> None:
    net = nn.Linear(5, 3)
    ddp = None if mode == "manual" else DistributedDataParallel(net)
    options: dict[str, Any] = {"lr": 1.0, "ddp": ddp, "overlap": mode == "overlap"}
    makers: list[Callable[[], Any]] = [
        lambda: fusedpg.optim.SGD([*net.parameters(), net.weight], **options),
        lambda: fusedpg.optim.SGD(
            [{"params": [net.weight]}, {"params": [net.bias, net.weight]}], **options
        ),
    ]
    for make in makers:
        with refused("more than on", ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of the first, and raises at the second
            make()
    opt = fusedpg.optim.SGD(net.parameters(), **options)
    opt.param_groups[0]["params"].append(net.weight)
    with refused("more than once", ValueError):
        (ddp or net)(torch.ones(2, 5)).sum().backward()
        opt.step()
    works()


# --- copies of the module -----------------------------------------------------------------------


def deep(ddp: Any) -> Any:
    return copy.deepcopy(ddp)


def saved(ddp: Any) -> Any:
    file = io.BytesIO()
    torch.save(ddp, file)
    assert b"fusedpg" not in file.getvalue(), "the file needs fusedpg"
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [deep, saved], ids=["deepcopy", "save"])
@pytest.mark.parametrize("when", ["at once", "before step", "after a step"])
@pytest.mark.parametrize("mode", ["ddp", "overlap"])
@harness.on_ranks(2)
def test_copies_of_a_module(
    context: Context, mode: str, when: str, copied: Callable[[Any], Any]
) -> None:
    """The copy is a plain DistributedDataParallel; the original goes on."""

    def batch(step: int) -> torch.Tensor:
        return torch.full((2, 5), float(step + context.rank))

    torch.manual_seed(3)
    ddp, opt = in_mode(mode, nn.Linear(5, 3).double(), "SGD", lr=0.1)

    def train(net: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            net(batch(step).double()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    if when == "after a step":
        train(ddp, opt, range(2))
    if when == "before step":
        ddp(batch(0).double()).square().mean().backward()
    twin = copied(ddp)
    assert not any("fused" in str(key) for key in vars(twin))
    assert all(p.grad is None for p in twin.parameters())
    if when == "before step":
        opt.step()
        opt.zero_grad()
        twin = copied(ddp)
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), range(3))
    train(ddp, opt, range(3))
    again = copied(ddp)
    for one, other, third in zip(
        ddp.parameters(), twin.parameters(), again.parameters(), strict=True
    ):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(one, third, rtol=0, atol=0)
    # Without an optimizer of ours it is as it was before.
    opt.detach()
    train(copied(ddp), torch.optim.SGD(twin.parameters(), lr=0.1), range(1))
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), range(1))
    copied(ddp)


# --- a module that is converted -----------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["", "find_unused"])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("mode", ["ddp", "overlap"])
@harness.on_ranks(2)
def test_another_type_after_ddp(
    context: Context, mode: str, steps: int, options: dict[str, bool]
) -> None:
    """Autograd drops DDP's hooks then; plain DDP lets ranks drift apart without a word."""

    class Converting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(5, 3), nn.Linear(3, 2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x.to(layer.weight.dtype))
            return x

    net = Converting()
    ddp, opt = in_mode(mode, net, ddp=options, lr=0.1)
    for _ in range(steps):
        ddp(torch.ones(2, 5)).sum().backward()
        opt.step()
        opt.zero_grad()
    net.layers[0].double()
    before = net.layers[0].weight.detach().clone()  # type: ignore[operator,union-attr]
    with refused("convert the model"):
        ddp(torch.ones(2, 5)).sum().backward()
        opt.step()
    assert torch.equal(before, net.layers[0].weight.detach())  # type: ignore[operator,union-attr]
    works()
