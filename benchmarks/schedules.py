"""Whether calls of a fused function take a fast schedule: random programs under all of theirs.

    python benchmarks/schedules.py --compile             # first, so that only calls are timed
    python benchmarks/schedules.py --seconds 200         # as many programs as fit; again goes on
    python benchmarks/schedules.py --only 40:60 --again  # some of them, also those that are saved
    python benchmarks/schedules.py --report              # the table of what is saved

Each program is drawn from the printed seed and its number: a sum over the ranks, at times two,
with elementwise operations, residuals, biases, norms and state around it, 16 KB to 16 MB. Its arms
are the legal schedules, and

    plain torch     the same function by torch's operations, its sums by clone and dist.all_reduce;
                    each rank computes all of what a program may leave to the rank that has a slice

Before anything is timed each schedule's results are compared with those. The schedule that a call
takes by default is looked up when the table is made, by the model as it is then: its time is that
of its arm. How times are taken: see `_harness.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import _harness as harness
import fusedpg
from _harness import Context, Row
from fusedpg import fusion
from fusedpg.fusion import FusionError, Partial, Replicate, Schedule, Shard, compile
from fusedpg.fusion.compiled import kernel
from fusedpg.fusion.local import local_kernel

PLAIN = "plain torch"
NEAR, NINE_OF_TEN, OF_PLAIN = 1.1, 0.9, 1.05
SIZES = [16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
FEATURES = [64, 256, 1024, 4096]
UNARY = [
    "lr * {x}",
    "{x} + b",
    "b * {x}",
    "1.5 - {x}",
    "F.relu({x})",
    "{x}.clamp(-0.5, 1.0)",
    "torch.where({x} > 0, {x}, 0.5)",
    "torch.tanh({x})",
    "F.gelu({x})",
    "F.silu({x})",
    "dropout({x}, 0.1, seed)",
]
BINARY = [
    "{x} + {y}",
    "{x} + w",
    "w - lr * {x}",
    "{x} * {y}",
    "{x} / ({y} * {y} + 1)",
    "torch.maximum({x}, {y})",
    "0.9 * m + {x}",
]
ROWS = [
    "F.layer_norm({x}, ({x}.shape[-1],), b, b)",
    "F.rms_norm({x}, ({x}.shape[-1],), b, 1e-3)",
    "{x} / (1 + {x}.norm())",
    "{x} - torch.amax({x}, dim=-1, keepdim=True)",
]
SUMS = ["all_reduce({p}, 'mean')", "all_reduce({p})", "reduce_scatter({p})"]
NUMBERS = {"lr": 0.1, "seed": 5}


@dataclass(frozen=True)
class Drawn:
    """A program's text, and what it is called with."""

    text: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def case(self) -> str:
        """Its name in results, which the seed and its number make again."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:12]
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}, {digest}"

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def drawn(seed: int, number: int) -> Drawn:
    """The program of a number."""
    chosen = random.Random(f"{seed} {number}")
    dtype = chosen.choice([torch.float32, torch.float32, torch.float32, torch.bfloat16])
    features = chosen.choice(FEATURES)
    rows = max(chosen.choice(SIZES) // dtype.itemsize // features, 1)
    lines = ["v0 = " + chosen.choice(SUMS[:2]).format(p="g")]
    values = ["v0"]
    for _ in range(chosen.randint(1, 6)):
        kinds = [UNARY] * 4 + [BINARY] * 4 + [ROWS] + [SUMS] * (len(lines) == 1)
        text = chosen.choice(chosen.choice(kinds))
        # Mostly of what came last, as in a model.
        x = chosen.choice([values[-1], values[-1], *values])
        lines.append(f"v{len(values)} = " + text.format(x=x, y=chosen.choice(values), p="h"))
        values.append(f"v{len(values)}")
    results = [values[-1], *chosen.sample(values[:-1], chosen.choice([0, 0, 0, 1]))]
    layouts = [chosen.choice(["None", "Replicate", "Replicate", "Shard"]) for _ in results]
    head = (
        "def program(g: Partial, h: Partial, w: Replicate, m: Shard, b: Replicate, "
        f"lr: float, seed: int) -> ({', '.join(layouts)},):"
    )
    text = "\n    ".join([head, *lines, f"return {', '.join(results)},"])
    return Drawn(text, (rows, features), dtype)


def function(program: Drawn, **names: Any) -> Any:
    """The function of a text, in a file, since `fuse` reads the lines."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py"
        path.write_text(program.text + "\n")
        spec = importlib.util.spec_from_file_location("program", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        vars(module).update(
            torch=torch, F=F, Partial=Partial, Replicate=Replicate, Shard=Shard, **names
        )
        spec.loader.exec_module(module)
    return module.program


def fused(program: Drawn) -> fusion.FusedFunction:
    names = ("all_reduce", "reduce_scatter", "dropout")
    return fusedpg.fuse(function(program, **{name: getattr(fusion, name) for name in names}))


def plain(program: Drawn) -> Callable[..., Any]:
    def summed(x: Tensor, op: str = "sum") -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total.div_(dist.get_world_size()) if op == "mean" else total

    return function(
        program, all_reduce=summed, reduce_scatter=summed, dropout=lambda x, p, _: F.dropout(x, p)
    )


def arguments(program: Drawn, rank: int, size: int) -> dict[str, Any]:
    """Of a rank; of `m` its slice."""
    generator = torch.Generator().manual_seed(0)

    def random_one(shape: Sequence[int] = program.shape) -> Tensor:
        return torch.randn(*shape, generator=generator).to(program.dtype)

    parts = [(random_one(), random_one()) for _ in range(size)]
    whole = {"w": random_one(), "m": random_one(), "b": random_one(program.shape[1:])}
    return {"g": parts[rank][0], "h": parts[rank][1], **whole, **NUMBERS}


def legal(program: Drawn, size: int) -> list[Schedule]:
    """Its schedules; none where it is no program."""
    given = arguments(program, 0, size)
    given["m"] = part(given["m"], 0, size)
    try:
        found = fused(program).schedules(**given, world_size=size)
    except FusionError:
        return []
    return found if any(node.pointwise for node in found[0].program.nodes) else []


def part(whole: Tensor, rank: int, size: int) -> Tensor:
    begin, length = fusedpg.shard_range(whole.numel(), size, rank)
    return whole.reshape(-1)[begin : begin + length].clone()


def programs(seed: int, count: int, size: int) -> Iterator[tuple[Drawn, list[Schedule]]]:
    number = 0
    while count:
        program = drawn(seed, number)
        found = legal(program, size)
        if len(found) > 1:
            count -= 1
            yield program, found
        number += 1


# ---------------------------------------------------------------------------------------------


def main() -> int:
    parser = harness.Parser(__doc__, backends="fused", rounds=9)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=numbers, default=(0, math.inf), help="FIRST:BEHIND")
    parser.add_argument("--again", action="store_true", help="time also what is saved")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no program later")
    parser.add_argument("--compile", action="store_true", help="only compile what will be timed")
    parser.add_argument("--report", action="store_true", help="only the table of what is saved")
    args = parser.parse_args()
    args.path = args.json or harness.RESULTS / f"schedules_p{args.world_size}.json"
    print(f"seed {args.seed}")
    rows = saved(args) if args.report else harness.run(measure, args, ["programs"])
    if not args.compile:
        table(rows, args)
    return 0


def numbers(text: str) -> tuple[float, float]:
    """`40:60`, `40:` or `:60`."""
    first, _, behind = text.partition(":")
    return float(first or 0), float(behind or math.inf)


def saved(args: argparse.Namespace) -> list[Row]:
    rows: list[Row] = harness.load(args.path)["rows"] if args.path.exists() else []
    return rows


def measure(context: Context, args: argparse.Namespace, _: str) -> list[Row]:
    begun = time.monotonic()
    rows = [] if args.compile else saved(args)
    done = set() if args.again else {row.case for row in rows}
    chosen = itertools.islice(
        enumerate(programs(args.seed, args.programs, context.world_size)),
        *(None if math.isinf(end) else int(end) for end in args.only),
    )
    for number, (program, found) in chosen:
        if program.case in done:
            continue
        if args.compile:
            if number % context.world_size == context.rank:
                compile_all(found)
            continue
        over = torch.tensor([float(time.monotonic() - begun > args.seconds)])
        dist.all_reduce(over, dist.ReduceOp.MAX)
        if over.item():
            break
        rows = [row for row in rows if row.case != program.case]
        rows += timed(context, program, found, args)
        if context.rank == 0 and not args.no_save:
            harness.save_rows(args.path, rows, context.world_size, unit="seconds of a call")
    return rows


def compile_all(found: Sequence[Schedule]) -> None:
    for schedule in found:
        program = schedule.program
        for group, nodes in program.units:
            if group is None or group.kind not in ("collective", "compute"):
                continue
            make = kernel if group.kind == "collective" else local_kernel
            source = make(group, nodes, program).source
            if source is not None:
                compile.function(source.text, program.name)


def timed(
    context: Context, program: Drawn, found: Sequence[Schedule], args: argparse.Namespace
) -> list[Row]:
    given = arguments(program, context.rank, context.world_size)
    sliced = {**given, "m": part(given["m"], context.rank, context.world_size)}
    reference = plain(program)
    expected = reference(**given)
    run = fused(program)
    arms: dict[str, Callable[[], object]] = {PLAIN: lambda: reference(**given)}
    for schedule in found:
        scheduled = run.scheduled(*schedule.transformations)
        got = scheduled(**sliced)
        if "dropout" not in program.text:
            check(context, program, schedule, got, expected)
        arms[schedule.title] = lambda call=scheduled: call(**sliced)  # type: ignore[misc]
    return harness.measure(context, arms, case=program.case, size=program.size, rounds=args.rounds)


def check(
    context: Context,
    program: Drawn,
    schedule: Schedule,
    got: Sequence[Tensor],
    expected: Sequence[Tensor],
) -> None:
    for node, result, whole in zip(schedule.program.outputs, got, expected, strict=True):
        want = part(whole, context.rank, context.world_size) if node.layout.parted else whole
        near = 0.1 if program.dtype.itemsize == 2 else 1e-3
        difference = (result.double() - want.double()).abs()
        # A rounding here and there turns a comparison.
        share = (difference > near * (1 + want.double().abs())).double().mean().item()
        where = f"{program.case}\n{program.text}\n{schedule.title}\n{node.name}"
        harness.require(share <= 1e-3, f"{where}: {share}")


# ---------------------------------------------------------------------------------------------


def table(rows: Sequence[Row], args: argparse.Namespace) -> None:
    """What the default takes, against the fastest schedule and plain torch."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row.case, {})[row.arm] = row
    found, lines, untimed = [], [], []
    for number, (program, _) in enumerate(programs(args.seed, args.programs, args.world_size)):
        arms = cases.get(program.case)
        if arms is None:
            continue
        default = arms.get(chosen(program, args.world_size))
        if default is None:  # a schedule that there was not yet
            untimed.append(number)
            continue
        best = min((row for row in arms.values() if row.arm != PLAIN), key=lambda row: row.median)
        to_best, to_plain = default.median / best.median, default.median / arms[PLAIN].median
        found.append((to_best, to_plain))
        if to_best > NEAR or to_plain > OF_PLAIN:
            times = [f"{1e3 * row.median:.3f}" for row in (default, best)]
            size, last = harness.format_size(program.size), (f"{to_best:.2f}", f"{to_plain:.2f}")
            lines.append([size, default.arm, best.arm, *times, *last])
    if not found:
        print("no program has been timed")
        return
    if untimed:
        numbers = ", ".join(map(str, untimed))
        print(f"not in the table, as their default has not been timed (--only, --again): {numbers}")
    figures = ["ms", "ms of best", "/ best", "/ plain"]
    harness.show("Schedules", ["size", "default", "best"], figures, lines, wrap=True)
    near = sum(to_best <= NEAR for to_best, _ in found) / len(found)
    slower = sum(to_plain > OF_PLAIN for _, to_plain in found)
    print(
        f"{len(found)} programs: the default within {NEAR}x of the best schedule in {near:.1%} "
        f"(bar {NINE_OF_TEN:.0%}); slower than plain torch by more than 5% in {slower} (bar 0); "
        f"median {statistics.median(b for b, _ in found):.2f}x the best, "
        f"{statistics.median(p for _, p in found):.2f}x plain torch"
    )


def chosen(program: Drawn, size: int) -> str:
    """The schedule that a call takes."""
    given = arguments(program, 0, size)
    given["m"] = part(given["m"], 0, size)
    return fused(program).schedule(**given, world_size=size).title


if __name__ == "__main__":
    sys.exit(main())
