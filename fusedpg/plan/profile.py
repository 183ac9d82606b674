"""Measures a model's operators, and this machine's collectives and messages, into a database.

The files are those of `fusedpg.plan.database`. Operators run as `fusedpg.plan.train` runs them,
`tp` ranks together with the real collectives of their group, on as many ranks at the same time as
there are cores. Where there are fewer cores than ranks, the database says how many.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import csv
import functools
import hashlib
import io
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fusedpg
from fusedpg import _agreement
from fusedpg.plan import models
from fusedpg.plan.config import positive_integer, positive_number
from fusedpg.plan.database import COLUMNS
from fusedpg.plan.launched import facts_of, in_group
from fusedpg.plan.layout import Layout
from fusedpg.plan.memory import MB, PeakMemory
from fusedpg.plan.operators import Model, Operator, Part, Value
from fusedpg.plan.others import MOST, Others
from fusedpg.plan.stage import Move, exchanged, groups
from fusedpg.tensor_parallel._epilogue import Place

SIZES_MB = (1 / 256, 1 / 64, 1 / 16, 1 / 4, 1, 4, 16, 64)
LARGEST_STEP_MB = 256.0  # of the weights of an optimizer's step; larger ones are in proportion
COMPUTE_DURING_SEND_S = 0.005  # that ranks compute beside a message
SHARE_CORES_S = 0.06  # that ranks compute to see how they share cores, as a pass of a stage may
LONG_MS = 200.0  # of a collective, behind which larger ones are in proportion to their size
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "adamw")


_T = TypeVar("_T")

# --- operators ----------------------------------------------------------------------------


class _Measurement:
    """One operator with given degrees, ready to run again and again."""

    def __init__(
        self, op: Operator, inputs: Sequence[Value], samples: int, part: Part, dtype: torch.dtype
    ) -> None:
        self.module = op.module(part, dtype, seed=0)
        # A thread's time on its core is what other processes cannot change; with several threads,
        # and with ranks that wait for each other, only the clock knows.
        self.waits = part.tp > 1
        alone = not self.waits and torch.get_num_threads() == 1
        self.now = time.thread_time if alone else time.perf_counter
        ins, outs = op.splits(part.algo)
        generator = torch.Generator().manual_seed(0)
        self.inputs = [
            _random(value, _shape(value, samples, split, part.tp), dtype, generator)
            for value, split in zip(inputs, ins)
        ]
        self.gradients = [
            torch.randn(_shape(value, samples, split, part.tp), generator=generator).to(dtype)
            for value, split in zip(op.values(), outs)
        ]

    def forward(self) -> list[Tensor]:
        outputs = self.module(*self.inputs)
        return list(outputs) if isinstance(outputs, tuple) else [outputs]

    def backward(self, outputs: Sequence[Tensor]) -> None:
        pairs = [(t, g) for t, g in zip(outputs, self.gradients) if t.requires_grad]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        for tensor in self.inputs:
            tensor.grad = None

    def times(self, repeats: int) -> tuple[float, float, float]:
        """Seconds forward, backward, and those of both in which this rank waits; the medians.

        In training a pass comes after those of other operators: what this operator had in the
        cache is gone, and what is handed to it was just made.
        """
        self.backward(self.forward())
        forward, backward, shares = [], [], []
        for _ in range(repeats):
            _forget(self.inputs)
            begin, on_cores = self.now(), time.process_time()
            outputs = self.forward()
            forward.append(self.now() - begin)
            on_cores -= time.process_time()
            _forget(self.gradients)
            begin, on_cores = self.now(), on_cores + time.process_time()
            self.backward(outputs)
            backward.append(self.now() - begin)
            on_cores -= time.process_time()
            passed = forward[-1] + backward[-1]
            shares.append(max(0.0, passed + on_cores) / passed)
            del outputs
        middle = statistics.median(forward), statistics.median(backward)
        # The median of seconds waited can exceed both medians together; that of a share cannot.
        waited = statistics.median(shares) * sum(middle) if self.waits else 0.0
        return *middle, waited

    def step(self, repeats: int) -> float:
        """Seconds of AdamW over the weights, on one device."""
        own = groups([(rank,) for rank in range(dist.get_world_size())])[(dist.get_rank(),)]
        return _adamw(list(self.module.parameters()), own, repeats)

    def memory(self) -> _Memory:
        """MB that stay and that pass, and which inputs and outputs backward needs."""
        self.backward(self.forward())  # gradients of weights are there, as in a later micro-batch
        kept: dict[int, int] = {}  # bytes by storage

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            kept[storage._cdata] = storage.nbytes()
            return tensor

        with PeakMemory() as counted:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                outputs = self.forward()
            after, forward_peak = counted.now, counted.peak
            counted.peak = counted.now
            known = {p.untyped_storage()._cdata for p in self.module.parameters()}
            ins = [tensor.untyped_storage()._cdata for tensor in self.inputs]
            outs = [tensor.untyped_storage()._cdata for tensor in outputs]
            inside = sum(n for key, n in kept.items() if key not in known.union(ins, outs))
            saved = [key in kept for key in ins], [key in kept for key in outs]
            self.backward(outputs)
            backward_peak = counted.peak
        return {
            "inside": inside / MB,
            "inputs_saved": saved[0],
            "outputs_saved": saved[1],
            "forward": max(forward_peak - after, 0) / MB,
            "backward": max(backward_peak - after, 0) / MB,
        }


def _adamw(params: list[nn.Parameter], group: dist.ProcessGroup, repeats: int) -> float:
    """Seconds of AdamW's step with the reduction of gradients, the median."""
    if not params:
        return 0.0
    optimizer = fusedpg.optim.AdamW(params, process_group=group, reduce="sum")
    found = []
    for _ in range(repeats + 1):
        for param in params:
            param.grad = torch.ones_like(param)
        _forget([])
        begin = time.perf_counter()
        optimizer.step()
        found.append(time.perf_counter() - begin)
        optimizer.zero_grad()
    return statistics.median(found[1:])


def _computed() -> float:
    """Computes a little; seconds of this thread's core that it took."""
    begin = time.thread_time()
    torch.mm(*_MATRICES)
    return time.thread_time() - begin


_MATRICES = torch.ones(64, 384), torch.ones(384, 384)


@functools.cache
def _as_large_as_the_cache() -> Tensor:
    found = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    kilobytes = [int(text[:-1]) for path in found if (text := path.read_text().strip())[-1] == "K"]
    # A larger one, of 300 MB on some servers, belongs to dozens of cores, whose number a virtual
    # machine does not say: a rank's part of it is less than this.
    most = 64 << 10
    return torch.ones(min(max(kilobytes, default=most), most) << 8)


def _forget(kept: Sequence[Tensor]) -> None:
    """Reads so much that the cache has nothing else but these tensors."""
    _as_large_as_the_cache().sum()
    for tensor in kept:
        if tensor.is_floating_point():
            tensor.detach().sum()


def _shape(value: Value, samples: int, split: int | None, tp: int) -> tuple[int, ...]:
    shape = [samples, *value.shape]
    if split is not None:
        shape[split] //= tp
    return tuple(shape)


def _random(
    value: Value, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    if value.high:
        return torch.randint(value.high, shape, generator=generator)
    made = torch.randn(shape, generator=generator).to(value.dtype or dtype)
    return made.requires_grad_(value.differentiable and made.is_floating_point())


def _mean(value: float) -> float:
    """Over all ranks, so that all of them know the same."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _numbered(names: Sequence[Hashable]) -> list[int]:
    """Numbers for the names, in the order in which they come first."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [numbers[name] for name in names]


class _Memory(TypedDict):
    """MB of an operator, and which of its inputs and outputs the backward pass needs."""

    inside: float  # that stay until then, besides these
    inputs_saved: list[bool]
    outputs_saved: list[bool]
    forward: float  # that pass
    backward: float


class _Cost(_Memory):
    """The cost of an operator on one device."""

    forward_us: float
    backward_us: float
    waiting_us: float
    step_us: float


class _Cache:
    """The measurements so far, a line each, so that an interrupted profile can go on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines: list[str] = []
        if dist.get_rank() == 0 and path.exists():
            text = path.read_text()
            lines = text.splitlines()
            if not text.endswith("\n"):  # the end of a line was not written
                lines = lines[:-1]
                path.write_text("".join(f"{line}\n" for line in lines))
        shared = [lines]
        dist.broadcast_object_list(shared)
        self.known: dict[str, Any] = {}  # as JSON has it
        self.fresh: dict[str, Any] = {}  # not written yet
        for line in shared[0]:
            self.known.update(json.loads(line))

    def get(self, key: str, measure: Callable[[], _T]) -> _T:
        if key not in self.known and key not in self.fresh:
            self.fresh[key] = measure()
        found: _T = (self.fresh if key in self.fresh else self.known)[key]
        return found

    def keep(self) -> None:
        """Writes what was measured since the last time."""
        self.known.update(self.fresh)
        if dist.get_rank() == 0:
            with self.path.open("a") as file:
                file.writelines(json.dumps({k: v}) + "\n" for k, v in self.fresh.items())
        self.fresh = {}


class Profiler:
    """Measures a model. All ranks of the default group take part in all of it.

    Args:
        model: whose operators are measured; those that compute the same, once.
        folder: of the database.
        dtype: of weights and values.
        repeats: of each measurement, of which the median counts.
        tries: at a file's measurements, where other processes disturb them.
    """

    def __init__(
        self,
        model: Model,
        folder: str | Path,
        *,
        dtype: torch.dtype,
        repeats: int = 10,
        tries: int = 5,
    ) -> None:
        self.model, self.folder = model, Path(folder)
        self.dtype, self.repeats, self.tries = dtype, repeats, tries
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.stem = f"{model.name}_{model.size}"
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
        # Measurements depend on it; another machine has a folder of its own.
        said = (
            "6",  # of how they are measured
            dtype,
            repeats,
            self.world_size,
            torch.get_num_threads(),
            sorted(model.facts.items()),
        )
        digest = hashlib.sha256(repr(said).encode()).hexdigest()[:12]
        self.cache = _Cache(self.folder / f"measured_{self.stem}_{digest}.jsonl")
        local = fusedpg.group_info()["local_ranks"]
        self.host = _numbered(_agreement.by_rank(min(local)))  # of each rank
        self.machine, self.cores = self._machines()
        # Operators by their names, which are the rows: the first of each.
        self.rows = {op.name: op for op in reversed(model.operators)}
        self.rows = dict(reversed(self.rows.items()))

    def _machines(self) -> tuple[list[int], int]:
        """The number of each rank's machine, and the fewest cores that ranks of one share.

        Several hosts, as containers are, may be one machine.
        """
        boot = Path("/proc/sys/kernel/random/boot_id")
        mine = boot.read_text() if boot.exists() else self.host[self.rank]
        everyone = _agreement.by_rank((mine, os.sched_getaffinity(0)))
        machine = _numbered([name for name, _ in everyone])
        cores = [set[int]() for _ in everyone]
        for number, (_, allowed) in zip(machine, everyone):
            cores[number] |= allowed
        fewest = min(len(found) for found in cores if found)
        return machine, max(1, fewest // torch.get_num_threads())

    def degrees(self) -> list[int]:
        """Tensor-parallel degrees: those whose ranks share a host, however the plan cuts."""
        found = []
        for tp in range(1, self.world_size + 1):
            blocks = [self.host[i : i + tp] for i in range(0, self.world_size, tp)]
            if self.world_size % tp == 0 and all(len(set(block)) == 1 for block in blocks):
                found.append(tp)
        return found

    def _in_turn(self, tp: int, measure: Callable[[], list[float]]) -> list[float]:
        """Seconds with a core for each rank: no more sets of `tp` ranks at once than have them."""
        sets = [s for s in range(self.world_size // tp) if self.machine[s * tp] == self._here]
        at_once = max(1, self.cores // tp)
        mine, turns = sets.index(self.rank // tp) // at_once, -(-self.world_size // tp)
        found: list[float] = []
        for turn in range(turns):
            dist.barrier()
            if turn == mine:
                found = measure()
        return [t * min(1.0, self.cores / tp) for t in found]

    @property
    def _here(self) -> int:
        return self.machine[self.rank]

    def _part(self, tp: int, algo: int) -> Part:
        first = self.rank - self.rank % tp
        sets = [tuple(range(i, i + tp)) for i in range(0, self.world_size, tp)]
        place = Place(groups(sets)[tuple(range(first, first + tp))]) if tp > 1 else None
        return Part(tp, 1, self.rank % tp, 0, place, None, algo)

    def operators(self, micro_batches: Sequence[int], advance: Callable[[str], None]) -> list[str]:
        """Writes a file for each number of samples, degree and way; what was left out, and why."""
        skipped = []
        for tp in self.degrees():
            for algo in (0, 1):
                problems = (
                    op.problem(tp, algo, [self.model.values[name] for name in op.inputs])
                    for op in self.model.operators
                )
                if problem := next((p for p in problems if p), None):
                    skipped.append(f"tp {tp}, algo {algo}: {problem}")
                    continue
                for samples in micro_batches:
                    name = f"{self.stem}_mbs{samples}_tp{tp}_algo{algo}.csv"
                    advance(name)
                    self._file(name, functools.partial(self._table, samples, tp, algo))
        return skipped

    def _table(self, samples: int, tp: int, algo: int) -> list[Sequence[object]]:
        found = {name: self._measured(op, samples, tp, algo) for name, op in self.rows.items()}
        sizes = self._boundaries(samples, tp, algo)
        needed = self._needed(found, algo)
        part = Part(tp=tp, algo=algo)
        rows: list[Sequence[object]] = [("op_name", *COLUMNS)]
        for name, op in self.rows.items():
            value, way = found[name], min(algo, op.ways - 1)
            weights = sum(
                math.prod(weight.shape) // (1 if weight.split is None else tp)
                for weight in op.weights(way).values()
            )
            activations, of_users = value["inside"], 0.0
            ins, outs = op.splits(way)
            for output, split, saved, own in zip(
                op.values(), outs, needed[name], value["outputs_saved"]
            ):
                size = self._mb(_shape(output, samples, split, part.tp), output)
                activations += size if saved else 0.0
                of_users += size if saved and not own else 0.0
            of_inputs = sum(
                self._mb(_shape(self.model.values[x], samples, split, tp), self.model.values[x])
                for x, split, saved in zip(op.inputs, ins, value["inputs_saved"])
                if saved and x not in self.model.data
            )
            busy = 1.0 - value["waiting_us"] / (value["forward_us"] + value["backward_us"])
            cells = (
                value["forward_us"],
                value["backward_us"],
                *sizes[name],
                weights * self.dtype.itemsize / MB,
                activations,
                value["forward"],
                value["backward"],
                value["step_us"],
                busy,
                of_inputs,
                of_users,
            )
            rows.append((name, *(f"{cell:.6f}" for cell in cells)))
        return rows

    def _mb(self, shape: Sequence[int], value: Value) -> float:
        return math.prod(shape) * (value.dtype or self.dtype).itemsize / MB

    def _measured(self, op: Operator, samples: int, tp: int, algo: int) -> _Cost:
        algo = min(algo, op.ways - 1) if tp > 1 else 0
        inputs = [self.model.values[name] for name in op.inputs]
        shapes = [(value.shape, value.high) for value in inputs]
        key = repr((op.kind(), shapes, samples, tp, algo))

        def measure() -> _Cost:
            run = _Measurement(op, inputs, samples, self._part(tp, algo), self.dtype)
            times = self._in_turn(tp, lambda: [*run.times(self.repeats), run.step(self.repeats)])
            forward, backward, waiting, step = (_mean(seconds) * 1e6 for seconds in times)
            return {
                "forward_us": forward,
                "backward_us": backward,
                "waiting_us": waiting,
                "step_us": step,
                **run.memory(),
            }

        return self.cache.get(key, measure)

    def _boundaries(self, samples: int, tp: int, algo: int) -> dict[str, tuple[float, float]]:
        """MB that one device has to have before each operator and to pass on after it."""
        last = {name: i for i, op in enumerate(self.model.operators) for name in op.inputs}
        live: dict[str, float] = {}
        found: dict[str, tuple[float, float]] = {}
        for i, op in enumerate(self.model.operators):
            before = sum(live.values())
            for name, value, split in zip(
                op.outputs, op.values(), op.splits(min(algo, op.ways - 1))[1]
            ):
                live[name] = self._mb(_shape(value, samples, split, tp), value)
            live = {name: size for name, size in live.items() if last.get(name, -1) > i}
            found.setdefault(op.name, (before, sum(live.values())))
        return found

    def _needed(self, found: Mapping[str, _Cost], algo: int) -> dict[str, list[bool]]:
        """Says which outputs stay until backward, for their operator or for those that use them."""
        saved = {
            name
            for op in self.model.operators
            for name, kept in zip(op.inputs, found[op.name]["inputs_saved"])
            if kept
        }
        needed: dict[str, list[bool]] = {}
        for op in self.model.operators:
            own = found[op.name]["outputs_saved"]
            here = [kept or name in saved for name, kept in zip(op.outputs, own)]
            before = needed.setdefault(op.name, here)
            needed[op.name] = [a or b for a, b in zip(before, here)]
        return needed

    # --- collectives and messages ---

    def collectives(self, sizes: Sequence[float], advance: Callable[[str], None]) -> None:
        """Writes a file for each collective and number of devices, on one host and across."""
        weights = sum(
            self._mb(weight.shape, Value(()))
            for op in self.model.operators
            for weight in op.weights(0).values()
        )
        # A step takes all weights of a stage at once, other collectives the values of an operator.
        most = min(weights, LARGEST_STEP_MB)
        larger = [2.0**n for n in range(30) if max(sizes) < 2.0**n < most]
        steps = [*sizes, *larger, *([most] if most > max(sizes) else [])]
        for count in range(2, self.world_size + 1):
            for nodes, sets in self._sets(count).items():
                for collective in COLLECTIVES:
                    across = f"_{nodes}nodes" if nodes > 1 else ""
                    name = f"prim_{self.stem}_{collective}_{count}gpus{across}.csv"
                    advance(name)
                    which = collective, count, nodes, sets
                    taken = steps if collective == "adamw" else sizes
                    self._file(name, functools.partial(self._curve, *which, taken))

    def _curve(
        self,
        collective: str,
        count: int,
        nodes: int,
        sets: Sequence[tuple[int, ...]],
        sizes: Sequence[float],
    ) -> list[Sequence[object]]:
        rows: list[Sequence[object]] = [("data_size(MB)", "time(ms)")]
        for size in sizes:
            measure = functools.partial(self._collective, collective, sets, size)
            time = self.cache.get(repr((collective, count, nodes, size)), measure)
            rows.append((f"{size:.6f}", f"{time:.6f}"))
            if time > LONG_MS:
                break
        return rows

    def _sets(self, count: int) -> dict[int, list[tuple[int, ...]]]:
        """Disjoint sets of so many ranks, by how many hosts each is on."""
        found: dict[int, list[tuple[int, ...]]] = {}
        # Consecutive ranks, as tensor parallelism takes them; strided ones, as data parallelism.
        stride = self.world_size // count
        for sets in (
            [tuple(range(i, i + count)) for i in range(0, self.world_size - count + 1, count)],
            [tuple(range(i, self.world_size, stride))[:count] for i in range(stride)],
        ):
            for ranks in sets:
                nodes = len({self.host[rank] for rank in ranks})
                known = found.setdefault(nodes, [])
                if not any(set(ranks) & set(other) for other in known):
                    known.append(ranks)
        return found

    def _collective(self, collective: str, sets: Sequence[tuple[int, ...]], size: float) -> float:
        """Milliseconds, where all of these sets are busy at the same time."""
        mine = next((ranks for ranks in sets if self.rank in ranks), None)
        made = groups(list(sets))
        found = 0.0
        if mine is not None:
            count = int(size * MB / 4)
            if collective == "adamw":
                parts = torch.zeros(count).split(MB)
                params = [nn.Parameter(part.clone()) for part in parts]
                found = _adamw(params, made[mine], self.repeats) * 1e3
            else:
                run = _collective(collective, mine, self.rank, made[mine], count)
                for _ in range(2):
                    run()
                times = []
                for _ in range(self.repeats):
                    begin = time.perf_counter()
                    run()
                    times.append(time.perf_counter() - begin)
                found = statistics.median(times) * 1e3
        busy = sum(len(ranks) for ranks in sets)
        if all(len({self.host[rank] for rank in ranks}) == 1 for ranks in sets):
            most = max(collections.Counter(self.machine[r] for s in sets for r in s).values())
            found *= min(1.0, self.cores / most)  # with a core for each device
        return _mean(found) * self.world_size / busy

    def messages(self, sizes: Sequence[float], advance: Callable[[str], None]) -> None:
        """Writes the bandwidth of messages between two ranks of a host, and of two hosts."""
        pairs = {"intra": None, "inter": None} | {
            "intra" if self.host[a] == self.host[b] else "inter": (a, b)
            for a in reversed(range(self.world_size))
            for b in reversed(range(a + 1, self.world_size))
        }
        for kind, pair in pairs.items():
            if pair is None:
                continue
            name = f"p2p_{kind}_node.csv"
            advance(name)
            self._file(name, functools.partial(self._speeds, kind, pair, sizes))

    def _speeds(
        self, kind: str, pair: tuple[int, int], sizes: Sequence[float]
    ) -> list[Sequence[object]]:
        rows: list[list[str]] = [[], [], []]
        for size in sizes:
            measure = functools.partial(self._message, pair, int(size * MB / 4))
            there, ends = self.cache.get(repr(("message", kind, size)), measure)
            for row, value in zip(rows, (size, size / there, ends)):
                row.append(f"{value:.6f}")
        return list(rows)

    def _message(self, pair: tuple[int, int], count: int) -> tuple[float, float]:
        """Milliseconds until a message is there, and of a core at each end, the means.

        In training the sender goes on to compute, as other ranks do, and only the receiver waits.
        A message waits for a core if ranks share them.
        """
        tensor = torch.zeros(max(count, 1))
        arrived, ends = [0.0], [0.0]
        for _ in range(self.repeats + 2):
            dist.barrier()
            begin, own, computed = time.perf_counter(), time.process_time(), 0.0
            if self.rank == pair[1]:
                dist.recv(tensor, pair[0])
                arrived.append(time.perf_counter() - begin)
            else:
                sent = dist.isend(tensor, pair[1]) if self.rank == pair[0] else None
                while computed < COMPUTE_DURING_SEND_S or not (sent is None or sent.is_completed()):
                    computed += _computed()
                if sent is not None:
                    sent.wait()
            if self.rank in pair:
                ends.append(time.process_time() - own - computed)
        taken = [statistics.mean(times[3:] or [0.0]) * 1e3 for times in (arrived, ends)]
        return _mean(taken[0]) * self.world_size, _mean(taken[1]) * self.world_size / 2

    def _shared(self) -> list[float] | None:
        """The number of ranks on a machine, and of cores that they get; None if each has one.

        They get a little less than there are: the system moves processes between cores too late,
        and has work of its own.
        """
        ranks = self.machine.count(0)
        if ranks <= self.cores:
            return None
        here = [rank for rank in range(self.world_size) if self.machine[rank] == self._here]
        found = []
        others = Others(self.machine)
        for active in (self.cores, ranks):
            times = []
            for _ in range(self.repeats + 2):
                dist.barrier()
                begin, computed = time.perf_counter(), 0.0
                while here.index(self.rank) < active and computed < SHARE_CORES_S:
                    computed += _computed()
                (ended,) = _agreement.largest([time.perf_counter() - begin], None)
                times.append(_mean(computed) * ranks / ended)
            found.append(statistics.median(times))
        share = others.share()
        # Other processes take this now, and not when the model is trained.
        left = 1.0 - share if share > MOST else 1.0
        return [ranks, min(self.cores, statistics.mean(found) / left)]

    # --- files ---

    def describe(self) -> None:
        """Writes what a cost model must know of the model besides times."""
        ops = self.model.operators
        layouts = {
            op.name: [
                [_kind(op.splits(way)[0], first=True), _kind(op.splits(way)[1], first=False)]
                for way in (0, op.ways - 1)
            ]
            for op in self.rows.values()
        }
        described = {
            "operators": self.model.names,
            "layouts": layouts,
            "memory_main_params": 0.0,
            "memory_optimizer": 2.0,
            "optimizer_divides": True,
            "overlap": 0.0,  # gradients are reduced when the last backward pass has ended
            "model": dict(self.model.facts),
        }
        shared = self._undisturbed(
            "shared cores", lambda: self.cache.get("shared cores", self._shared)
        )
        if shared is not None:
            described["shared_cores"] = shared
        if self.rank == 0 and ops:
            path = self.folder / f"model_{self.stem}.json"
            _replace(path, json.dumps(described, indent=1) + "\n")

    def _file(self, name: str, measure: Callable[[], list[Sequence[object]]]) -> None:
        """Measures and writes a file."""
        rows = self._undisturbed(name, measure)
        if self.rank == 0:
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(rows)
            _replace(self.folder / name, text.getvalue())

    def _undisturbed(self, name: str, measure: Callable[[], _T]) -> _T:
        """Measures, and again while other processes take the cores."""
        for _ in range(self.tries):
            others = Others(self.machine)
            found = measure()
            share = others.share() if self.cache.fresh else 0.0
            if not share > MOST:
                break
            again, self.cache.fresh = self.cache.fresh, {}
        else:
            self.cache.fresh = again
            if self.rank == 0:
                said = f"other processes took {share:.0%} of the cores"
                print(f"{name}: {said} while it was measured", file=sys.stderr)
        self.cache.keep()
        return found


def _kind(splits: Sequence[int | None], first: bool) -> str:
    """The layout of the first input or output, as `fusedpg.plan.catalogue` names it."""
    split = splits[0] if splits else None
    return {None: "replicated", 1: "heads", 2: "hidden"}[split]


def _replace(path: Path, text: str) -> None:
    """Writes a file that is never seen half."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    os.replace(part, path)


def _collective(
    collective: str, ranks: tuple[int, ...], rank: int, group: dist.ProcessGroup, count: int
) -> Callable[[], object]:
    """The collective as plans use it, of so many elements on each device before it."""
    size = len(ranks)
    count = max(count // size, 1) * size
    tensor = torch.ones(count)
    if collective == "all_reduce":
        return lambda: dist.all_reduce(tensor, group=group)
    if collective == "reduce_scatter":
        part = torch.empty(count // size)
        return lambda: dist.reduce_scatter(part, list(tensor.chunk(size)), group=group)
    # Changes of layout inside of a stage.
    split, whole = Layout(ranks, size, 1, split=1), Layout(ranks, size, 1)
    if collective == "all_gather":
        move = Move.of((1, count * size), split, whole, rank)
        return lambda: exchanged(tensor.view(1, count), move, group)
    batch = Layout(ranks, 1, size)
    move = Move.of((size, count), split, batch, rank)
    return lambda: exchanged(tensor.view(size, count // size), move, group)


# --- the command --------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help=f"one of {', '.join(models.MODELS)}")
    parser.add_argument("--size", required=True, help="such as 25M or 1_3B")
    parser.add_argument("--out", required=True, type=Path, help="the database's folder")
    parser.add_argument(
        "--micro-batch",
        nargs="+",
        type=positive_integer,
        default=[1, 2, 4],
        help="samples on one device (default: 1 2 4)",
    )
    parser.add_argument(
        "--max-mb", type=positive_number, default=16.0, help="of collectives and messages"
    )
    parser.add_argument("--repeats", type=positive_integer, default=10)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16"])
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="FACT=NUMBER", help="such as num_layers=12"
    )


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A function that says on rank 0 what is measured now."""
    if dist.get_rank():
        yield lambda name: None
        return
    try:
        from rich.progress import Progress
    except ImportError:
        yield lambda name: print(name, file=sys.stderr)
        return
    with Progress() as bar:
        task = bar.add_task("", total=total)

        def advance(name: str) -> None:
            bar.update(task, advance=1, description=name)

        yield advance


def main(arguments: argparse.Namespace) -> int:
    model = models.build(arguments.model, arguments.size, **facts_of(arguments.set))
    with in_group():
        profiler = Profiler(
            model,
            arguments.out,
            dtype=getattr(torch, arguments.dtype),
            repeats=arguments.repeats,
        )
        sizes = [size for size in SIZES_MB if size <= arguments.max_mb]
        files = 2 * len(profiler.degrees()) * len(arguments.micro_batch)
        files += len(COLLECTIVES) * (profiler.world_size - 1) + 1
        with progress(files) as advance:
            skipped = profiler.operators(arguments.micro_batch, advance)
            profiler.collectives(sizes, advance)
            profiler.messages(sizes, advance)
        profiler.describe()
        if dist.get_rank() == 0:
            for text in skipped:
                print(f"left out: {text}", file=sys.stderr)
    return 0
