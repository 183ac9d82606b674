"""Subject: training with prescribed gradients, compressed, in all ways.

What holds for every compressor with error feedback, whatever it chooses and however it rounds: what
goes in comes out or is kept. No part of the library says what that is.

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
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fusedpg.compress as compress
import harness
from checks import compress_own
from checks.compress import Given
from fusedpg.compress import _schedule, _state
from fuzz import core
from fuzz.core import Choices, Entry, Trace
from harness import Context

COMPRESSORS = (
    "none", "fp16", "topk", "randomk", "threshold", "guarded_threshold", "qsgd", "terngrad",
    "efsignsgd", "onebit", "natural", "powersgd", "loud", "factors",
)  # fmt: skip
OF_THE_USER = {"loud": compress_own.Loud(1.0), "factors": compress_own.Factors()}
PLACES = ("2", "3", "gloo", "two of two", "crossed", "two and one")
# On which ranks, and which compressor; "search": any one, by times that are drawn.
WHERE = tuple(f"{one}, {name}" for one in PLACES for name in (*COMPRESSORS, "search"))
EXAMPLES = 2
ADDING = ("allreduce", "quantized")  # payloads on their way
TOLERANCE = {"fp32": 2e-5, "fp64": 1e-10, "bf16": 2e-2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclasses.dataclass(frozen=True)
class Case:
    """One training."""

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
    scale: float = 1.0  # what a residual is to be multiplied by
    per_host: int = 1  # ranks that add up first, and have one residual


def carriers(compressor: str) -> list[str]:
    """By which ways its payloads may go."""
    if compressor == "powersgd":
        return [*ADDING]
    adding = ADDING if compressor in ("none", "fp16", "randomk") else ()
    return ["allgather", "broadcast", "alltoall", "ps", *adding]


def per_host(place: str, carrier: str) -> int:
    """Ranks of a host add up first, where all hosts have as many."""
    return 2 if place in ("two of two", "crossed") and carrier not in ADDING else 1


def workers(where: str) -> harness.Workers:
    return core.workers(where.rpartition(", ")[0])


def draw(choose: Choices, where: str) -> Case:
    place, _, compressor = where.rpartition(", ")
    if compressor != "search":
        return _draw(choose, place, compressor)
    case = _draw(choose, place, choose.choice(COMPRESSORS))
    steps = choose.choice([60, 90])
    return dataclasses.replace(
        case, schedule="auto", schedule_after="auto", steps=steps, clock=True, accumulate=0,
        rewrap_at=tuple(sorted(choose.sample(range(1, steps), choose.choice([0, 1, 3, 8])))),
        restart_at=choose.choice([-1, choose.randint(1, steps - 1)]),
    )  # fmt: skip


def _draw(choose: Choices, place: str, compressor: str) -> Case:
    carrier = choose.choice(carriers(compressor))
    memory, scale = choose.choice([("residual", 1.0), ("residual", 1.0), ("efsignsgd", 10.0)])
    if compressor == "powersgd":
        memory, scale = "powersgd", 1.0

    def schedule() -> Any:
        return choose.choice(["bucket", "layer", "one", 1, 2, 3, 7, "auto"])

    params = {
        "compressor": OF_THE_USER.get(compressor, compressor),
        "memory": memory,
        "communicator": carrier,
        "threshold": choose.choice([0.5, 1e9, 0.0]),
        "compress_ratio": choose.choice([0.01, 0.3, 1.0]),
        "quantum_num": choose.choice([1, 4, 127, 1000]),
        "bucket_size": choose.choice([0, 5, 128]),
        "compress_rank": choose.choice([1, 2, 9]),
        "clip_sigma": choose.choice([0.0, 2.5]),
    }
    if memory == "efsignsgd":
        params["lr"] = 0.1
    first = schedule()
    steps = choose.choice([6, 45]) if first == "auto" else choose.choice([4, 6])
    sizes = [1, 2, 3, 7, 8, 16, 40, 64, 129, 200, 1000]
    return Case(
        params,
        first,
        numels=tuple(choose.choice(sizes) for _ in range(choose.choice([5, 1, 2, 9]))),
        steps=steps,
        dtype=choose.choice(["fp32", "fp32", "fp32", "bf16", "fp64"]),
        bucket_bytes=choose.choice([60, 300, 2000, 10**6]),
        accumulate=choose.choice([0, 0, 1, 2]),
        restart_at=choose.choice([-1, 1, 2, 3]),
        restart_by=choose.choice(["dict", "pickle", "live"]),
        schedule_after=choose.choice([None, schedule()]),
        unused=choose.choice([0.0, 0.0, 0.1, 0.3, 0.6]),
        rewrap_at=tuple(choose.sample(range(1, steps), choose.choice([0, 1]))),
        named=choose.choice([False, True]),
        seed=choose.getrandbits(24),
        scale=scale,
        per_host=per_host(place, carrier),
    )


def tolerance(case: Case) -> float:
    # Sums of float16 payloads are float16.
    halves = case.params["compressor"] == "fp16" and case.params["communicator"] in ADDING
    return max(TOLERANCE[case.dtype], 1e-3 * halves)


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


def model_of(case: Case) -> Given:
    return Given([shape(numel) for numel in case.numels], DTYPES[case.dtype])


class Run:
    """A DDP module, its state and the order in which the hook has seen its parameters."""

    def __init__(self, case: Case, model: Given, state: Any, order: Sequence[int] = ()) -> None:
        self.state = state
        self.order = list(order)
        places = {id(p): n for n, p in enumerate(model.parts)}
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


def state_of(case: Case, model: Given, schedule: str | int) -> compress.State:
    names = model.named_parameters() if case.named else None
    return compress.from_params(
        case.params, schedule=schedule, seed=case.seed, named_parameters=names
    )


def restarted(case: Case, run: Run, model: Given) -> Run:
    state = run.state
    if case.restart_by == "pickle":
        return Run(case, model, pickle.loads(pickle.dumps(state)))
    if case.restart_by == "live":
        saved = pickle.loads(pickle.dumps(state.state_dict()))
        for name in state._residuals.names():
            for p in model.parts:
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


def run(case: Case, context: Context) -> Trace:
    """After each step: what has got lost, and whether ranks go the same way."""
    with drawn_times([case.seed, context.rank]) if case.clock else contextlib.nullcontext():
        balance = Balance(case, context)
        for step, (run, results) in enumerate(_train(case, context)):
            lost = balance.after(step, results, run.kept(case))
            yield Entry(f"step {step}, lost", lost, alike=(run.state._units.plain, run.units))
            kept = [t for name, each in run.kept(case).items() if name.startswith("residual")
                    for t in each if t is not None]  # fmt: skip
            left = case.clock and run.state._units.plain and any(t.any() for t in kept)
            yield Entry(f"step {step}, kept without compression", bool(left))


def oracle(case: Case, world: int, rank: int) -> Trace:
    for step in range(case.steps):
        yield Entry(f"step {step}, lost", [])
        yield Entry(f"step {step}, kept without compression", False)


class Balance:
    """Gradients = world size * results + what the ranks keep, of each parameter that has been used
    by some rank in every step."""

    def __init__(self, case: Case, context: Context) -> None:
        self.case, self.context, self.size = case, context, context.world_size
        self.always = [True] * len(case.numels)
        self.inside = [np.zeros(n) for n in case.numels]
        self.largest = 64.0 * self.size

    def went_in(self, rank: int, step: int) -> list[Any]:
        uses = used(self.case, rank, step)
        micros = [gradients(self.case, rank, step, m) for m in range(self.case.accumulate + 1)]
        return [sum(given) * use for use, given in zip(uses, zip(*micros))]

    def after(self, step: int, results: list[Any], kept: dict[str, list[Any]]) -> list[str]:
        """What is wrong, of each parameter."""
        answers: list[Any] = [None] * self.size
        dist.all_gather_object(answers, (results, kept), group=self.context.oracle)
        given = [self.went_in(rank, step) for rank in range(self.size)]
        wrong = []
        for n, uses in enumerate(zip(*(used(self.case, rank, step) for rank in range(self.size)))):
            self.always[n] &= any(uses)
            if not self.always[n]:
                continue
            every = [found[n] for found, _ in answers]
            if not all(np.array_equal(one, every[0]) for one in every):
                wrong.append(f"parameter {n}: ranks have different results")
            self.largest = max(self.largest, self.size * np.abs(every[0]).max())
            self.inside[n] += sum(g[n] for g in given) - self.size * every[0]
            total = np.zeros(self.case.numels[n])
            for _, of_rank in answers:
                for name, tensors in of_rank.items():
                    if name.startswith("residual") and tensors[n] is not None:
                        each = self.size if name.endswith("@server") else self.case.per_host
                        total += each * self.case.scale * tensors[n]
            lost = np.abs(self.inside[n] - total).max()
            if not lost <= tolerance(self.case) * (step + 1) * self.largest:
                wrong.append(f"parameter {n}: {lost} is lost")
        return wrong


def _train(case: Case, context: Context) -> Iterator[tuple[Run, list[Any]]]:
    model = model_of(case)
    state = state_of(case, model, case.schedule)
    run = Run(case, model, state)
    dtype = DTYPES[case.dtype]
    for step in range(case.steps):
        if step == case.restart_at:
            before = model
            model = model if case.restart_by == "live" else model_of(case)
            run = restarted(case, run, model)
            del before
        if step in case.rewrap_at:
            other = dataclasses.replace(case, bucket_bytes=100 + 77 * (step % 20))
            run = Run(other, model, run.state, run.order)
        mine = used(case, context.rank, step)
        for micro in range(case.accumulate + 1):
            wanted = gradients(case, context.rank, step, micro)
            given = [torch.from_numpy(g).to(dtype).view_as(p) if use else None
                     for g, p, use in zip(wanted, model.parts, mine)]  # fmt: skip
            last = micro == case.accumulate
            with contextlib.nullcontext() if last else run.ddp.no_sync():
                run.ddp(given).backward()
        yield run, [None if p.grad is None else p.grad.double().view(-1).numpy().copy()
                    for p in model.parts]  # fmt: skip
        for p in model.parts:
            p.grad = None
