"""Subject: fused optimizers with a compressing communication hook.

The oracle is one process: gradients of all ranks in numpy, compressed by the formulas of the
papers, and an optimizer of torch on their mean.

No postponed annotations here: DDP inspects those of its hooks.
"""

import contextlib
import copy
import dataclasses
import io
import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import fusedpg
import harness
from checks import compress as checks
from checks.optim_script import OPTIMIZERS, of_torch
from fusedpg import compress
from fuzz.core import Choices, Entry, Trace
from harness import Context

WHERE = ("2", "3", "4", "two of two", "crossed", "two and one")
EXAMPLES = 2
PAIRS = (
    ("topk", "none"), ("topk", "residual"), ("topk", "dgc"), ("topk", "efsignsgd"),
    ("guarded_threshold", "residual"), ("threshold", "residual"), ("efsignsgd", "residual"),
    ("efsignsgd", "efsignsgd"), ("onebit", "residual"), ("lossless", ""),
)  # fmt: skip
HOSTS = {"two of two": ((0, 1), (2, 3)), "crossed": ((0, 2), (1, 3))}
RESTARTS = ("full", "consolidate", "local", "dcp", "torch", "reattach", "rewrap")
Array = np.ndarray[Any, Any]
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
TOLERANCE = {"fp32": (3e-5, 3e-6), "fp64": (1e-9, 1e-10)}
CLIP = 0.8
OTHERS = (3, 4)  # parameters that an optimizer of torch's has at first


@dataclasses.dataclass(frozen=True)
class Step:
    lr: float
    backwards: tuple[int, ...] = (0,)  # each after so many without synchronisation
    restart: str = ""  # by which kind of checkpoint
    split: int = 0  # from then on: how the optimizers' state is split, a number of SPLITS
    adopt: bool = False  # the optimizer takes over OTHERS
    bad: int = -1  # a rank with an infinity
    zeros: bool = False  # gradients are set to zero, not dropped


@dataclasses.dataclass(frozen=True)
class Case:
    """One training."""

    params: dict[str, Any]
    steps: tuple[Step, ...]
    optimizer: str = "AdamW"
    schedule: str | int = "layer"
    dtype: str = "fp32"
    hosts: tuple[tuple[int, ...], ...] = ()  # that ranks add up in
    split: int = 0
    others: bool = False
    graph: str = ""
    view: bool = False
    bucket_bytes: int = 1000
    scaled: bool = False
    clip: str = ""
    share: bool = False
    seed: int = 0


def draw(choose: Choices, where: str) -> Case:
    compressor, memory = choose.choice(PAIRS)
    schedule: str | int = "layer"
    ratio = choose.choice([0.01, 0.07, 0.5])
    if compressor == "lossless":
        compressor, memory = choose.choice(
            [("topk", "residual"), ("none", "none"), ("topk", "none")]
        )
        schedule, ratio = choose.choice(["bucket", "one", 2, 3, "auto", "auto"]), 1.0
    params = {
        "compressor": compressor, "memory": memory, "compress_ratio": ratio, "threshold": 1.0,
        "communicator": choose.choice(["allgather", "broadcast", "alltoall", "ps"]), "lr": 0.25,
        "momentum": 0.8,
    }  # fmt: skip
    scaled = choose.random() < 0.4
    graph = choose.choice(["", "", "find_unused", "static"])

    def step(number: int) -> Step:
        lr = choose.choice([0.01, 0.02, 0.005])
        backwards = choose.choice([(0,), (0,), (1,), (2,), (0, 1), (1, 0)])
        restart = choose.choice(RESTARTS) if number and choose.random() < 0.3 else ""
        if graph == "static" and (restart or number == 0):
            backwards = (0,)  # DDP wants to see the first one
        return Step(
            lr=lr,
            backwards=backwards,
            restart=restart,
            split=choose.randrange(4),
            adopt=number > 1 and choose.random() < 0.3,
            bad=choose.randrange(2) if scaled and choose.random() < 0.3 else -1,
            zeros=choose.random() < 0.3,
        )

    return Case(
        params,
        tuple(step(number) for number in range(40 if schedule == "auto" else 8)),
        optimizer=choose.choice(["SGD", "Adam", "AdamW", "LAMB"]),
        schedule=schedule,
        dtype=choose.choice(["fp32", "fp64"]),
        hosts=HOSTS.get(where, ()),
        split=choose.randrange(4),
        others=choose.random() < 0.4,
        graph=graph,
        view=choose.random() < 0.5,
        bucket_bytes=choose.choice([60, 1000, 10**6]),
        scaled=scaled,
        clip=choose.choice(["", "option", "torch", "own"]),
        share=where not in harness.HOSTS and choose.random() < 0.2,
        seed=choose.getrandbits(24),
    )


def bound(case: Case) -> tuple[float, float]:
    return TOLERANCE[case.dtype]


def module_of(case: Case) -> Any:
    torch.manual_seed(case.seed)
    module = checks.Given(dtype=DTYPES[case.dtype])
    for p in module.parts:
        torch.nn.init.normal_(p)
    return module


def partition(size: int, split: int) -> list[list[int]]:
    """All ranks, pairs, pairs across, and each by itself."""
    if split == 0 or (split < 3 and size % 2):
        return [list(range(size))]
    if split == 3:
        return [[rank] for rank in range(size)]
    half = size // 2
    if split == 1:
        return [list(range(half)), list(range(half, size))]
    return [list(range(0, size, 2)), list(range(1, size, 2))] if size > 2 else [[0, 1]]


def gradient(case: Case, rank: int, number: int, backward: int) -> list[Array | None]:
    """What a rank's backward gives; None of what it leaves out."""
    drawn = np.random.default_rng([case.seed, rank, number, backward])
    found: list[Array | None] = []
    for n, numel in enumerate(checks.NUMELS):
        values = drawn.standard_normal(numel).astype(np.float32).astype(np.float64)
        if case.steps[number].bad == rank and n == 2 and backward == 0:
            values[numel // 3] = np.inf
        out = case.graph == "find_unused" and n and drawn.random() < 0.3
        found.append(None if out else values)
    return found


# --- the oracle -----------------------------------------------------------------------------------


class Wanted:
    """Training in one process."""

    def __init__(self, size: int, case: Case) -> None:
        self.case, self.size = case, size
        self.parts = [p.detach().double() for p in module_of(case).parts]
        self.compression = checks.Oracle(size, case.params, case.hosts)
        self.theirs = set(OTHERS) if case.others else set()
        mine = [p for n, p in enumerate(self.parts) if n not in self.theirs]
        self.optimizer: Any = of_torch(case.optimizer, [{"params": mine[:2]}, {"params": mine[2:]}])
        self.others = torch.optim.SGD([self.parts[n] for n in OTHERS], lr=0.1, momentum=0.9)
        self.local: list[list[Array | None]] = [[None] * len(checks.NUMELS) for _ in range(size)]
        self.scale, self.good = (8.0 if case.scaled else 1.0), 0

    def adopt(self) -> None:
        self.theirs.clear()
        self.optimizer.add_param_group({"params": [self.parts[n] for n in OTHERS]})

    def restart(self, way: str, split: int) -> None:
        """Nothing that it would see."""

    def backward(self, given: list[list[Array | None]], synchronised: bool) -> None:
        for mine, new in zip(self.local, given):
            for n, g in enumerate(new):
                if g is not None:
                    before = mine[n]
                    mine[n] = g * self.scale if before is None else before + g * self.scale
        if not synchronised:
            return
        for n, p in enumerate(self.parts):
            earlier = None if p.grad is None else p.grad.numpy().reshape(-1).copy()
            mine_of = [local[n] for local in self.local]
            used = any(g is not None for g in mine_of)
            inputs = [np.zeros(checks.NUMELS[n]) if g is None else g for g in mine_of]
            if n in self.theirs and earlier is not None:
                # DDP gives the hook all that is there.
                inputs, used = [earlier + g for g in inputs], True
            with np.errstate(invalid="ignore"):
                found = self.compression.exchange(n, inputs)
            if not used:
                continue
            if earlier is not None and n not in self.theirs:
                found = earlier + found
            p.grad = torch.from_numpy(found).view(p.shape)
        self.local = [[None] * len(checks.NUMELS) for _ in range(self.size)]

    def step(self, step: Step) -> float | None:
        """Returns the norm that was clipped."""
        mine = [p for n, p in enumerate(self.parts) if n not in self.theirs and p.grad is not None]
        finite = all(bool(p.grad.isfinite().all()) for p in mine if p.grad is not None)
        for p in self.parts:
            if p.grad is not None:
                p.grad /= self.scale
        norm = None
        if self.case.clip and finite:
            norm = float(torch.nn.utils.clip_grad_norm_(mine, CLIP, foreach=False))
        for number, group in enumerate(self.optimizer.param_groups):
            group["lr"] = step.lr / (1 + number)
        if finite:
            self.optimizer.step()
        if self.theirs:
            self.others.step()
        if self.case.scaled:
            self.good = self.good + 1 if finite else 0
            if not finite:
                self.scale /= 2
            elif self.good == 2:
                self.scale, self.good = self.scale * 2, 0
        for p in self.parts:
            if step.zeros and p.grad is not None:
                p.grad.zero_()
            else:
                p.grad = None
        return norm


# --- the library ----------------------------------------------------------------------------------


class Ours:
    def __init__(self, context: Context, case: Case) -> None:
        self.context, self.case = context, case
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=8.0, growth_interval=2, enabled=case.scaled
        )
        self.theirs = case.others
        self._groups: dict[tuple[int, ...], Any] = {}
        self.split = case.split
        self.wrap(module_of(case), self.new_state())
        self.optimizer = self.make()
        self.others: Any = torch.optim.SGD(self.parts[3:5], lr=0.1, momentum=0.9)

    def new_state(self) -> compress.State:
        return compress.from_params(
            checks.fitting(self.case.params), schedule=self.case.schedule, seed=self.case.seed
        )

    def wrap(self, module: Any, state: compress.State) -> None:
        case = self.case
        self.ddp = DistributedDataParallel(
            module,
            bucket_cap_mb=case.bucket_bytes / 2**20,
            find_unused_parameters=case.graph == "find_unused",
            static_graph=case.graph == "static",
            gradient_as_bucket_view=case.view,
        )
        self.state = state
        self.parts = list(module.parts)

    def group(self) -> Any:
        ranks = next(
            part for part in partition(self.context.world_size, self.split)
            if self.context.rank in part
        )  # fmt: skip
        if len(ranks) == self.context.world_size:
            return None
        key = tuple(ranks)
        if key not in self._groups:
            self._groups[key] = dist.new_group(ranks, use_local_synchronization=True)
        return self._groups[key]

    def options(self) -> dict[str, Any]:
        own = {"max_grad_norm": CLIP} if self.case.clip == "option" else {}
        return {
            "ddp": self.ddp,
            "comm_hook": (self.state, compress.hook),
            "process_group": self.group(),
            "share_parameters": self.case.share,
            **own,
        }

    def param_groups(self) -> list[dict[str, Any]]:
        mine = [p for n, p in enumerate(self.parts) if not (self.case.others and n in OTHERS)]
        late = [{"params": self.parts[3:5]}] if self.case.others and not self.theirs else []
        return [{"params": mine[:2]}, {"params": mine[2:]}, *late]

    def make(self) -> Any:
        made = getattr(fusedpg.optim, self.case.optimizer)
        return made(self.param_groups(), **OPTIMIZERS[self.case.optimizer], **self.options())

    def adopt(self) -> None:
        self.theirs = False
        self.optimizer.add_param_group({"params": self.parts[3:5]})

    def restart(self, way: str, split: int) -> None:
        if way in ("reattach", "rewrap"):
            self.optimizer.detach()
            if way == "rewrap":
                self.wrap(self.ddp.module, self.state)
            self.optimizer.attach(self.ddp)
            return
        self.split = split
        before = self.optimizer
        if way == "dcp" and any(p not in before.state for p in self.parts):
            way = "full"  # as with torch's optimizers, it wants state of every parameter
        kept = self.state.state_dict()
        weights = copy.deepcopy(self.ddp.module.state_dict())
        path = os.path.join(self.context.scratch, f"dcp{self.case.seed}")
        if way == "dcp":
            whole = get_optimizer_state_dict(self.ddp, before)
            dcp.save({"optimizer": whole}, checkpoint_id=path)
        else:
            whole = self.whole(before, way)
        module = checks.Given(dtype=DTYPES[self.case.dtype])
        module.load_state_dict(weights)
        state = self.new_state()
        state.load_state_dict(kept)
        others = self.others.state_dict()
        del before
        self.wrap(module, state)
        if way == "torch" and self.case.optimizer != "LAMB":
            old = of_torch(self.case.optimizer, self.param_groups())
            old.load_state_dict(whole)
            self.optimizer = fusedpg.optim.from_torch(old, **self.options())
        else:
            self.optimizer = self.make()
            if way == "dcp":
                whole = get_optimizer_state_dict(self.ddp, self.optimizer)
                dcp.load({"optimizer": whole}, checkpoint_id=path)
                set_optimizer_state_dict(self.ddp, self.optimizer, whole)
            else:
                self.optimizer.load_state_dict(whole)
        self.others = torch.optim.SGD(self.parts[3:5], lr=0.1, momentum=0.9)
        self.others.load_state_dict(others)

    def whole(self, before: Any, way: str) -> Any:
        if way == "local":
            group = before._group
            everyone: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(everyone, before.local_state_dict(), group=group)
            found = fusedpg.optim.merge_state_dicts(everyone)
        elif way == "full":
            found = before.full_state_dict(rank0_only=False)
        else:
            before.consolidate_state_dict(to=None)
            found = before.state_dict()
        file = io.BytesIO()
        torch.save(found, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def backward(self, everyone: list[list[Array | None]], synchronised: bool) -> None:
        given, dtype = everyone[self.context.rank], DTYPES[self.case.dtype]
        grads = [
            None if g is None else torch.from_numpy(g).to(dtype).view(shape)
            for g, shape in zip(given, checks.SHAPES)
        ]
        with contextlib.nullcontext() if synchronised else self.ddp.no_sync():
            self.scaler.scale(self.ddp(grads)).backward()

    def step(self, step: Step) -> float | None:
        norm = None
        if self.case.clip in ("torch", "own"):
            self.scaler.unscale_(self.optimizer)
            mine = [p for group in self.optimizer.param_groups for p in group["params"]]
            if self.case.clip == "torch":
                norm = float(torch.nn.utils.clip_grad_norm_(mine, CLIP))
            else:
                norm = float(self.optimizer.clip_grad_norm_(CLIP))
        for number, group in enumerate(self.optimizer.param_groups):
            group["lr"] = step.lr / (1 + number)
        self.scaler.step(self.optimizer)
        if self.theirs:
            self.scaler.step(self.others)
        self.scaler.update()
        for p in self.parts:
            p.grad = None if not step.zeros else p.grad
        if step.zeros:
            self.ddp.zero_grad(set_to_none=False)
        return norm


def run(case: Case, context: Context) -> Trace:
    return _train(case, context.world_size, Ours(context, case))


def oracle(case: Case, world: int, rank: int) -> Trace:
    return _train(case, world, Wanted(world, case))


def _train(case: Case, world: int, trained: Any) -> Trace:
    for number, step in enumerate(case.steps):
        if step.restart:
            for p in trained.parts:
                p.grad = None
            trained.restart(step.restart, step.split)
        if step.adopt and trained.theirs:
            trained.adopt()
        count = 0
        for silent in step.backwards:
            for n in range(silent + 1):
                everyone = [gradient(case, r, number, count) for r in range(world)]
                count += 1
                trained.backward(everyone, n == silent)
        norm = trained.step(step)
        if case.clip in ("torch", "own") and step.bad < 0:
            yield Entry(f"step {number}, norm", norm, bound=(1e-5, 0.0))
        for n, part in enumerate(trained.parts):
            yield Entry(
                f"step {number}, parameter {n}", part.detach().double(), alike=part.detach()
            )
