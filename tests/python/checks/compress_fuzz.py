"""Training with prescribed gradients, compressed: what a rank sees of it.

No postponed annotations here: DDP inspects those of its hooks.
"""

import contextlib
import dataclasses
import pickle
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedpg.compress as compress
from fusedpg.compress import _schedule, _state
from harness import Context

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclasses.dataclass(frozen=True)
class Case:
    """One training, drawn from a seed."""

    params: dict[str, Any]
    schedule: str | int = "bucket"
    numels: tuple[int, ...] = (3, 40, 7, 129, 1)
    steps: int = 5
    dtype: str = "fp32"
    bucket_bytes: int = 300
    accumulate: int = 0  # steps without synchronisation before each one that has it
    restart_at: int = -1  # the step before which everything is made anew, from a checkpoint
    restart_by: str = "dict"  # or "pickle", or "live": loaded into the state that is at work
    schedule_after: str | int | None = None
    bad_at: int = -1  # the step at which rank 0 has a NaN or an Inf
    bad: float = float("nan")
    unused: float = 0.0  # how many parameters a rank leaves out of a step
    rewrap_at: tuple[int, ...] = ()  # steps before which the module gets a DDP of other buckets
    named: bool = False  # whether the state is told the parameters' names
    clock: bool = False  # times of the search are drawn, by each rank for itself
    seed: int = 0


def shape(numel: int) -> tuple[int, ...]:
    """Every fourth one a matrix, if it can be."""
    return (numel // 8, 8) if numel % 8 == 0 and numel > 8 else (numel,)


def gradients(case: Case, rank: int, step: int, micro: int) -> list[np.ndarray[Any, Any]]:
    """What a rank's backward gives, exact in bf16; some are small, some are zero."""
    drawn = np.random.default_rng([case.seed, rank, step, micro])
    found = []
    for n, numel in enumerate(case.numels):
        values = drawn.integers(-63, 64, numel) * 2.0 ** drawn.integers(-9, 1, numel)
        values[drawn.random(numel) < 0.1] = 0.0
        found.append(values)
        if step == case.bad_at and rank == 0 and n == 1:
            values[numel // 2] = case.bad
    return found


def used(case: Case, rank: int, step: int) -> list[bool]:
    """Parameter 0 always is."""
    drawn = np.random.default_rng([case.seed, rank, step, 99])
    return [n == 0 or bool(drawn.random() >= case.unused) for n in range(len(case.numels))]


class Model(nn.Module):
    """Its gradients are what it is called with."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        dtype = DTYPES[case.dtype]
        self.all = nn.ParameterList(torch.zeros(shape(n), dtype=dtype) for n in case.numels)

    def forward(self, *wanted: torch.Tensor) -> torch.Tensor:
        return torch.stack([
            (p * g.view_as(p)).sum().float() for p, g in zip(self.all, wanted) if g.numel()
        ]).sum()  # fmt: skip


class Run:
    """A DDP module, its state and the order in which the hook has seen its parameters."""

    def __init__(self, case: Case, model: Model, state: Any, order: Sequence[int] = ()) -> None:
        self.state = state
        self.order = list(order)
        places = {id(p): n for n, p in enumerate(model.all)}
        self.units: list[list[int]] = []

        def hook(
            state: compress.State, bucket: torch.distributed.GradBucket
        ) -> torch.futures.Future[torch.Tensor]:
            if bucket.index() == 0:
                self.units = []
            self.units.append([places[id(p)] for p in bucket.parameters()])
            # As checkpoints have them.
            self.order += [n for n in self.units[-1][::-1] if n not in self.order]
            return compress.hook(state, bucket)

        self.ddp = DistributedDataParallel(
            model,
            bucket_cap_mb=case.bucket_bytes / 2**20,
            find_unused_parameters=case.unused > 0,
            gradient_as_bucket_view=case.seed % 2 == 0,
        )
        self.ddp.register_comm_hook(state, hook)

    def kept(self, case: Case) -> dict[str, list[Any]]:
        """By name, of each parameter."""
        memory = self.state.state_dict()["memory"]
        found: dict[str, list[Any]] = {}
        for name, tensors in memory.items():
            found[name] = [None] * len(case.numels)
            for place, tensor in zip(self.order, tensors):
                found[name][place] = None if tensor is None else tensor.double().numpy()
        return found


def state_of(case: Case, model: Model, schedule: str | int) -> compress.State:
    names = model.named_parameters() if case.named else None
    return compress.from_params(
        case.params, schedule=schedule, seed=case.seed, named_parameters=names
    )


def restarted(case: Case, run: Run, model: Model) -> Run:
    state = run.state
    if case.restart_by == "pickle":
        return Run(case, model, pickle.loads(pickle.dumps(state)))
    if case.restart_by == "live":
        saved = pickle.loads(pickle.dumps(state.state_dict()))
        for name in state._residuals.names():
            for p in model.all:
                known = state._residuals.get(name, p)
                if known is not None:
                    known.fill_(7.0)  # what was there does not matter
        state.load_state_dict(saved)
        return run
    schedule = case.schedule if case.schedule_after is None else case.schedule_after
    made = state_of(case, model, schedule)
    made.load_state_dict(state.state_dict())
    return Run(case, model, made)


@contextlib.contextmanager
def drawn_times(seed: Sequence[int]) -> Iterator[None]:
    """Every look at the clock is a random time after the one before."""
    drawn = np.random.default_rng(seed)
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += float(10 ** drawn.uniform(-6, 0))
        return now

    # Both the backward's thread and the hook's look, which the GIL keeps apart well enough.
    before = _state.time, _schedule.time
    _state.time = _schedule.time = types.SimpleNamespace(perf_counter=clock)  # type: ignore[assignment]
    try:
        yield
    finally:
        _state.time, _schedule.time = before


def train(context: Context, case: Case) -> dict[str, Any]:
    """Results of each step, units of each step, what was kept after it, and whether it was sent as
    it is."""
    with drawn_times([case.seed, context.rank]) if case.clock else contextlib.nullcontext():
        return _train(context, case)


def _train(context: Context, case: Case) -> dict[str, Any]:
    model = Model(case)
    state = state_of(case, model, case.schedule)
    run = Run(case, model, state)
    results, units, kept, plain = [], [], [], []
    dtype = DTYPES[case.dtype]
    for step in range(case.steps):
        if step == case.restart_at:
            before = model
            model = model if case.restart_by == "live" else Model(case)
            run = restarted(case, run, model)
            del before
        if step in case.rewrap_at:
            other = dataclasses.replace(case, bucket_bytes=100 + 77 * (step % 20))
            run = Run(other, model, run.state, run.order)
        mine = used(case, context.rank, step)
        for micro in range(case.accumulate + 1):
            wanted = [torch.from_numpy(g).to(dtype)
                      for g in gradients(case, context.rank, step, micro)]  # fmt: skip
            given = [g if use else g[:0] for g, use in zip(wanted, mine)]
            last = micro == case.accumulate
            with contextlib.nullcontext() if last else run.ddp.no_sync():
                run.ddp(*given).backward()
        results.append([None if p.grad is None else p.grad.double().view(-1).numpy().copy()
                        for p in model.all])  # fmt: skip
        units.append(run.units)
        kept.append(run.kept(case))
        plain.append(run.state._units.plain)
        for p in model.all:
            p.grad = None
    return {"results": results, "units": units, "kept": kept, "plain": plain}
