"""Plans predicted and measured: a GPT of 25M on 4 ranks of one host, or of two.

It measures the model and the machine, searches, executes the plans that were found, uniform ones
and random ones, and DDP and FSDP2 by hand, and compares each plan's time and memory with what the
cost model said. ``--repeats`` does all of it but the search so many times: a machine whose cores
are shared with others' machines is not always as fast, so each execution of a plan is compared
with the profile that was taken just before. It goes on where an earlier call was ended:
``--seconds`` bounds each call.

    python benchmarks/plan.py --hosts 2 --repeats 5 --check-bars
"""

from __future__ import annotations

import argparse
import collections
import functools
import hashlib
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import _harness as harness
from _hosts import namespaces
from fusedpg.plan import Plan, models
from fusedpg.plan.baseline import uniform_grid
from fusedpg.plan.database import Database
from fusedpg.plan.model import CostModel, StagePrice
from fusedpg.plan.operators import Model, Part
from fusedpg.plan.others import MOST, Others
from fusedpg.plan.primitives import uniform_state
from fusedpg.plan.search import Limits, search
from fusedpg.plan.space import Space

RANKS, NAME, SIZE, GLOBAL_BATCH = 4, "gpt", "25M", 8
MICRO_BATCHES = (1, 2)  # samples of a device that are measured
LARGEST_MB, REPEATS, STEPS = 4.0, 5, 3
PROFILE_TRIES = 5  # at a file while others take the cores
TRIES, PATIENCE = 10, 40  # steps of a plan, and looks between them, while others take the cores
# In the smaller ones operators are computed again: uniform plans all of them, others some.
LIMIT_MB, SMALL_MB = 4000.0, 150.0
# Below 113 MB every uniform plan recomputes all operators.
WITHIN = {LIMIT_MB: "", 125.0: " in 125 MB", 112.0: " in 112 MB"}
BY_HAND = ("DDP", "FSDP2")
RESULTS = harness.RESULTS / "plans"
TIME_ERROR, MEMORY_ERROR, BEST, WORST, SEARCH_SHARE = 0.05, 0.05, 1.2, 0.97, 0.05


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1)
    parser.add_argument("--rate", default="1gbit", help="of each host's link")
    parser.add_argument("--work", type=Path, help="a folder to go on in")
    parser.add_argument("--seconds", type=float, default=1e9, help="of this call")
    parser.add_argument("--repeats", type=int, default=1, help="of the profile and of all plans")
    parser.add_argument("--no-save", action="store_true", help="results are printed only")
    parser.add_argument("--check-bars", action="store_true", help="exits with 1 if one is missed")
    parser.add_argument("--worker", choices=("profile", "execute"), help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--repeat", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.work = (args.work or Path(f"build/plan_{args.hosts}_hosts")).resolve()
    if args.worker:
        with_group(profiled if args.worker == "profile" else executed, args)
        return 0
    args.until = time.time() + args.seconds
    for number in range(args.repeats):
        args.repeat = number
        here(args).mkdir(parents=True, exist_ok=True)
        if not (here(args) / "profiled.json").exists() and not launched(args, "profile"):
            print("the profile is not whole yet: call again", file=sys.stderr)
            return 3
        plans, searched = chosen(args)
        if unmeasured(args, plans):
            launched(args, "execute")
        if left := len(unmeasured(args, plans)):
            print(f"{left} are not measured yet: call again", file=sys.stderr)
            return 3
    rows = compared(args, plans)
    return reported(args, rows, searched)


def here(args: argparse.Namespace) -> Path:
    """The folder of a repeat: its profile, and what was measured after it."""
    path: Path = args.work / f"repeat_{args.repeat}"
    return path


def launched(args: argparse.Namespace, worker: str) -> bool:
    """Runs this program on 4 ranks; False if time was up."""
    program = [str(Path(__file__).resolve()), f"--hosts={args.hosts}", f"--work={args.work}"]
    program += [f"--repeat={args.repeat}", f"--worker={worker}", f"--until={args.until}"]
    if args.hosts == 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        subprocess.run([*launcher, f"--nproc-per-node={RANKS}", *program], check=True)
    else:
        hosts = namespaces()
        if reason := hosts.why_not():
            sys.exit(f"no hosts: {reason}")
        with hosts.Hosts(args.hosts, args.rate) as made:
            made.run(program, ranks=RANKS // args.hosts, timeout=3600)
    return (here(args) / "profiled.json").exists()


# ---------------------------------------------------------------------------------------------
# On a rank


def with_group(work: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> None:
    import fusedpg  # noqa: F401  (registers the backend)

    torch.set_num_threads(1)
    dist.init_process_group("fused", timeout=harness.TIMEOUT)
    work(args)
    dist.barrier()
    dist.destroy_process_group()


class TimeIsUp(Exception):
    pass


def late(args: argparse.Namespace, more: float) -> bool:
    """Whether so many more seconds are too many; the same on all ranks."""
    found = torch.tensor(float(time.time() + more > args.until))
    dist.all_reduce(found)
    return bool(found)


def profiled(args: argparse.Namespace) -> None:
    from fusedpg.plan.profile import SIZES_MB, Profiler

    model = models.build(NAME, SIZE)
    folder = here(args) / "database"
    profiler = Profiler(model, folder, dtype=torch.float32, repeats=REPEATS, tries=PROFILE_TRIES)
    begun, references = time.time(), []

    def advance(name: str) -> None:
        if late(args, 20.0):
            raise TimeIsUp
        references.append(reference())
        if not dist.get_rank():
            print(name, file=sys.stderr)

    sizes = [size for size in SIZES_MB if size <= LARGEST_MB]
    try:
        profiler.operators(MICRO_BATCHES, advance)
        profiler.collectives(sizes, advance)
        profiler.messages(sizes, advance)
    except TimeIsUp:
        return
    finally:
        if not dist.get_rank():
            with (here(args) / "seconds.jsonl").open("a") as file:
                file.write(f"{time.time() - begun}\n")
    profiler.describe()
    if not dist.get_rank():
        known = {"reference_ms": statistics.median(references)}
        (here(args) / "profiled.json").write_text(json.dumps(known) + "\n")


def unmeasured(args: argparse.Namespace, plans: dict[str, Plan]) -> list[str]:
    """What `measured.jsonl` has not: names, in the order in which to measure them."""
    have = {(line["name"], line["digest"]) for line in _lines(_measured(args))}
    return [name for name in [*BY_HAND, *plans] if (name, _digest(plans.get(name))) not in have]


def executed(args: argparse.Namespace) -> None:
    plans, _ = chosen(args)
    names = unmeasured(args, plans)
    dist.barrier()  # nobody reads what rank 0 adds
    longest = 20.0
    for name in names:
        if late(args, 1.5 * longest):
            return
        begun, before = time.time(), reference()
        found = by_hand(name) if name in BY_HAND else executed_plan(plans[name], not args.repeat)
        work = (before + reference()) / 2
        longest = max(longest, time.time() - begun)
        everyone: list[Any] = [None] * RANKS
        dist.all_gather_object(everyone, found)
        if not dist.get_rank():
            row = {"name": name, "digest": _digest(plans.get(name)), "reference_ms": work,
                   "took": time.time() - begun, "ranks": everyone}  # fmt: skip
            with _measured(args).open("a") as file:
                file.write(json.dumps(row) + "\n")


def _measured(args: argparse.Namespace) -> Path:
    return here(args) / "measured.jsonl"


def _digest(plan: Plan | None) -> str:
    """Of what is executed; what was predicted changes nothing."""
    said = {} if plan is None else plan.to_json()
    kept = {key: value for key, value in said.items() if key != "predicted"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _timed(step: Callable[[], Any]) -> tuple[list[float], list[Any], float]:
    """Seconds of steps that begin and end together, and what other processes took of the cores.

    The first does not count, and a step that others disturbed counts only where all are.
    """
    steps: list[tuple[float, float, Any]] = []
    patience = PATIENCE
    for number in range(TRIES + 1):
        patience = calm(patience)
        dist.barrier()
        others = Others([0] * RANKS)
        begin = time.perf_counter()
        result = step()
        seconds = time.perf_counter() - begin
        if number:
            steps.append((others.share(), seconds, result))
        if sum(share <= MOST for share, *_ in steps) == STEPS:
            break
    steps = sorted(steps, key=lambda one: one[0])[:STEPS]
    return [s for _, s, _ in steps], [r for *_, r in steps], steps[-1][0]


def reference() -> float:
    """Milliseconds of a core for work that is always the same, on all ranks at once.

    A machine whose cores are shared with others' machines is not always as fast.
    """
    x, weight = torch.ones(256, 384), torch.ones(384, 16384)
    found = []
    for _ in range(5):
        begin = time.thread_time()
        (x @ weight).mul_(1e-3).exp_().sum()
        found.append(time.thread_time() - begin)
    mean = torch.tensor(statistics.median(found), dtype=torch.float64)
    dist.all_reduce(mean)
    return float(mean) / RANKS * 1e3


def calm(patience: int) -> int:
    """Waits until other processes leave the cores alone; how many more looks there may be."""
    while patience:
        others = Others([0] * RANKS)
        time.sleep(0.2)
        patience -= 1
        if others.share() <= MOST:
            break
    return patience


def executed_plan(plan: Plan, with_memory: bool) -> dict[str, Any]:
    from fusedpg.plan.train import Trainer

    model = models.of_plan(plan)
    trainer = Trainer(plan, model, options={"lr": 1e-3})
    batch = model.random_batch(GLOBAL_BATCH, torch.float32, 0)
    seconds, results, others = _timed(lambda: trainer.step(batch))
    parts = ("forward", "backward", "waiting", "optimizer")
    return {
        "seconds": seconds,
        "others": others,
        "memory_mb": trainer.memory(batch) if with_memory else None,
        "stage": next(iter(trainer.stages)),
        "parts": {
            part: statistics.median(getattr(result.times[0], part) for result in results)
            for part in parts
        },
    }


class Segment(nn.Module):
    """Operators in a row, as a module that knows nothing of plans."""

    def __init__(self, model: Model, numbers: range) -> None:
        super().__init__()
        self.operators = [model.operators[i] for i in numbers]
        self.parts = nn.ModuleList(
            op.module(Part(), torch.float32, i) for op, i in zip(self.operators, numbers)
        )

    def forward(self, held: dict[str, Tensor]) -> dict[str, Tensor]:
        made = dict(held)
        for op, module in zip(self.operators, self.parts):
            outputs = module(*(made[name] for name in op.inputs))
            made.update(zip(op.outputs, outputs if isinstance(outputs, tuple) else [outputs]))
        labels = {name: made[name] for name in ("labels",) if name in made}
        return {**labels, self.operators[-1].outputs[0]: made[self.operators[-1].outputs[0]]}


class Whole(nn.Module):
    """The model: an embedding, layers of 13 operators, a norm and the loss."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        count = len(model.operators)
        borders = [0, *range(1, count - 1, 13), count]
        self.segments = nn.ModuleList(
            Segment(model, range(a, b)) for a, b in itertools.pairwise(borders)
        )
        self.loss = model.operators[-1].outputs[0]

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        for segment in self.segments:
            batch = segment(batch)
        return batch[self.loss].mean()


def by_hand(name: str) -> dict[str, Any]:
    model = models.build(NAME, SIZE)
    whole: nn.Module = Whole(model)
    if name == "DDP":
        whole = nn.parallel.DistributedDataParallel(whole)
    else:
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
        for segment in whole.segments:
            fully_shard(segment, mesh=mesh)
        fully_shard(whole, mesh=mesh)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    batch = model.random_batch(GLOBAL_BATCH, torch.float32, 0)
    mine = {key: value.chunk(RANKS)[dist.get_rank()] for key, value in batch.items()}

    def step() -> None:
        loss = whole(mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())

    seconds, _, others = _timed(step)
    return {"seconds": seconds, "others": others}


# ---------------------------------------------------------------------------------------------
# Plans


def space(folder: Path, hosts: int, limit: float = LIMIT_MB) -> Space:
    model = CostModel(Database(folder, NAME, SIZE), RANKS, RANKS // hosts)
    sizes = [size for size in model.micro_batch_sizes() if GLOBAL_BATCH % size == 0]
    return Space(model, GLOBAL_BATCH, sizes, limit)


def chosen(args: argparse.Namespace) -> tuple[dict[str, Plan], dict[str, float]]:
    """The plans to measure, by name, and what the search took."""
    path = args.work / "plans.json"
    if not path.exists():
        plans, searched = _chosen(args)
        saved: dict[str, Any] = {name: plan.to_json() for name, plan in plans.items()}
        path.write_text(json.dumps({"plans": saved, "search": searched}, indent=1) + "\n")
    found = json.loads(path.read_text())
    return {name: Plan.from_json(one) for name, one in found["plans"].items()}, found["search"]


def _chosen(args: argparse.Namespace) -> tuple[dict[str, Plan], dict[str, float]]:
    folder = here(args) / "database"

    def make(limit: float = LIMIT_MB) -> Space:
        return space(folder, args.hosts, limit)

    plans: dict[str, Plan] = {}
    took = {"seconds": 0.0, "cpu_seconds": 0.0, "priced": 0.0}
    for limit, within in WITHIN.items():
        begun, cpu = time.time(), time.process_time()
        found = search(functools.partial(make, limit), [1, 2, 3, 4], limits=Limits(steps=4))
        took["seconds"] += time.time() - begun
        took["cpu_seconds"] += time.process_time() - cpu
        took["priced"] += sum(one.priced for one in found)
        fitting = sorted((one for one in found if one.plans), key=lambda one: one.time)
        for place, one in enumerate(fitting[:1] if within else fitting):
            stages = f", {one.plans[0].num_stages} stages" if place else ""
            plans[f"found{within}{stages}"] = one.plans[0]
        seen = set()
        for plan in uniform_grid(make(limit)):
            tp = plan.model_parallel_size_of_each_op[0][0]
            dp = plan.data_parallel_size_of_each_op[0][0]
            if (plan.num_stages, tp, dp) not in seen and len(seen) < (2 if within else 5):
                seen.add((plan.num_stages, tp, dp))
                plans[f"uniform{within}, {plan.num_stages} x tp {tp} x dp {dp}"] = plan
    for number, plan in enumerate(_random_plans([make(), make(SMALL_MB)], 6)):
        plans[f"random {number}, widths {'+'.join(str(n) for n in plan.num_gpus)}"] = plan
    return plans, took


def _random_plans(spaces: Sequence[Space], count: int) -> Iterator[Plan]:
    """Stages of any widths, borders and degrees, in each of the spaces in turn."""
    draw, ops = random.Random(0), spaces[0].model.num_ops
    while count:
        some = spaces[count % len(spaces)]
        cuts = sorted(draw.sample(range(1, RANKS), draw.randint(1, RANKS - 1)))
        widths = [b - a for a, b in zip([0, *cuts], [*cuts, RANKS])]
        borders = sorted(draw.sample(range(1, ops), len(widths) - 1))
        counts = [b - a for a, b in zip([0, *borders], [*borders, ops])]
        micro_batch = draw.choice(some.micro_batches)
        options = [some.settings(micro_batch, width).tolist() for width in widths]
        if not all(options):
            continue
        state = uniform_state(micro_batch, widths, counts, [draw.choice(one) for one in options])
        candidate = some.candidate(state)
        if candidate is not None:
            count -= 1
            yield some.plan(candidate)


# ---------------------------------------------------------------------------------------------
# Output


def compared(args: argparse.Namespace, plans: dict[str, Plan]) -> list[dict[str, Any]]:
    """A row for each plan that was measured, with what is predicted now: the medians of repeats."""
    measured: dict[str, list[Any]] = collections.defaultdict(list)
    cost_models, speeds = [], []
    for number in range(args.repeats):
        args.repeat = number
        cost_models.append(space(here(args) / "database", args.hosts).model)
        speeds.append(json.loads((here(args) / "profiled.json").read_text())["reference_ms"])
        lines = {(line["name"], line["digest"]): line for line in _lines(_measured(args))}
        for name in [*BY_HAND, *plans]:
            measured[name].append(lines[name, _digest(plans.get(name))])
    rows = []
    for name in [*BY_HAND, *plans]:
        plan, executions = plans.get(name), measured[name]
        each = [1e3 * statistics.median(line["ranks"][0]["seconds"]) for line in executions]
        row = {"name": name, "ms": statistics.median(each), "repeats_ms": each,
               "took": executions[0]["took"],
               "speed": statistics.median(
                   speed / line["reference_ms"] for speed, line in zip(speeds, executions)),
               "others": max(line["ranks"][0]["others"] for line in executions)}  # fmt: skip
        if plan is not None:
            prices = [model.price(plan) for model in cost_models]
            times = [price.time_ms for price in prices]
            price, ranks = prices[0], executions[0]["ranks"]
            row |= {"predicted_ms": statistics.median(times), "repeats_predicted_ms": times}
            row["predicted_mb"] = price.memory_mb
            row["stages"] = [
                _parts(price, executions, i, plan.num_micro_batches)
                for i, price in enumerate(price.stages)
            ]
            row["mb"] = max(rank["memory_mb"] for rank in ranks)
            row["stages_predicted_mb"] = [stage.memory for stage in price.stages]
            row["stages_mb"] = [
                max(rank["memory_mb"] for rank in ranks if rank["stage"] == stage)
                for stage in range(plan.num_stages)
            ]
        rows.append(row)
    return rows


def _parts(
    price: StagePrice, executions: Sequence[Any], stage: int, micro_batches: int
) -> dict[str, Any]:
    """Milliseconds of an iteration: predicted with a core of its own, measured by the clock."""
    ranks = [rank for line in executions for rank in line["ranks"] if rank["stage"] == stage]
    return {
        "predicted": {
            "forward": micro_batches * price.forward_pass,
            "backward": micro_batches * price.backward_pass,
            "optimizer": price.optimizer + price.exposed,
            "messages": micro_batches * (price.receive + price.send),
            "messages_on_cores": 2 * micro_batches * price.messaging,
        },
        "measured": {
            part: 1e3 * statistics.median(rank["parts"][part] for rank in ranks)
            for part in ranks[0]["parts"]
        },
    }


def _error(row: dict[str, Any], key: str) -> float:
    return float(row[f"predicted_{key}"] / row[key] - 1)


def _gain(rows: Sequence[dict[str, Any]], within: str) -> tuple[str, float]:
    """The best by hand within the limit, and what the search gains on it.

    DDP and FSDP2 fit into none of the smaller limits: a device has 64 MB of activations of its two
    samples, and 4 times the weights' 89 MB, which FSDP2 divides by 4 devices.
    """
    by_name = {row["name"]: row["ms"] for row in rows}
    others = {k: v for k, v in by_name.items() if k.startswith(f"uniform{within},")}
    if not within:
        others |= {name: by_name[name] for name in BY_HAND}
    best = min(others, key=lambda name: others[name])
    return best, others[best] / by_name[f"found{within}"]


def summary(rows: Sequence[dict[str, Any]], searched: dict[str, float]) -> dict[str, Any]:
    planned = [row for row in rows if "mb" in row]
    took = statistics.median(row["took"] for row in planned)
    return {
        "plans": len(planned),
        "time_error": statistics.median(abs(_error(row, "ms")) for row in planned),
        # One profile for all, as of somebody who measures once and trains later.
        "time_error_of_first_profile": statistics.median(
            abs(row["repeats_predicted_ms"][0] / row["ms"] - 1) for row in planned
        ),
        "memory_error": statistics.median(abs(_error(row, "mb")) for row in planned),
        "gains": {
            f"{limit:.0f}": _gain(rows, within)
            for limit, within in WITHIN.items()
            if any(row["name"] == f"found{within}" for row in rows)
        },
        "seconds_to_try_one": took,
        "search_share": searched["seconds"] / (searched["priced"] * took),
    }


def reported(
    args: argparse.Namespace, rows: Sequence[dict[str, Any]], searched: dict[str, float]
) -> int:
    where = "one host" if args.hosts == 1 else f"{args.hosts} hosts, {args.rate}"
    title = f"{NAME} {SIZE}, {GLOBAL_BATCH} samples, {RANKS} ranks, {where}"
    planned = [row for row in rows if "mb" in row]
    lines = []
    for row in rows:
        cells = [row["name"], f"{row['ms']:,.0f}", f"{row['speed']:.2f}"]
        if row in planned:
            cells += [f"{row['predicted_ms']:,.0f}", f"{100 * _error(row, 'ms'):+.1f}%"]
            cells += [f"{row['mb']:,.0f}", f"{row['predicted_mb']:,.0f}"]
            cells += [f"{100 * _error(row, 'mb'):+.1f}%"]
        lines.append(cells)
    figures = ["ms", "speed", "predicted", "error", "MB", "predicted", "error"]
    harness.show(title, ["plan"], figures, lines)
    figures = summary(rows, searched)
    gains, took = figures["gains"], figures["seconds_to_try_one"]
    most, least = max(gain for _, gain in gains.values()), min(gain for _, gain in gains.values())
    met = [
        (f"median error of time <= {TIME_ERROR:.0%}", figures["time_error"] <= TIME_ERROR),
        (f"median error of memory <= {MEMORY_ERROR:.0%}", figures["memory_error"] <= MEMORY_ERROR),
        (f"found >= {WORST}x the best by hand", least >= WORST),
        (
            f"search <= {SEARCH_SHARE:.0%} of trying what it priced",
            figures["search_share"] <= SEARCH_SHARE,
        ),
    ]
    if args.hosts == 2:
        met.append((f"found >= {BEST}x the best by hand for one limit", most >= BEST))
    print(
        f"{len(planned)} plans; median error of time {100 * figures['time_error']:.1f}%, of memory "
        f"{100 * figures['memory_error']:.1f}%; search {searched['seconds']:.1f} s for "
        f"{searched['priced']:,.0f} plans, {took:.1f} s to try one"
    )
    print(
        f"{args.repeats} repeats, each with a profile of its own; by the first profile alone the "
        f"median error of time is {100 * figures['time_error_of_first_profile']:.1f}%"
    )
    for row in rows:
        if row["others"] > MOST:
            print(f"{row['name']}: other processes took {row['others']:.0%} of the cores")
    for limit, (best, gain) in gains.items():
        print(f"within {limit} MB the found plan is {gain:.2f}x the best by hand ({best})")
    for text, good in met:
        print(f"{'met' if good else 'MISSED'}: {text}")
    if not args.no_save:
        head = {**harness.about(), "figures": figures, "search": searched}
        harness.write(RESULTS / f"{args.hosts}_hosts.json", head, rows)
    return 1 if args.check_bars and not all(good for _, good in met) else 0


if __name__ == "__main__":
    sys.exit(main())
