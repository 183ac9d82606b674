"""A small training script that runs with torch's optimizer or with ours."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from harness import Context

WIDTH = 9
LAYERS = 6
BUCKET_MB = 0.0015  # three layers less a bit: buckets straddle layers and segments
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1},
    "LAMB": {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1},
}


class Lamb(torch.optim.Optimizer):
    """You et al. 2020 (arXiv:1904.00962), algorithm 2, phi the identity, in float64.

    ``divide_again`` is a known wrong implementation, with a second division by the norm of the
    update.
    """

    def __init__(self, params: Any, *, divide_again: bool = False, **hyper: Any) -> None:
        flags = dict.fromkeys(("trust_clip", "always_adapt", "maximize"), False)
        super().__init__(params, {"betas": (0.9, 0.999), **flags, **hyper})
        self.divide_again = divide_again
        self.exact: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        x = self.exact.get(param)
        if x is None or not torch.equal(x.to(param.dtype), param):  # somebody has written to it
            x = param.double()
        grad = param.grad.double() * (-1 if group["maximize"] else 1)  # type: ignore[union-attr]
        beta1, beta2 = group["betas"]
        state = self.state[param]
        if not state:
            state.update(step=torch.zeros(()), exp_avg=grad * 0, exp_avg_sq=grad * 0)
        state["step"] += 1
        t = int(state["step"])
        m = state["exp_avg"] = beta1 * state["exp_avg"] + (1 - beta1) * grad
        v = state["exp_avg_sq"] = beta2 * state["exp_avg_sq"] + (1 - beta2) * grad * grad
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        u = m_hat / (v_hat.sqrt() + group["eps"]) + group["weight_decay"] * x
        ratio = 1.0
        if group["weight_decay"] != 0 or group["always_adapt"]:
            norm, size = float(x.norm()), float(u.norm())
            ratio = norm / size if norm > 0 and size > 0 else 1.0
            if self.divide_again:
                ratio /= size
        if group["trust_clip"]:
            ratio = min(ratio, 1.0)
        self.exact[param] = x - float(group["lr"]) * ratio * u
        param.copy_(self.exact[param])


def in_one_process(name: str, params: Any, **options: Any) -> Any:
    """torch's optimizer; it has no LAMB."""
    if name == "LAMB":
        return Lamb(params, **options)
    return getattr(torch.optim, name)(params, foreach=False, **options)


def of_torch(name: str, params: Any) -> Any:
    """The oracle of a script."""
    return in_one_process(name, params, **OPTIMIZERS[name])


def in_mode(
    mode: str, module: nn.Module, kind: str = "AdamW", ddp: Mapping[str, Any] = {}, **options: Any
) -> tuple[Any, Any]:
    """What a script calls, a DDP but in manual mode, and a fused optimizer of its parameters."""
    import fusedpg

    net = module if mode == "manual" else DistributedDataParallel(module, **ddp)
    own = {} if mode == "manual" else {"ddp": net, "overlap": mode == "overlap"}
    return net, getattr(fusedpg.optim, kind)(module.parameters(), **own, **options)


SCALED = ("scaler", "overflow", "scaler alone", "scaler and max_grad_norm")
MAX_NORM = 0.7


@dataclasses.dataclass(frozen=True)
class Setup:
    """How a script is run."""

    optimizer: str = "SGD"
    # Or overlap, hook (of the user's, under the optimizer's), manual (the oracle has a DDP there).
    mode: str = "ddp"
    view: bool = False
    graph: str = ""  # or find_unused, static
    # Or clip, its own clip, max_grad_norm; scaler (with clip), overflow (the same, and some
    # gradients of one rank are infinite), scaler alone (that, and only the scaler's step()), scaler
    # and max_grad_norm (that, and step() clips).
    finish: str = ""
    batched: bool = False  # DDP copies gradients when a bucket is complete
    modes: bool = False  # under a dispatch mode of the user's, and one that counts FLOPs

    def ddp(self) -> dict[str, Any]:
        # Torch before 2.13 does not know it.
        batched = {"batched_grad_copy": True} if self.batched else {}
        return batched | {
            "gradient_as_bucket_view": self.view,
            "find_unused_parameters": self.graph == "find_unused",
            "static_graph": self.graph == "static",
        }


class Net(nn.Module):
    """Layers that can be skipped, and run in checkpointed segments."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        if shared:
            self.layers[4] = self.layers[1]

    def forward(
        self,
        x: torch.Tensor,
        skip: Sequence[int] = (),
        segments: int = 0,
        reentrant: bool = False,
    ) -> torch.Tensor:
        def part(begin: int, end: int) -> Callable[[torch.Tensor], torch.Tensor]:
            def run(x: torch.Tensor) -> torch.Tensor:
                for i in range(begin, end):
                    if i not in skip:
                        x = torch.tanh(self.layers[i](x))
                return x

            return run

        if not segments:
            return part(0, LAYERS)(x)
        if reentrant:
            x = x.requires_grad_()
        for i in range(segments):
            one = part(LAYERS * i // segments, LAYERS * (i + 1) // segments)
            x = checkpoint(one, x, use_reentrant=reentrant)  # type: ignore[assignment]
        return x


class Bare(nn.Module):
    """A module without a DDP, for manual mode, called as one with a DDP is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.forward = module, module.forward

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Several:
    """Optimizers that a script calls together."""

    def __init__(self, *optimizers: Any) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class Script:
    """What a training script has at hand, either with torch's optimizer or with ours."""

    def __init__(self, context: Context, setup: Setup, fused: bool, group: Any = None) -> None:
        self.context, self.setup, self.fused, self.group = context, setup, fused, group
        self.manual = fused and setup.mode == "manual"
        self.batches = 0
        self.bucket_mb = BUCKET_MB
        self.diverged: int | None = None  # the step after which ranks differ
        self.saved: dict[str, Any] | None = None  # state of the optimizer
        self.history: list[list[torch.Tensor]] = []
        self.flops = 0  # that were counted
        self.late: list[int] = []  # layers that are to be written behind the next update
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.build()

    def build(self, make: Callable[[], nn.Module] = Net) -> None:
        """The module, its DDP and its optimizer."""
        self.fresh(make)
        self.wrap()
        self.opt: Any = self.optimizer(self.params, self.net)

    def fresh(self, make: Callable[[], nn.Module] = Net) -> None:
        torch.manual_seed(11)
        self.module: Any = make().double()
        self.params = list(self.module.parameters())

    def wrap(self) -> None:
        self.net: Any = Bare(self.module) if self.manual else self.with_ddp()

    def with_ddp(self) -> DistributedDataParallel:
        return DistributedDataParallel(
            self.module, process_group=self.group, bucket_cap_mb=self.bucket_mb, **self.setup.ddp()
        )

    def optimizer(self, params: Any, net: Any, name: str = "", **options: Any) -> Any:
        import fusedpg

        name = name or self.setup.optimizer
        if not self.fused:
            return of_torch(name, params)
        kind = getattr(fusedpg.optim, name)
        return kind(params, **OPTIMIZERS[name], **{**self.own(net), **options})

    def own(self, net: Any) -> dict[str, Any]:
        """What our optimizers are given besides torch's arguments."""
        clips = "max_grad_norm" in self.setup.finish
        own: dict[str, Any] = {"max_grad_norm": MAX_NORM} if clips else {}
        if self.manual:
            return {"process_group": self.group, **own}
        if self.setup.mode == "hook":
            own["comm_hook"] = (self.group, allreduce_hook)
        return {"ddp": net, "overlap": self.setup.mode == "overlap", **own}

    def in_groups(self) -> None:
        """As it is built, with two parameter groups that differ in their rate."""
        self.fresh()
        self.wrap()
        half = len(self.params) // 2
        groups = [{"params": self.params[:half]}, {"params": self.params[half:], "lr": 0.001}]
        self.opt = self.optimizer(groups, self.net)

    def x(self) -> torch.Tensor:
        """The next batch of this rank."""
        generator = torch.Generator().manual_seed(1000 * self.batches + self.context.rank)
        self.batches += 1
        return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)

    def loss(self, y: torch.Tensor) -> torch.Tensor:
        # Ranks differ in size, so that a forgotten division shows.
        return y.square().sum() * (1 + self.context.rank)

    def backward(self, y: torch.Tensor, **options: Any) -> None:
        loss = self.loss(y)
        if self.setup.finish in SCALED:
            loss = self.scaler.scale(loss)
        last = self.context.rank == self.context.world_size - 1
        overflows = self.setup.finish in SCALED[1:]
        if overflows and last and self.batches % 3 == 2:
            loss = loss * torch.inf
        before = self.values()
        loss.backward(**options)
        if self.fused and self.setup.mode != "overlap":
            self.check_still(before, "backward has changed parameters")

    def values(self) -> list[torch.Tensor]:
        some = (param.detach().clone() for param in self.params)
        return [torch.view_as_real(one) if one.is_complex() else one for one in some]

    def check_still(self, before: list[torch.Tensor], wrong: str) -> None:
        for now, old in zip(self.values(), before, strict=True):
            assert torch.equal(now.nan_to_num(), old.nan_to_num()), wrong

    def write(self, layer: int) -> None:
        """A decay by hand before step(), which with overlap=True comes behind the update."""
        if not self.fused and self.setup.mode == "overlap":
            self.late.append(layer)
        else:
            self._decay(layer)

    @torch.no_grad()
    def _decay(self, layer: int) -> None:
        for param in self.module.layers[layer].parameters():
            param.mul_(0.75)

    def set_data(self, layer: int) -> None:
        """What stands in p.grad, behind its back."""
        for param in self.module.layers[layer].parameters():
            if param.grad is not None:
                param.grad.data = torch.full_like(param, 0.25)

    def step(self, zero: bool = True) -> None:
        finish, opt = self.setup.finish, self.opt
        if finish in SCALED and all(param.grad is None for param in self.params):
            finish = ""  # GradScaler raises
        looked = self.values()
        in_step = finish == "scaler alone" or "max_grad_norm" in finish
        by_itself = in_step and (self.fused or finish == "scaler alone")
        grads = [p.grad for p in self.params if p.grad is not None]
        kept = [(grad, grad.clone()) for grad in grads if in_step and not self.fused]
        if self.manual and finish and not by_itself:
            opt.reduce_gradients()
        if finish in SCALED and not by_itself:
            self.scaler.unscale_(opt)
        if finish == "its own clip" and self.fused:
            opt.clip_grad_norm_(MAX_NORM)
        elif finish and not by_itself:
            nn.utils.clip_grad_norm_(self.params, MAX_NORM, foreach=False)
        if finish in SCALED:
            self.scaler.step(opt)
            self.scaler.update()
        else:
            opt.step()
        # Ours scale and clip in the step, and leave gradients as they are.
        for grad, before in kept:
            grad.copy_(before)
        if getattr(opt, "overlap", False):
            self.check_still(looked, "step() has changed parameters")
        while self.late:
            self._decay(self.late.pop())
        now = self.values()
        self.history.append(now)
        if not self.fused and self.diverged is None:
            first = torch.cat([one.flatten() for one in now])
            dist.broadcast(first, 0, group=self.context.oracle)
            apart = torch.tensor(
                float(not torch.equal(first, torch.cat([p.flatten() for p in now])))
            )
            dist.all_reduce(apart, group=self.context.oracle)
            self.diverged = len(self.history) - 1 if apart else None
        if zero:
            opt.zero_grad()

    def train(self, steps: int = 3, **forward: Any) -> None:
        for _ in range(steps):
            self.backward(self.net(self.x(), **forward))
            self.step()
