"""Random programs of collectives, messages and steps.

A program is a few groups and, for each lane (a thread on every rank), the steps that its groups'
members take in this order. Nothing here calls torch.distributed: `collectives` runs a program and
`oracle` says what must come out.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch

from checks.cases import COMPLEX, FLOATS, GLOO, HALF, MOVABLE, REDUCIBLE, supported
from fuzz.core import Choices, Fault, between_hosts, draw_fault, has_faults, world_of

REDOPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM", "BAND", "BOR", "BXOR")
SKIPPING = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)


@dataclasses.dataclass(frozen=True)
class GroupSpec:
    """One group: its global ranks, ascending, and its options."""

    ranks: tuple[int, ...]
    block_skip: str = "off"
    threads: int = 1
    block_size: int = 256

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclasses.dataclass(frozen=True)
class Step:
    """One call of all members of a group."""

    number: int  # unique in the program
    group: int
    kind: str
    mode: str  # sync, async or future (with a callback that starts another collective)
    delay: int  # steps of the lane until the wait
    seed: int  # of the tensors' contents and layouts
    args: dict[str, Any]

    def __str__(self) -> str:
        args = ", ".join(f"{name}={value}" for name, value in self.args.items())
        wait = f" wait after {self.delay}" if self.mode != "sync" else ""
        return f"#{self.number} group {self.group} {self.mode}{wait} {self.kind}({args})"


@dataclasses.dataclass(frozen=True)
class Program:
    """What all ranks do."""

    hosts: bool  # the ranks pretend to be on several machines
    groups: tuple[GroupSpec, ...]
    lanes: tuple[tuple[Step, ...], ...]
    fault: Fault | None = None  # before a step of the first lane


class Draw:
    """Draws the arguments of one step."""

    def __init__(self, rng: Choices, group: GroupSpec, hosts: bool) -> None:
        self.rng, self.group, self.hosts = rng, group, hosts

    def numel(self) -> int:
        low, high = self.rng.choice(
            [(2, 40), (2, 40), (1, 4), (0, 1), (41, 3000), (41, 3000), (3000, 50_000), (0, 0)]
            + [(131_000, 132_000)]
            + [(200_000, 700_000)] * (self.rng.random() < 0.3)
        )
        return self.rng.randint(low, high)

    def shape(self, numel: int | None = None) -> tuple[int, ...]:
        n = self.numel() if numel is None else numel
        kind = self.rng.choice(["flat", "flat", "flat", "scalar", "matrix", "matrix", "image"])
        if kind == "scalar" and n < 5:
            return ()
        if kind == "matrix" and n >= 3:
            return (3, n // 3)
        if kind == "image" and n >= 12:
            return (2, 3, 2, n // 12)
        return (n,)

    def rows(self) -> tuple[int, ...]:
        """A shape with a first dimension."""
        return self.shape() or (1,)

    def root(self) -> int:
        return self.rng.randrange(self.group.size)

    def dtype(self, among: tuple[torch.dtype, ...]) -> torch.dtype:
        some = [t for t in among if not self.hosts or t in GLOO]
        if torch.float32 in some and self.rng.random() < 0.3:
            return torch.float32
        return self.rng.choice(some)

    def reduction(self) -> dict[str, Any]:
        redop = self.rng.choice(("SUM", "SUM", "SUM", *REDOPS))
        able = [
            t for t in REDUCIBLE if supported(redop, t) and not (self.hosts and t == torch.bool)
        ]
        dtype = self.dtype(tuple(able))
        return {"redop": redop, "dtype": dtype, "data": self.data(dtype)}

    def data(self, dtype: torch.dtype) -> str:
        """How contents are drawn; between hosts, sums must be exact to be comparable."""
        kinds = ["exact", "zeros"]
        if not self.hosts and (dtype in FLOATS or dtype in COMPLEX):
            # Infinite complex numbers have no one product, not even with 1.
            kinds += ["normal", "normal", "special" if dtype in FLOATS else "normal"]
        return self.rng.choice(kinds)

    def splits(self) -> list[list[int]]:
        """Rows that each member sends to each."""
        size = self.group.size
        most = self.rng.choice([0, 1, 3, 200])
        return [[self.rng.randint(0, most) for _ in range(size)] for _ in range(size)]


Drawing = Callable[[Draw], dict[str, Any]]
KINDS: dict[str, tuple[int, Drawing]] = {}


def kind(weight: int = 2) -> Callable[[Drawing], Drawing]:
    """Registers a kind of step under the function's name."""

    def register(draw: Drawing) -> Drawing:
        KINDS[draw.__name__] = (weight, draw)
        return draw

    return register


@kind(8)
def all_reduce(draw: Draw) -> dict[str, Any]:
    return {"shape": draw.shape(), **draw.reduction()}


@kind(3)
def all_reduce_coalesced(draw: Draw) -> dict[str, Any]:
    shapes = [draw.shape() for _ in range(draw.rng.randint(1, 5))]
    form = draw.rng.choice(["function", "manager"])
    return {"shapes": shapes, "form": form, **draw.reduction()}


@kind(2)
def reduce(draw: Draw) -> dict[str, Any]:
    return {"shape": draw.shape(), "root": draw.root(), **draw.reduction()}


@kind(2)
def reduce_scatter(draw: Draw) -> dict[str, Any]:
    shapes = [draw.shape() for _ in range(draw.group.size)]
    if draw.rng.random() < 0.5 or draw.hosts:
        shapes = [shapes[0]] * draw.group.size
    return {"shapes": shapes, **draw.reduction()}


@kind(3)
def reduce_scatter_tensor(draw: Draw) -> dict[str, Any]:
    count = draw.rng.choice([1, 1, 3])
    shapes = [draw.rows() for _ in range(count)]
    inplace = count == 1 and draw.rng.random() < 0.2
    return {"shapes": shapes, "inplace": inplace, **draw.reduction()}


@kind(3)
def sparse_all_reduce(draw: Draw) -> dict[str, Any]:
    dtype = draw.dtype(SKIPPING)
    threshold = draw.rng.choice([0.0, 0.0, 3.0]) if dtype in FLOATS else 0.0
    return {
        "shape": draw.shape(),
        "dtype": dtype,
        "redop": draw.rng.choice(["SUM", "AVG"]),
        "data": "exact zeros" if draw.hosts or threshold else draw.rng.choice(["zeros", "normal"]),
        "block": draw.rng.choice([32, 100, 256, 65536]),
        "threshold": threshold,
    }


@kind(3)
def functional(draw: Draw) -> dict[str, Any]:
    what = draw.rng.choice(
        [
            "all_reduce",
            "all_gather",
            "reduce_scatter",
            "all_to_all",
            "broadcast",
            "all_reduce_coalesced",
            "all_gather_coalesced",
            "reduce_scatter_coalesced",
        ]
    )
    args = {
        "what": what,
        "shapes": [draw.rows() for _ in range(3 if what.endswith("coalesced") else 1)],
        "root": draw.root(),
        "splits": draw.splits(),
        **draw.reduction(),
    }
    return args


def _move(draw: Draw) -> dict[str, Any]:
    return {"dtype": draw.dtype(MOVABLE), "data": "exact" if draw.hosts else "normal"}


@kind(4)
def broadcast(draw: Draw) -> dict[str, Any]:
    return {"shape": draw.shape(), "root": draw.root(), **_move(draw)}


@kind(3)
def all_gather(draw: Draw) -> dict[str, Any]:
    shapes = [draw.shape() for _ in range(draw.group.size)]
    if draw.rng.random() < 0.7 or draw.hosts:
        shapes = [shapes[0]] * draw.group.size
    return {"shapes": shapes, **_move(draw)}


@kind(3)
def all_gather_into_tensor(draw: Draw) -> dict[str, Any]:
    count = draw.rng.choice([1, 1, 3])
    inplace = count == 1 and draw.rng.random() < 0.2
    return {"shapes": [draw.rows() for _ in range(count)], "inplace": inplace, **_move(draw)}


@kind(2)
def gather(draw: Draw) -> dict[str, Any]:
    return {"shape": draw.shape(), "root": draw.root(), **_move(draw)}


@kind(2)
def scatter(draw: Draw) -> dict[str, Any]:
    return {"shape": draw.shape(), "root": draw.root(), **_move(draw)}


@kind(2)
def all_to_all(draw: Draw) -> dict[str, Any]:
    return {"splits": draw.splits(), **_move(draw)}


@kind(4)
def all_to_all_single(draw: Draw) -> dict[str, Any]:
    form = draw.rng.choice(["even", "even", "uneven", "uneven"])
    row = draw.rng.choice([(), (3,), (2, 5), (100,)])
    args = {"form": form, "rows": draw.rng.choice([0, 1, 2, 50]), "row": row}
    return {**args, "splits": draw.splits(), **_move(draw)}


@kind(1)
def barrier(draw: Draw) -> dict[str, Any]:
    return {}


@kind(2)
def objects(draw: Draw) -> dict[str, Any]:
    return {
        "what": draw.rng.choice(["all_gather", "broadcast", "gather", "scatter"]),
        "root": draw.root(),
        "lengths": [draw.rng.choice([0, 1, 100, 5000]) for _ in draw.group.ranks],
    }


@kind(5)
def messages(draw: Draw) -> dict[str, Any]:
    rng, size = draw.rng, draw.group.size
    count = rng.randint(1, 6) if size > 1 else 0
    pairs = [tuple(rng.sample(range(size), 2)) for _ in range(count)]
    shapes = [draw.shape() for _ in range(count)]
    if draw.hosts:
        # Gloo's messages from any source cannot be empty.
        shapes = [tuple(max(1, n) for n in shape) for shape in shapes]
    return {
        "form": rng.choice(["blocking", "immediate", "batch", "any source"]),
        "pairs": pairs,
        "shapes": shapes,
        **_move(draw),
    }


@kind(4)
def fused_step(draw: Draw) -> dict[str, Any]:
    rng = draw.rng
    rule = rng.choice(["sgd", "adam", "adamw", "adamw", "lamb"])
    wide = rng.random() < 0.2
    return {
        "rule": rule,
        "dtype": torch.float64 if wide else rng.choice([torch.float32, torch.float32, *HALF]),
        "shapes": [draw.shape() for _ in range(rng.randint(1, 5))],
        "steps": rng.randint(1, 3),
        "lr": rng.choice([1e-3, 0.1]),
        "weight_decay": rng.choice([0.0, 0.01]),
        "momentum": rng.choice([0.0, 0.9]),
        "nesterov": rng.random() < 0.5,
        "amsgrad": rng.random() < 0.3,
        "maximize": rng.random() < 0.3,
        "reduce": rng.choice(["mean", "sum"]),
        "scale": rng.choice([None, None, 8.0]),
        "found_inf": rng.choice([None, None, None, draw.root()]),
        "weights": rng.random() < 0.2,
        "masters": rng.random() < 0.5,
        "block_skip": rng.random() < 0.3 and rule != "lamb",
        "tensor_lr": rng.random() < 0.2,
    }


@kind(3)
def disagreement(draw: Draw) -> dict[str, Any]:
    """Members call different things, and all of them must hear of it."""
    return {
        "what": draw.rng.choice(["op", "dtype", "numel", "root", "redop", "split", "lr"]),
        "odd": draw.root(),
        "numel": draw.rng.choice([3, 1000, 40_000, 300_000]),
    }


def _mistake(draw: Draw) -> dict[str, Any]:
    from fuzz.mistakes import REFUSALS  # which needs what is here

    return {"what": draw.rng.choice(list(REFUSALS)), "numel": draw.rng.choice([3, 1000, 40_000])}


@kind(2)
def refusal(draw: Draw) -> dict[str, Any]:
    """An argument that is wrong on all members."""
    return {"odd": None, **_mistake(draw)}


@kind(4)
def refusal_of_one(draw: Draw) -> dict[str, Any]:
    """An argument that is wrong on one member alone."""
    return {"odd": draw.root(), **_mistake(draw)}


ALWAYS_SYNC = {"objects", "disagreement", "refusal", "refusal_of_one", "messages", "functional"}
LEFT_OUT = set(os.environ.get("FUZZ_WITHOUT", "").split(","))


def _draw_group(rng: Choices, world: int) -> GroupSpec:
    size = world if rng.random() < 0.5 else rng.randint(1, world)
    return GroupSpec(
        tuple(sorted(rng.sample(range(world), size))),
        block_skip=rng.choice(["off", "off", "auto", "on"]),
        threads=rng.choice([1, 1, 2, 3]),
        block_size=rng.choice([256, 256, 32]),
    )


def _draw_step(rng: Choices, number: int, index: int, group: GroupSpec, hosts: bool) -> Step:
    name = rng.weighted({name: KINDS[name][0] for name in KINDS if name not in LEFT_OUT})
    mode = "sync" if name in ALWAYS_SYNC else rng.choice(["sync", "sync", "async", "future"])
    if name == "fused_step":
        mode = rng.choice(["sync", "async"])
    args = KINDS[name][1](Draw(rng, group, hosts))
    return Step(number, index, name, mode, rng.choice([0, 1, 2, 5]), rng.getrandbits(40), args)


def draw(choose: Choices, where: str, most: int = 40) -> Program:
    """A program of at most so many steps."""
    world, hosts = world_of(where), between_hosts(where)
    lanes: list[tuple[Step, ...]] = []
    groups: list[GroupSpec] = []
    number = 0
    count = choose.choice([1, 1, 2, 3])
    steps = choose.choice([most, most, most, most // 4])
    for _ in range(count):
        own = range(len(groups), len(groups) + choose.choice([1, 1, 2]))
        # Between hosts, options change nothing that is worth the time.
        groups += [_draw_group(choose, world) for _ in own]
        lane = []
        for _ in range(max(steps // count, 1)):
            index = choose.choice(own)
            lane.append(_draw_step(choose, number, index, groups[index], hosts))
            number += 1
        lanes.append(tuple(lane))
    fault = None
    if has_faults(where):
        fault = draw_fault(choose, world, len(lanes[0]), together=True)
    return Program(hosts, tuple(groups), tuple(lanes), fault)
