"""The four fused steps on a GPU against torch.optim in one process."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch

from checks import fused_ops
from checks.cases import digest, distance, same
from checks.fused_ops import BF16, FP16, FP64, TOLERANCE, Model, Oracle, Run, compare, train
from gpu_checks.device import DEVICE, group_of, to_device, to_host
from harness import Context

HALF = (BF16, FP16)


class GpuContext(Context):
    """Allocates on the device, or in the arena that the GPUs of a group see."""

    group: Any = None

    def empty(self, *size: int, dtype: torch.dtype = torch.float32, arena: bool) -> torch.Tensor:
        import fusedpg

        if arena:
            return fusedpg.empty(*size, dtype=dtype, device=DEVICE, group=self.group)
        return torch.empty(*size, dtype=dtype, device=DEVICE)


class GpuModel(Model):
    """A model on the device, whose reference knows how NCCL rounds."""

    def __init__(self, context: Context, run: Run, **options: Any) -> None:
        here = GpuContext(**{f.name: getattr(context, f.name) for f in dataclasses.fields(context)})
        here.group = self.group = group_of(context, **options)
        # NCCL adds; a single rank rounds its products in the same way.
        self.wire_sums = options.get("half_sums") == "wire" or context.world_size == 1
        super().__init__(here, run)
        self.states = {name: to_device(slices) for name, slices in self.states.items()}
        self.steps = to_device(self.steps)

    def reduced(self, step: int, i: int) -> torch.Tensor:
        """Where NCCL adds half gradients, products with a weight and every partial sum are rounded.

        Exact for two ranks; for more, NCCL's order is another one.
        """
        run, wire = self.run, self.run.grad_dtype(i)
        if wire not in HALF or run.memory == "arena" or not self.wire_sums:
            return super().reduced(step, i)
        ranks = range(self.context.world_size)
        total = None
        for rank in ranks:
            part = self.gradient(step, rank, i).float()
            if run.weighted:
                part = (part * self.weight(rank)).to(wire).float()
            total = part if total is None else (total + part).to(wire).float()
        assert total is not None
        total = total.double()
        if run.weighted:
            total /= sum(self.weight(rank) for rank in ranks)
        elif run.reduce == "mean":
            total /= len(ranks)
        return total.to(run.compute(i))

    def options(self) -> dict[str, Any]:
        options = super().options() | {"group": self.group}
        return {
            key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
            for key, value in options.items()
        }

    def on_host(self) -> GpuModel:
        """A copy to look at."""
        twin = copy.copy(self)
        twin.params, twin.masters = to_host(self.params), to_host(self.masters)
        twin.steps = to_host(self.steps)
        twin.states = {name: to_host(slices) for name, slices in self.states.items()}
        return twin

    def digest(self, state: bool = False) -> str:
        return digest(to_host(self.state() if state else self.params))


def parity(context: Context, run: Run, chunk_bytes: int = 0) -> str:
    """A run against its oracle; the digest of the parameters."""
    model = GpuModel(context, run, **({"cuda_chunk_bytes": chunk_bytes} if chunk_bytes else {}))
    oracle = Oracle(model)
    train(model, oracle)
    check(model, oracle)
    return model.digest()


def check(model: GpuModel, oracle: Oracle) -> None:
    run, seen = model.run, model.on_host()
    types = {run.grad_dtype(i) for i in range(len(run.shapes))}
    if model.context.world_size <= 2 or not types & set(HALF):
        compare(seen, oracle)
        return
    for i, want in enumerate(oracle.params):
        exact = want.detach()
        noise = TOLERANCE[FP16 if run.grad_dtype(i) == FP16 else BF16]
        limit = 8 * (noise if run.grad_dtype(i) in HALF else TOLERANCE[run.dtype(i)])
        assert distance(seen.params[i].to(exact.dtype), exact) <= limit, (i, run)


def digests(context: Context, run: Run, chunk_bytes: int = 0) -> tuple[str, str]:
    model = GpuModel(context, run, **({"cuda_chunk_bytes": chunk_bytes} if chunk_bytes else {}))
    train(model, None)
    return model.digest(), model.digest(state=True)


def like_flat(context: Context, op: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    fused_ops.like_flat(context, op, shapes, Run(op).memory, GpuModel)


def overflow(context: Context, run: Run) -> None:
    fused_ops.overflow(context, run, GpuModel)


def learning_rates(context: Context, op: str) -> None:
    """A number, and tensors on the host and on the device, in both their types: the same bits."""
    digests = set()
    # As float32, so that all of them mean the same number.
    lr = float(torch.tensor(1e-2))
    for value in (
        lr,
        torch.tensor(lr),
        torch.tensor(lr, dtype=FP64),
        torch.tensor(lr, device=DEVICE),
        torch.tensor(lr, dtype=FP64, device=DEVICE),
    ):
        model = GpuModel(context, Run(op))
        for step in range(4):
            model.set_gradients(step)
            model.step(lr=value)
        digests.add(model.digest(state=True))
    assert len(digests) == 1, op


def no_learning(context: Context, run: Run) -> None:
    """lr=0 moves nothing."""
    model = GpuModel(context, run)
    before = [param.clone() for param in model.params]
    model.set_gradients(0)
    model.step()
    for param, old in zip(model.params, before, strict=True):
        assert same(param, old)


def wrong_arguments(context: Context) -> None:
    """What this rank can see alone is a ValueError, and the group stays usable."""
    model = GpuModel(context, Run("adamw"))
    model.set_gradients(0)
    cpu = [step.cpu() for step in model.steps]
    grads = list(model.grads)
    for name, call in {
        "counters elsewhere": lambda: setattr(model, "steps", cpu),
        "gradients too short": lambda: model.grads.pop(),
    }.items():
        kept = model.steps
        call()
        try:
            model.step()
        except ValueError as error:
            assert "fused" in str(error), error
        else:
            # On the fake device both are the CPU.
            assert name == "counters elsewhere" and DEVICE.type == "cpu", name
        model.steps, model.grads = kept, list(grads)
    model.step()


def direct(context: Context, run: Run) -> dict[str, Any]:
    """The device-API path, where the ranks reach each other's memory, against the stock one."""
    import fusedpg

    arena = GpuModel(context, dataclasses.replace(run, memory="arena"))
    found: dict[str, Any] = {"bytes": fusedpg.group_info(arena.group)["cuda_arena"]}
    train(arena, None)
    found["path"] = fusedpg.group_info(arena.group)["cuda_path"]
    stock = GpuModel(context, run)
    train(stock, None)
    assert fusedpg.group_info(stock.group)["cuda_path"] == "stock"
    for i, (mine, want) in enumerate(zip(arena.params, stock.params, strict=True)):
        limit = 4 * TOLERANCE[run.dtype(i)]
        assert distance(mine.cpu().double(), want.cpu().double()) <= limit, i
    found["digest"] = arena.digest()
    return found
