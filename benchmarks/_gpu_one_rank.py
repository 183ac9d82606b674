"""A whole mixed-precision optimizer step of one rank that has a GPU to itself.

bf16 parameters and gradients, scaled by a loss scale; fp32 masters and two fp32 moments. The step:
the gradients' norm, unscale, clip, AdamW on the masters, and their rounded copy into the
parameters. No way can move less than 30 bytes an element: the gradient is read twice, as its norm
must be known first (4), masters and moments are read and written (24), parameters written (2). The
copy that all are compared with moves as many.

"eager" rounds the gradient to bf16 twice more than the others, so its results are compared less
strictly. torch.compile gets no list of 400 tensors, whose code it might take minutes for.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import _gpu_kernels as kernels
import _harness as harness
from _harness import COPY, Bar, Row

OURS, OURS_GRAPH = "fused_adamw_, masters", "fused_adamw_, masters, as a graph"
EAGER = "unscale, clip_grad_norm_, AdamW(fused=True), copy"
SMART, SMART_GRAPH = "_foreach_norm, _fused_adamw_, copy", "_foreach_norm, _fused_adamw_, graph"
COMPILED = "torch.compile of the formula"
LR, BETA1, BETA2, EPS, DECAY, LARGEST = 1e-3, 0.9, 0.999, 1e-8, 1e-2, 1.0
SCALE = 1024.0
MOVED = 30  # bytes an element
CHECKED = 4096  # elements of each tensor
TOLERANCE = {EAGER: 1e-2}  # of what two steps change; others:
LEAST_TOLERANCE = 1e-4
TENSORS = (1, 400)
ENOUGH = 40.0  # seconds of a case, then it is taken as it is
LARGE = 10_000_000  # elements from which one step is long enough to be timed
M = 1 << 20


def bars() -> list[Bar]:
    found = []
    for size in (200 * M, 2000 * M):
        found.append(Bar(1, case_of(1), OURS, size, COPY, at_most=1 / 0.9))
        found.append(Bar(1, case_of(1), OURS, size, EAGER, at_least=1 / 0.7))
    return found


def case_of(tensors: int) -> str:
    return f"step of one rank, {tensors} tensor{'s' * (tensors > 1)}"


class State:
    """The same tensors for all arms; what they begin with is held beside them."""

    def __init__(self, elements: int, tensors: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(1)
        self.each = max(32, elements // tensors // 32 * 32)
        self.elements = self.each * tensors

        def make(factor: float) -> list[Tensor]:
            return [
                (torch.randn(self.each, generator=generator, device=device) * factor).bfloat16()
                for _ in range(tensors)
            ]

        def zeros(*shape: int) -> list[Tensor]:
            return [torch.zeros(shape, device=device) for _ in range(tensors)]

        self.start, self.gradients = make(1.0), make(0.01 * SCALE)
        self.params = [x.clone() for x in self.start]
        self.grads = [x.clone() for x in self.gradients]
        self.masters = [x.float() for x in self.start]
        self.m, self.v, self.steps = zeros(self.each), zeros(self.each), zeros()
        self.scale = torch.full((), SCALE, device=device)
        self.found = torch.zeros((), device=device)

    def reset(self) -> None:
        torch._foreach_copy_(self.params, self.start)
        torch._foreach_copy_(self.grads, self.gradients)
        torch._foreach_copy_(self.masters, self.start)
        for tensors in (self.m, self.v, self.steps):
            torch._foreach_zero_(tensors)

    def divisor(self) -> Tensor:
        """Of the gradients: the loss scale, and what clips them."""
        norms = torch._foreach_norm(self.grads, 2, dtype=torch.float32)
        norm = torch.stack(norms).norm() / self.scale
        return self.scale * ((norm + 1e-6) / LARGEST).clamp(min=1.0)

    def reference(self) -> Tensor:
        """The first masters of each tensor after two steps, in fp64."""
        squares = sum(
            float(part.double().square().sum()) for g in self.gradients for part in g.split(1 << 24)
        )
        divisor = SCALE * max(1.0, (math.sqrt(squares) / SCALE + 1e-6) / LARGEST)
        masters = []
        for start, gradient in zip(self.start, self.gradients, strict=True):
            x, g = start[:CHECKED].double(), gradient[:CHECKED].double() / divisor
            m, v = torch.zeros_like(x), torch.zeros_like(x)
            for t in (1, 2):
                m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
                update = m / (1 - BETA1**t) / ((v / (1 - BETA2**t)).sqrt() + EPS)
                x = x * (1 - LR * DECAY) - LR * update
            masters.append(x)
        return torch.cat(masters)


# ---------------------------------------------------------------------------------------------
# Arms


def eager(s: State) -> Callable[[], object]:
    params = [torch.nn.Parameter(x) for x in s.params]
    masters = [torch.nn.Parameter(x) for x in s.masters]
    for param, grad in zip(params, s.grads, strict=True):
        param.grad = grad
    optimizer = torch.optim.AdamW(
        masters, lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, fused=True
    )
    for master, m, v, step in zip(masters, s.m, s.v, s.steps, strict=True):
        optimizer.state[master] = {"step": step, "exp_avg": m, "exp_avg_sq": v}

    def call() -> None:
        inverse = s.scale.reciprocal()
        torch._amp_foreach_non_finite_check_and_unscale_(s.grads, s.found, inverse)
        torch.nn.utils.clip_grad_norm_(params, LARGEST, foreach=True)
        for master, grad in zip(masters, s.grads, strict=True):
            master.grad = grad.float()
        optimizer.step()
        torch._foreach_copy_(s.params, s.masters)

    return call


def smart(s: State) -> Callable[[], object]:
    """What a careful user writes of torch's own calls."""
    hyper: dict[str, Any] = {"lr": LR, "beta1": BETA1, "beta2": BETA2, "eps": EPS}

    def call() -> None:
        divisor = s.divisor()
        wide = [grad.float() for grad in s.grads]
        torch._foreach_add_(s.steps, 1)
        torch._fused_adamw_(
            *(s.masters, wide, s.m, s.v, [], s.steps),
            **hyper,
            weight_decay=DECAY,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=s.found,
        )
        torch._foreach_copy_(s.params, s.masters)

    return call


def compiled(s: State) -> Callable[[], object]:
    def formula(
        params: list[Tensor],
        grads: list[Tensor],
        masters: list[Tensor],
        moments: tuple[list[Tensor], list[Tensor]],
        steps: list[Tensor],
        scale: Tensor,
    ) -> None:
        squares = torch.stack([grad.float().square().sum() for grad in grads]).sum()
        norm = squares.sqrt() / scale
        factor = 1.0 / (scale * ((norm + 1e-6) / LARGEST).clamp(min=1.0))
        for i, (param, grad, x) in enumerate(zip(params, grads, masters)):
            m, v, t = moments[0][i], moments[1][i], steps[i]
            t.add_(1)
            wide = grad.float() * factor
            m.lerp_(wide, 1 - BETA1)
            v.mul_(BETA2).addcmul_(wide, wide, value=1 - BETA2)
            below = v.sqrt() / (1 - BETA2**t).sqrt() + EPS
            x.mul_(1 - LR * DECAY).sub_(LR / (1 - BETA1**t) * m / below)
            param.copy_(x)

    call = torch.compile(formula, dynamic=False, fullgraph=True)
    return lambda: call(s.params, s.grads, s.masters, (s.m, s.v), s.steps, s.scale)


def ours(s: State) -> Callable[[], object]:
    import fusedpg

    hyper: dict[str, Any] = {"lr": LR, "beta1": BETA1, "beta2": BETA2, "eps": EPS}

    def call() -> None:
        fusedpg.fused_adamw_(
            *(s.params, s.grads, s.m, s.v, [], s.steps),
            **hyper,
            weight_decay=DECAY,
            amsgrad=False,
            maximize=False,
            grad_scale=s.divisor(),
            found_inf=s.found,
            master_params=s.masters,
        )

    return call


def graph(arm: Callable[[State], Callable[[], object]]) -> Callable[[State], Callable[[], object]]:
    def make(s: State) -> Callable[[], object]:
        call = arm(s)
        call()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            call()
        return captured.replay

    return make


ARMS: dict[str, Callable[[State], Callable[[], object]]] = {
    OURS: ours,
    SMART: smart,
    EAGER: eager,
    COMPILED: compiled,
    OURS_GRAPH: graph(ours),
    SMART_GRAPH: graph(smart),
}


def check(s: State, name: str, call: Callable[[], object]) -> None:
    """Two steps from the start, against fp64; the parameters are the rounded masters."""
    s.reset()
    call()
    torch._foreach_copy_(s.grads, s.gradients)  # unscaled in place
    call()
    want = s.reference()
    got = torch.cat([x[:CHECKED] for x in s.masters]).double()
    first = torch.cat([x[:CHECKED] for x in s.start]).double()
    error = float((got - want).norm() / (want - first).norm())
    harness.require(error <= TOLERANCE.get(name, LEAST_TOLERANCE), f"{name}: error {error:.1e}")
    pairs = zip(s.params, s.masters, strict=True)
    harness.require(
        all(torch.equal(param, master.bfloat16()) for param, master in pairs),
        f"{name}: parameters are not the rounded masters",
    )


# ---------------------------------------------------------------------------------------------
# Time


def measure(s: State, size: int, tensors: int, rounds: int) -> list[Row]:
    began = time.monotonic()
    # Beside 1e9 elements no two buffers of half of what a step moves would fit.
    parts = 4 if s.elements > 50 * LARGE else 1
    calls = {COPY: kernels.copy_arm(MOVED * s.elements // parts)}
    for name, make in ARMS.items():
        if name == COMPILED and tensors > 1:
            continue
        calls[name] = make(s)
        check(s, name, calls[name])
    batch = 1 if s.elements >= LARGE else 20
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for number in range(rounds + 1):
        for name in order:
            if name == EAGER:
                s.reset()
            taken = kernels.seconds(calls[name], batch) / batch
            if number > 0:
                samples[name].append(taken * (parts if name == COPY else 1))
        order.append(order.pop(0))
        if number >= 3 and time.monotonic() - began > ENOUGH:
            break
    case = case_of(tensors)
    return [
        Row.of(case, size, name, values, modes=False, calls=batch)
        for name, values in samples.items()
    ]


def run(args: argparse.Namespace) -> list[Row]:
    """`args.sizes`: bytes of the bf16 parameters."""
    import fusedpg  # noqa: F401

    torch.cuda.set_device(kernels.DEVICE)
    dist.init_process_group("fused", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    for size in args.sizes:
        for tensors in TENSORS if args.lists else TENSORS[:1]:
            print(f"{case_of(tensors)}, {harness.format_size(size)}", flush=True)
            s = State(size // 2, tensors, kernels.DEVICE)
            rows += measure(s, size, tensors, args.rounds)
            del s
            torch.cuda.empty_cache()
    dist.destroy_process_group()
    return rows
