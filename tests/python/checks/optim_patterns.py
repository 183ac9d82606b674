"""What training scripts do with DDP: patterns, and scripts that are drawn at random."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from checks.optim_script import OPTIMIZERS, WIDTH, Net, Script, Several, of_torch
from checks.refused import refused


def plainly(s: Script) -> None:
    s.train(4)


def reentrant_checkpoints(s: Script) -> None:
    s.train(4, segments=3, reentrant=True)


def one_reentrant_checkpoint(s: Script) -> None:
    s.train(4, segments=1, reentrant=True)


def checkpoints(s: Script) -> None:
    s.train(4, segments=3)


def shared_weights(s: Script) -> None:
    s.build(lambda: Net(shared=True))
    s.train(4)


def shared_weights_in_reentrant_checkpoints(s: Script) -> None:
    s.build(lambda: Net(shared=True))
    s.train(4, segments=3, reentrant=True)


def shared_weights_in_checkpoints(s: Script) -> None:
    s.build(lambda: Net(shared=True))
    s.train(4, segments=3)


def forward_under_no_sync(s: Script) -> None:
    s.train(2)
    with s.net.no_sync():
        y = s.net(s.x())
    s.backward(y)
    s.step()


def forward_under_no_sync_then_synchronised(s: Script) -> None:
    for _ in range(3):
        with s.net.no_sync():
            y = s.net(s.x())
        s.backward(y)
        s.backward(s.net(s.x()))
        s.step()


def backward_under_no_sync(s: Script) -> None:
    for _ in range(4):
        y = s.net(s.x())
        with s.net.no_sync():
            s.backward(y)
        s.step()


def module_first(s: Script) -> None:
    for _ in range(3):
        s.backward(s.module(s.x()))
        s.backward(s.net(s.x()))
        s.step()


def module_after_arming(s: Script) -> None:
    for _ in range(3):
        one, other = s.module(s.x()), s.net(s.x())
        s.backward(one)
        s.step()
        del other


def module_last(s: Script) -> None:
    s.train(2)
    s.backward(s.net(s.x()))
    s.backward(s.module(s.x()))
    s.step()


def retained(s: Script) -> None:
    s.train(2)
    y = s.net(s.x())
    s.backward(y, retain_graph=True)
    s.backward(y)
    s.step()


def retained_under_no_sync(s: Script) -> None:
    for _ in range(3):
        with s.net.no_sync():
            y = s.net(s.x())
            s.backward(y, retain_graph=True)
            s.backward(y)
        s.backward(s.net(s.x()))
        s.step()


def accumulation(s: Script) -> None:
    for _ in range(3):
        with s.net.no_sync():
            s.backward(s.net(s.x()))
            s.backward(s.net(s.x()))
        s.backward(s.net(s.x()))
        s.step()


def accumulation_in_checkpoints(s: Script) -> None:
    for _ in range(3):
        with s.net.no_sync():
            s.backward(s.net(s.x(), segments=3, reentrant=True))
        s.backward(s.net(s.x(), segments=2, reentrant=True))
        s.step()


def accumulation_of_unused(s: Script) -> None:
    """Layer 2 has a gradient from no_sync() alone."""
    for i in range(4):
        with s.net.no_sync():
            s.backward(s.net(s.x()))
        s.backward(s.net(s.x(), skip=[2, i % 2]))
        s.step()


def synchronised_twice(s: Script) -> None:
    for _ in range(4):
        s.backward(s.net(s.x()))
        s.backward(s.net(s.x()))
        s.step()


def without_zeroing(s: Script) -> None:
    for _ in range(4):
        s.backward(s.net(s.x()))
        s.step(zero=False)


def synchronised_twice_with_unused(s: Script) -> None:
    for i in range(4):
        s.backward(s.net(s.x(), skip=[i % 3]))
        s.backward(s.net(s.x(), skip=[1 + i % 2, 4]))
        s.step()


def unused(s: Script) -> None:
    for i in range(4):
        s.backward(s.net(s.x(), skip=[i, 5]))
        s.step()


def unused_on_some_ranks(s: Script) -> None:
    for i in range(4):
        s.backward(s.net(s.x(), skip=[(i + s.context.rank) % 4]))
        s.step()


def unused_but_set_by_hand(s: Script) -> None:
    """A gradient that is there already stays, if no rank has another one."""
    for _ in range(3):
        for param in s.module.layers[2].parameters():
            param.grad = torch.ones_like(param)
        s.backward(s.net(s.x(), skip=[2]))
        s.step()


def several_losses(s: Script) -> None:
    for _ in range(3):
        y = s.net(s.x())
        (s.loss(y) + y.mean() + s.loss(s.module(s.x()))).backward()
        s.step()


def two_forwards(s: Script) -> None:
    for _ in range(3):
        s.backward(s.net(s.x()) + s.net(s.x()))
        s.step()


def evaluation_between(s: Script) -> None:
    for _ in range(3):
        y = s.net(s.x())
        with torch.no_grad():
            s.net(s.x())
        s.backward(y)
        s.step()


def forward_without_backward(s: Script) -> None:
    for _ in range(3):
        s.net(s.x())
        s.backward(s.net(s.x()))
        s.step()


def forward_by_name(s: Script) -> None:
    """Past ``__call__`` and its hooks."""
    for _ in range(4):
        s.backward(s.net.forward(s.x()))
        s.step()


def frozen_later(s: Script) -> None:
    for i in range(4):
        s.module.layers[1].requires_grad_(i % 2 == 0)
        s.backward(s.net(s.x()))
        s.step()


def unfrozen_later(s: Script) -> None:
    def make() -> nn.Module:
        net = Net()
        net.layers[3].requires_grad_(False)
        return net

    s.build(make)
    s.train(2)
    s.module.layers[3].requires_grad_(True)
    s.train(2)


def unfinished(s: Script) -> None:
    """A layer of which DDP waits for the gradient."""
    s.train(2)
    s.backward(s.net(s.x(), skip=[0]))
    s.step()


def ignored_by_ddp(s: Script) -> None:
    """A parameter that DDP was told to leave alone."""
    s.fresh()
    ignored = ["layers.2.weight", "layers.2.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(s.module, ignored)
    s.wrap()
    s.opt = s.optimizer(s.params, s.net)
    s.train(3)


class _Shared(nn.Module):
    """An encoder and a head of its own."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.encoder(x))
        return y


def _shared_encoder(s: Script) -> tuple[Any, Any]:
    torch.manual_seed(11)
    encoder = Net().double()
    one, other = _Shared(encoder), _Shared(encoder)
    s.module = one
    s.wrap()
    first = s.net
    s.module = other
    s.wrap()
    s.params = list(one.parameters()) + list(other.head.parameters())
    s.opt = Several(
        s.optimizer(list(one.parameters()), first),
        s.optimizer(list(other.head.parameters()), s.net),
    )
    return first, s.net


def encoder_in_two_modules(s: Script) -> None:
    one, other = _shared_encoder(s)
    for _ in range(3):
        s.loss(one(s.x())).backward()
        s.loss(other(s.x())).backward()
        s.step()


def encoder_in_two_modules_at_once(s: Script) -> None:
    one, other = _shared_encoder(s)
    for _ in range(3):
        (s.loss(one(s.x())) + s.loss(other(s.x()))).backward()
        s.step()


def encoder_in_two_modules_the_other_first(s: Script) -> None:
    one, other = _shared_encoder(s)
    for _ in range(3):
        s.loss(other(s.x())).backward()
        s.loss(one(s.x())).backward()
        s.step()


def learning_rate_after_backward(s: Script) -> None:
    for i in range(3):
        s.backward(s.net(s.x()))
        for group in s.opt.param_groups:
            group["lr"] = 0.01 * (i + 1)
        s.step()


def fuse_then_load(s: Script) -> None:
    import fusedpg

    name = "AdamW" if s.setup.optimizer == "LAMB" else s.setup.optimizer  # torch has none
    s.fresh()
    s.wrap()
    old = of_torch(name, s.params)
    scheduler = torch.optim.lr_scheduler.StepLR(old, 1, 0.5)
    s.opt = old
    if s.fused:
        s.opt = fusedpg.optim.from_torch(old, **s.own(s.net))
    s.opt.load_state_dict(s.opt.state_dict())
    for _ in range(4):
        s.backward(s.net(s.x()))
        s.step()
        scheduler.step()


def fuse_in_the_middle(s: Script) -> None:
    """from_torch() takes over where torch's optimizer stands, which keeps its state."""
    import fusedpg

    name = "AdamW" if s.setup.optimizer == "LAMB" else s.setup.optimizer
    s.fresh()
    net = s.with_ddp()
    s.opt = old = of_torch(name, s.params)
    scheduler = torch.optim.lr_scheduler.StepLR(old, 2, 0.5)
    for i in range(7):
        if i == 3:
            s.net = net
            if s.fused:
                kept = copy.deepcopy(old.state_dict()["state"])
                if s.manual:
                    s.wrap()
                s.opt = fusedpg.optim.from_torch(old, **s.own(net))
        s.backward((net if i < 3 else s.net)(s.x()))
        s.step()
        scheduler.step()
    if s.fused:
        assert s.opt.param_groups[0]["lr"] == OPTIMIZERS[name]["lr"] / 8
        torch.testing.assert_close(old.state_dict()["state"], kept, rtol=0, atol=0)


def attached_later(s: Script) -> None:
    """An optimizer that is made before the module is wrapped, as libraries do."""
    s.fresh()
    s.opt = s.optimizer(s.params, None, share_parameters=True)
    s.wrap()
    if s.fused:
        s.opt.attach(s.net)
    s.train(4)


# --- between backward and step(), and after it ------------------------------------------


def decay_after_backward(s: Script) -> None:
    for i in range(3):
        s.backward(s.net(s.x()))
        s.write(i)
        s.step()


def two_steps_after_one_backward(s: Script) -> None:
    """Twice the update; and without gradients nothing."""
    for _ in range(3):
        s.backward(s.net(s.x()))
        s.step(zero=False)
        s.step()
        s.step()


def a_stale_gradient_beside_new_ones(s: Script) -> None:
    """torch applies a gradient that nobody has dropped again; overlap=True has it no more."""
    for _ in range(2):
        s.backward(s.net(s.x()))
        s.step(zero=False)
        s.module.layers[:3].zero_grad()
        s.backward(s.net(s.x(), skip=[3, 4, 5]))
        s.step()


def retained_after_a_step(s: Script) -> None:
    """Autograd notices that saved weights have changed."""
    y = s.net(s.x())
    s.backward(y, retain_graph=True)
    s.step()
    s.backward(y)
    s.step()


def norms_are_fresh(s: Script) -> None:
    """Gradients that are dropped, and slices that are written, after a norm was asked for."""
    for i in range(3):
        s.backward(s.net(s.x()))
        if s.manual:
            s.opt.reduce_gradients()
        nn.utils.get_total_norm([p.grad for p in s.params])
        if i:
            s.params[1].grad = None
        grad = s.params[2].grad
        (grad.local() if hasattr(grad, "local") else grad).mul_(3)
        nn.utils.clip_grad_norm_(s.params, 0.01)
        s.step()


def clipped_with_others(s: Script) -> None:
    """Gradients of a model of which an optimizer of torch has a part, in one clipping."""
    s.fresh()
    s.wrap()
    others = torch.optim.SGD(s.params[5:], lr=0.1)
    s.opt = Several(s.optimizer(s.params[:5], s.net), others)
    for _ in range(3):
        s.backward(s.net(s.x()))
        if s.fused and s.setup.mode != "overlap":
            with refused("cannot be mixed"):
                nn.utils.clip_grad_norm_(s.params, 0.01, foreach=True)
        nn.utils.clip_grad_norm_(s.params, 0.01)
        s.step()


# --- gradients that stand in p.grad before, and hooks of users ---------------------------


def zeros_before_accumulation(s: Script) -> None:
    """``p.grad`` that DDP has moved into a bucket, and a backward under ``no_sync()``."""
    for _ in range(4):
        for param in s.params:
            param.grad = torch.zeros_like(param)
        with s.net.no_sync():
            s.backward(s.net(s.x()))
        s.backward(s.net(s.x()))
        s.step()


def gradients_of_other_strides(s: Script) -> None:
    """``p.grad`` that lies in memory in another order than its parameter."""
    for _ in range(4):
        for param in s.params:
            ones = torch.ones_like(param)
            param.grad = torch.ones(param.shape[::-1]).to(ones).mT if param.dim() == 2 else ones
        s.backward(s.net(s.x()))
        s.step()


def hooks_of_users(s: Script) -> None:
    """They see the gradient that is reduced, and may change it."""

    def clamp(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad.clamp_(-0.01, 0.01)

    for param in s.params:
        param.register_post_accumulate_grad_hook(clamp)
    s.train(4)


# --- groups and state that somebody edits ------------------------------------------------


def swapped_groups(s: Script) -> None:
    """Parameters change groups, and these keep their lengths."""
    s.in_groups()
    s.train(2)
    one, other = (group["params"] for group in s.opt.param_groups)
    one[0], other[0] = other[0], one[0]
    s.train(2)


def edited_state(s: Script) -> None:
    s.fresh()
    s.wrap()
    groups: Any = [{"params": [p], "lr": 0.01 * (1 + i)} for i, p in enumerate(s.params)]
    s.opt = s.optimizer(groups, s.net)
    state, groups = s.opt.state, s.opt.param_groups
    for i in range(7):
        s.train(1)
        if i == 1:
            some = state[s.params[1]]
            key = next(key for key in some if key != "step")
            some[key] = some[key] * 2  # another tensor
        if i == 2:
            state[s.params[2]] = {k: value.clone() for k, value in state[s.params[2]].items()}
            groups[0]["lr"] = 0.05
        if i == 3:
            del state[s.params[3]]  # begins anew
        if i == 4:
            state.clear()
        if i == 5:
            groups[0], groups[1] = groups[1], groups[0]


def parameters_taken_out(s: Script) -> None:
    """Parameters that are in no group have a gradient as DDP's, and come back."""
    s.in_groups()
    one, other = (group["params"] for group in s.opt.param_groups)
    s.train(1)
    taken = [one.pop(), other.pop(0)]
    plain = torch.optim.SGD(taken, lr=0.1)
    for _ in range(3):
        s.backward(s.net(s.x()))
        assert all(type(param.grad) is torch.Tensor for param in taken)
        nn.utils.clip_grad_norm_(taken, 0.01)
        plain.step()
        s.step()
        plain.zero_grad()
    other.extend(taken)
    s.train(2)
    # To another optimizer of the same module, and their group with them.
    moved = s.opt.param_groups.pop()["params"]
    s.opt = Several(s.opt, s.optimizer(moved, s.net))
    s.train(3)


# --- several optimizers, or none -------------------------------------------------------


def two_optimizers_and_one_of_torch(s: Script) -> None:
    """Of different kinds, on one module."""
    s.fresh()
    s.wrap()
    s.opt = Several(
        s.optimizer(s.params[:4], s.net),
        s.optimizer(s.params[4:8], s.net, name="Adam"),
        torch.optim.SGD(s.params[8:], lr=0.1),
    )
    s.train(4)


def two_modules_in_one_backward(s: Script) -> None:
    nets: list[Any] = []
    optimizers = []
    params: list[nn.Parameter] = []
    for _ in range(2):
        s.build()
        nets.append(s.net)
        optimizers.append(s.opt)
        params += s.params
    s.params, s.opt = params, Several(*optimizers)
    for _ in range(4):
        (s.loss(nets[0](s.x())) + s.loss(nets[1](s.x()))).backward()
        s.step()


class _Sparse(nn.Module):
    """A layer behind an embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Embedding(30, WIDTH, sparse=True)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(self.other(x.abs().mul(10).long().clamp(max=29)))
        return y


class _Complex(nn.Module):
    """A complex layer behind a real one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        shapes = ((WIDTH, WIDTH), (WIDTH,))
        self.other = nn.ParameterList(
            nn.Parameter(torch.randn(shape, dtype=torch.cdouble)) for shape in shapes
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x).to(torch.cdouble) @ self.other[0] + self.other[1]).abs()


def _beside_one_of_torch(s: Script, make: Callable[[], nn.Module]) -> None:
    s.fresh(make)
    s.wrap()
    other = torch.optim.SGD(s.module.other.parameters(), lr=0.01)
    s.opt = Several(s.optimizer(list(s.module.layer.parameters()), s.net), other)
    s.train(4)


def sparse_parameters_of_torch(s: Script) -> None:
    _beside_one_of_torch(s, _Sparse)


def complex_parameters_of_torch(s: Script) -> None:
    _beside_one_of_torch(s, _Complex)


def detached_before_backward(s: Script) -> None:
    """``detach()`` between a forward and its backward, which DDP reduces all the same."""
    s.train(4)
    for by_name, again in itertools.product((False, True), repeat=2):
        y = (s.net.forward if by_name else s.net)(s.x())
        optimizer = s.opt
        if s.fused:
            optimizer.detach()
        if again:
            with torch.no_grad():
                s.net(s.x())
        s.opt = torch.optim.SGD(s.params, lr=0.01)
        s.backward(y)
        s.step()
        s.train(1)
        s.opt = optimizer
        if s.fused:
            optimizer.attach(s.net)
        s.train(1)


def group_added_while_detached(s: Script) -> None:
    """Such a group is not one of manual mode."""
    s.fresh()
    s.wrap()
    s.opt = s.optimizer(s.params[:5], s.net)
    s.train(1)
    s.module.zero_grad()
    if s.fused:
        s.opt.detach()
    s.opt.add_param_group({"params": s.params[5:], "lr": 0.01})
    s.loss(s.net(s.x())).backward()
    assert all(type(param.grad) is torch.Tensor for param in s.params)
    s.module.zero_grad()
    if s.fused:
        s.opt.attach(s.net)
    s.train(3)


class _Detaching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def segment(x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            last = self.last(x)
            return x * last.detach()

        x = checkpoint(segment, x.requires_grad_(), use_reentrant=False)  # type: ignore[assignment]
        y: torch.Tensor = self.last(x)
        return y


def recomputed_with_detached(s: Script) -> None:
    s.bucket_mb = 1e-4  # so that the last layer's is complete before the recomputation
    s.build(_Detaching)
    for _ in range(4):
        s.backward(s.net(s.x()))
        s.step()


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3)
        self.second = nn.Conv2d(5, 4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return y


def _images(s: Script) -> torch.Tensor:
    return torch.cat([s.x(), s.x()]).flatten()[:72].reshape(2, 3, 3, 4).repeat(1, 1, 2, 2)


def channels_last_before_training(s: Script) -> None:
    s.build(_Convolutions)
    s.module.to(memory_format=torch.channels_last)
    if not s.fused:
        # torch 2.13's DDP itself gets it wrong: it needs the format when it is made.
        s.wrap()
    for _ in range(4):
        s.backward(s.net(_images(s)))
        s.step()


def channels_last_after_a_step(s: Script) -> None:
    s.build(_Convolutions)
    for i in range(4):
        if i == 2:
            s.module.to(memory_format=torch.channels_last)
        s.backward(s.net(_images(s)))
        s.step()


# What may be refused, by pattern, and what the error says. "overlap" is for that mode alone.
NEVER = r"never reduced"
OVERLAP = r"overlap=(True|False)"
TWO = r"two DistributedDataParallel|never reduced"
PATTERNS: dict[Callable[[Script], None], dict[str, str]] = {
    plainly: {},
    reentrant_checkpoints: {},
    one_reentrant_checkpoint: {},
    checkpoints: {},
    shared_weights: {},
    shared_weights_in_reentrant_checkpoints: {},
    shared_weights_in_checkpoints: {},
    # DDP lets ranks drift apart here without a word.
    forward_under_no_sync: {"": NEVER},
    forward_under_no_sync_then_synchronised: {},
    backward_under_no_sync: {},
    # DDP counts the hooks of the first iteration, also of this backward, and waits forever.
    module_first: {"static": NEVER},
    # A static graph needs the outputs of the module itself.
    module_after_arming: {"static": NEVER},
    module_last: {"": NEVER, "overlap": OVERLAP},
    retained: {"": NEVER, "overlap": "modified by an inplace operation"},
    retained_under_no_sync: {},
    accumulation: {},
    accumulation_in_checkpoints: {},
    accumulation_of_unused: {},
    synchronised_twice: {"overlap": OVERLAP},
    without_zeroing: {"overlap": OVERLAP},
    synchronised_twice_with_unused: {"overlap": OVERLAP},
    unused: {},
    unused_on_some_ranks: {"manual": "call optimizer.reduce_gradients()"},
    unused_but_set_by_hand: {},
    several_losses: {},
    two_forwards: {},
    evaluation_between: {},
    forward_without_backward: {},
    forward_by_name: {},
    frozen_later: {"": NEVER},
    unfrozen_later: {"": NEVER},
    unfinished: {"": NEVER},
    ignored_by_ddp: {"": NEVER},
    encoder_in_two_modules: {"": TWO, "overlap": OVERLAP},
    # Two DDPs that want the gradient in buckets of their own; we need it in none.
    encoder_in_two_modules_at_once: {"": TWO, "overlap": OVERLAP, "refused": "bucket view"},
    encoder_in_two_modules_the_other_first: {"": TWO},
    learning_rate_after_backward: {"overlap": OVERLAP},
    fuse_then_load: {},
    fuse_in_the_middle: {},
    attached_later: {},
    decay_after_backward: {},
    two_steps_after_one_backward: {"overlap": OVERLAP},
    a_stale_gradient_beside_new_ones: {"overlap": OVERLAP},
    retained_after_a_step: {"": "modified by an inplace operation"},
    norms_are_fresh: {"overlap": OVERLAP},
    clipped_with_others: {"overlap": OVERLAP},
    zeros_before_accumulation: {},
    gradients_of_other_strides: {},
    hooks_of_users: {},
    swapped_groups: {},
    edited_state: {},
    parameters_taken_out: {},
    two_optimizers_and_one_of_torch: {},
    two_modules_in_one_backward: {},
    sparse_parameters_of_torch: {},
    complex_parameters_of_torch: {},
    detached_before_backward: {},
    group_added_while_detached: {},
    recomputed_with_detached: {"overlap": OVERLAP},
    channels_last_before_training: {},
    channels_last_after_a_step: {"": "memory format"},
}
NAMES = {pattern.__name__: pattern for pattern in PATTERNS}
# What an optimizer without a DDP cannot do, and gradients that it does not leave to others.
WITH_DDP = {
    pattern.__name__
    for pattern in (
        *(attached_later, detached_before_backward, group_added_while_detached),
        *(parameters_taken_out, clipped_with_others, two_optimizers_and_one_of_torch),
        *(sparse_parameters_of_torch, complex_parameters_of_torch, hooks_of_users),
    )
}


# --- drawn scripts ----------------------------------------------------------------------

# A program is a list of operations and their arguments; ``execute`` says what they mean.
Program = list[tuple[Any, ...]]
ANY = (
    "never reduced|overlap=True|was taken out|was not applied|modified by an inplace operation"
    "|p.grad.data|two DistributedDataParallel|call optimizer.reduce_gradients"
    # What DDP says of it.
    "|marked as ready twice|finished reduction in the prior iteration|undefined, but still"
    "|Your training graph has changed|does not require grad"
)


def _take_out(s: Script, layer: int) -> None:
    """By hand, or back again: into the last group."""
    groups = s.opt.param_groups
    mine = list(s.module.layers[layer].parameters())
    held = {id(param) for group in groups for param in group["params"]}
    if id(mine[0]) in held:
        for group in groups:
            group["params"][:] = [p for p in group["params"] if not any(p is q for q in mine)]
    else:
        groups[-1]["params"].extend(mine)
    s.saved = None


def _taken_out(s: Script) -> bool:
    """Then torch's ``state_dict()`` raises: state of a parameter without a number."""
    return sum(len(group["params"]) for group in s.opt.param_groups) < len(s.params)


def _state(s: Script) -> dict[str, Any]:
    """The whole, as torch has it."""
    if s.fused:
        whole: dict[str, Any] = s.opt.full_state_dict(rank0_only=False)
        return whole
    return copy.deepcopy(s.opt.state_dict())


def _round_trip(s: Script, how: str) -> None:
    """Out of the optimizer and into it again."""
    if how == "distributed":
        if not (s.fused or s.opt.state):
            return  # torch would make moments, by a step with gradients of zero, and keep them
        # Slow to import.
        from torch.distributed.checkpoint import state_dict as dcp

        state = dcp.get_optimizer_state_dict(s.net, s.opt)
        # Parameters that were never used have no state.
        options = dcp.StateDictOptions(strict=False)
        dcp.set_optimizer_state_dict(s.net, s.opt, state, options=options)
    elif how == "local" and s.fused:
        s.opt.load_state_dict(copy.deepcopy(s.opt.local_state_dict()))
    else:
        s.opt.load_state_dict(_state(s))


def execute(program: Program) -> Callable[[Script], None]:
    def run(s: Script) -> None:
        kept: list[torch.Tensor] = []
        s.saved = None
        for operation, *arguments in program:
            if operation == "pass":
                forward_sync, backward_sync, through, options, retain = arguments
                net = s.net if through == "ddp" else s.module
                with contextlib.nullcontext() if forward_sync else s.net.no_sync():
                    y = net(s.x(), **options)
                with contextlib.nullcontext() if backward_sync else s.net.no_sync():
                    s.backward(y, retain_graph=retain)
                kept = [y] if retain else []
            elif operation == "again" and kept:
                s.backward(kept.pop())
            elif operation == "evaluate":
                with torch.no_grad():
                    s.net(s.x())
            elif operation == "freeze":
                layer, frozen = arguments
                s.module.layers[layer].requires_grad_(not frozen)
            elif operation == "step":
                s.step(zero=arguments[0])
            elif operation == "write":
                s.write(arguments[0])
            elif operation == "set data" and not s.setup.finish:
                s.set_data(arguments[0])
            elif operation == "zero":
                s.opt.zero_grad()
            elif operation == "detach" and s.setup.mode != "manual":
                # In the middle of a pass, or after it.
                early, options = arguments
                y = s.net(s.x(), **options) if early else None
                s.module.zero_grad()
                if s.fused:
                    s.opt.detach()
                plain = torch.optim.SGD(s.params, lr=0.01)
                if y is None:
                    y = s.net(s.x(), **options)
                s.loss(y).backward()
                plain.step()
                s.module.zero_grad()
                if s.fused:
                    s.opt.attach(s.net)
            elif operation == "take out" and not s.setup.finish:
                _take_out(s, arguments[0])
            elif operation == "trip" and not _taken_out(s):
                _round_trip(s, arguments[0])
            elif operation == "save" and not _taken_out(s):
                s.saved = _state(s)
            elif operation == "load" and s.saved is not None:
                # torch's optimizers go on with the tensors that they are given.
                s.opt.load_state_dict(copy.deepcopy(s.saved))

    return run
