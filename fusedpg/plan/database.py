"""A database of measured times, as Aceso's profiler writes it, with columns of ours.

Files of a folder, for a model ``gpt`` of size ``1_3B``:

- ``gpt_1_3B_mbs{samples}_tp{degree}_algo{algo}.csv``: a row for each operator of `COLUMNS`. Times
  are in microseconds, sizes in MB (2**20 bytes) of one device. The columns from
  ``optimizer-step`` on are ours and may be missing: ``busy`` is the share of the passes' time in
  which the device computes, ``saved-inputs`` is what the backward pass needs of the inputs, and
  ``saved-outputs`` the part of ``activations`` that only those who use the outputs need.
- ``prim_gpt_1_3B_{collective}_{n}gpus.csv``: ``data_size(MB),time(ms)`` for the collectives
  ``all_gather``, ``all_reduce``, ``reduce_scatter`` and ``all_to_all`` of `n` devices. The size is
  what a device holds before it. ``..._{n}gpus_{k}nodes.csv`` is ours: `n` devices on `k` machines.
  So is ``adamw``: a step of so many weights with the reduction of their gradients, which then is
  not taken from ``all_reduce``.
- ``p2p_intra_node.csv`` and ``p2p_inter_node.csv``: a row of sizes in MB, a row of GB/s; and one
  of ours, milliseconds of a core that a message takes of each of its ends.
- ``model_gpt_1_3B.json`` is ours and may be missing for Aceso's models: "operators" (the whole
  sequence of names), "layouts", "layer_starts", "never_recomputed", "shared_activations",
  "memory_main_params", "memory_optimizer", "optimizer_divides" and "model", as in
  `fusedpg.plan.catalogue.Operators`;
  "overlap", the share of the gradients' reduction that the backward pass hides, from 0 to 1;
  "shared_cores": [devices, cores] where so many devices in a row share fewer cores. Times are
  then those with a core for each device. The number of cores is what the devices together get of
  them, and need not be whole.
"""

from __future__ import annotations

import bisect
import csv
import dataclasses
import functools
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusedpg.plan.catalogue import MODELS, Operators, known_operators
from fusedpg.plan.contention import SharedCores

__all__ = ["COLUMNS", "Curve", "Database", "DatabaseError", "MissingRow"]

COLUMNS = (
    "forward-compute",
    "backward-compute",
    "input_size",
    "output_size",
    "weights",
    "activations",
    "fwd_reserved",
    "bwd_reserved",
    "optimizer-step",
    "busy",
    "saved-inputs",
    "saved-outputs",
)
_OPTIONAL = {"optimizer-step": 0.0, "busy": 1.0, "saved-inputs": 0.0, "saved-outputs": 0.0}
# Aceso's profiler writes 1e7 us for an operator and 1e9 ms for a collective that failed.
FAILED_US = 1e7
FAILED_MS = 1e9


class DatabaseError(ValueError):
    """A file of the database that is damaged."""


class MissingRow(LookupError):
    """Something that was not measured, by the file and the row where it should be."""

    def __str__(self) -> str:
        return str(self.args[0])


class Curve:
    """Values at some sizes, and by straight lines between them.

    Below the smallest size the value is the smallest's, which is latency. Above the largest
    it is in proportion to the size; two noisy neighbours would make a bad slope.
    """

    def __init__(self, points: Sequence[tuple[float, float]]) -> None:
        ordered = sorted(points)
        self.sizes = [size for size, _ in ordered]
        self.values = [value for _, value in ordered]

    def __call__(self, size: float) -> float:
        if size <= self.sizes[0]:
            return self.values[0]
        if size >= self.sizes[-1]:
            return self.values[-1] * size / self.sizes[-1]
        right = bisect.bisect_left(self.sizes, size)
        low, high = self.sizes[right - 1], self.sizes[right]
        share = (size - low) / (high - low)
        return self.values[right - 1] + share * (self.values[right] - self.values[right - 1])


def _rows(path: Path) -> list[list[str]]:
    """The cells of a file, header first.

    Raises:
        DatabaseError: if it was cut off, or is empty.
    """
    text = path.read_text()
    if not text.endswith("\n"):
        raise DatabaseError(f"{path} ends in the middle of a line: was it cut off?")
    rows = [row for row in csv.reader(text.splitlines()) if row]
    if len(rows) < 2:
        raise DatabaseError(f"{path} has no rows below its header")
    return rows


def _number(path: Path, line: int, cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise DatabaseError(f"{path}, line {line}: {cell!r} is no size or time")
    return value


class Database:
    """The measurements of one model.

    Args:
        folder: where the files are.
        model_name: such as "gpt".
        model_size: such as "1_3B".
        num_layers: the model's layers, if they are not those of its size: the operators of a
            layer are the same, however many there are.

    Raises:
        FileNotFoundError: if the folder has no file of this model.
        DatabaseError: if a file is damaged, or the model is unknown and not described.
    """

    def __init__(
        self,
        folder: str | Path,
        model_name: str,
        model_size: str,
        num_layers: int | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.model_name = model_name
        self.model_size = model_size
        # T5 of 22B has the operators of 11B.
        stem_size = "11B" if (model_name, model_size) == ("t5", "22B") else model_size
        self.stem = f"{model_name}_{stem_size}"
        # (micro-batch, tp, algo) -> operator -> values in the order of COLUMNS
        self._operators: dict[tuple[int, int, int], dict[str, tuple[float, ...]]] = {}
        self.names: tuple[str, ...] = ()
        self.has_optimizer = True
        self._read_operators()
        keys = self._operators.keys()
        self.micro_batch_sizes = tuple(sorted({samples for samples, _, _ in keys}))
        self.tensor_parallel = tuple(sorted({tp for _, tp, _ in keys}))
        self.algos = tuple(sorted({algo for _, _, algo in keys}))
        self._remember()
        self.has_steps = any(self.folder.glob(f"prim_{self.stem}_adamw_*gpus*.csv"))
        self.overlap = 0.0
        self.shared_cores: SharedCores | None = None
        self.operators = self._describe(num_layers)

    def _remember(self) -> None:
        """Files are read once."""
        self.collective_rows = functools.cache(self._collective_rows)
        self.collective = functools.cache(self._collective)
        self._link = functools.cache(self._read_link)

    def __getstate__(self) -> dict[str, object]:
        # A copy that kept these functions would read the original's files.
        cached = ("collective_rows", "collective", "_link")
        return {name: value for name, value in vars(self).items() if name not in cached}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._remember()

    def _read_operators(self) -> None:
        pattern = re.compile(re.escape(self.stem) + r"_mbs(\d+)_tp(\d+)_algo(\d+)\.csv")
        found = sorted(
            (tuple(int(group) for group in match.groups()), path)
            for path in self.folder.glob(f"{self.stem}_mbs*.csv")
            if (match := pattern.fullmatch(path.name))
        )
        if not found:
            raise FileNotFoundError(f"{self.folder} has no file {self.stem}_mbs*_tp*_algo*.csv")
        for key, path in found:
            table = self._read_table(path)
            names = tuple(table)
            if not self.names:
                self.names, first = names, path
            if names != self.names:
                differ = sorted(set(names) ^ set(self.names)) or ["the order of rows"]
                raise DatabaseError(f"{path} and {first} differ in {', '.join(differ)}")
            self._operators[key] = table  # type: ignore[index]

    def _read_table(self, path: Path) -> dict[str, tuple[float, ...]]:
        header, *rows = _rows(path)
        lacking = [name for name in COLUMNS if name not in header and name not in _OPTIONAL]
        if lacking or header[0] != "op_name":
            raise DatabaseError(f"{path} lacks the column {', '.join(lacking or ['op_name'])}")
        if "optimizer-step" not in header:
            self.has_optimizer = False
        places = [header.index(name) if name in header else None for name in COLUMNS]
        otherwise = [_OPTIONAL.get(name, 0.0) for name in COLUMNS]
        table: dict[str, tuple[float, ...]] = {}
        for line, row in enumerate(rows, start=2):
            if len(row) != len(header):
                raise DatabaseError(
                    f"{path}, line {line}: {len(row)} cells below a header of {len(header)}"
                )
            if row[0] in table:
                raise DatabaseError(f"{path}, line {line}: a second row {row[0]}")
            table[row[0]] = tuple(
                value if place is None else _number(path, line, row[place])
                for place, value in zip(places, otherwise)
            )
            if (busy := table[row[0]][COLUMNS.index("busy")]) > 1:
                raise DatabaseError(
                    f"{path}, line {line}: busy {busy} is more than all of the time"
                )
        return table

    def _describe(self, num_layers: int | None) -> Operators:
        path = self.folder / f"model_{self.stem}.json"
        try:
            described = json.loads(path.read_text()) if path.exists() else {}
        except ValueError as error:
            raise DatabaseError(f"{path} is no JSON, was it cut off? {error}") from error
        if not isinstance(described, dict):
            raise DatabaseError(f"{path} is {type(described).__name__}, not an object")
        model = dict(described.get("model", MODELS.get((self.model_name, self.model_size), {})))
        if num_layers is not None:
            model["num_layers"] = num_layers
        overlap = described.get("overlap", 0.0)
        if type(overlap) not in (int, float) or not 0 <= overlap <= 1:
            raise DatabaseError(f"{path}: overlap {overlap!r} is not between 0 and 1")
        self.overlap = float(overlap)
        if (shared := described.get("shared_cores")) is not None:
            right = isinstance(shared, list) and [type(n) in (int, float) for n in shared]
            if right != [True, True] or not all(n > 0 for n in shared) or shared[0] % 1:
                raise DatabaseError(f"{path}: shared_cores {shared} is not [devices, cores]")
            self.shared_cores = SharedCores(*shared)
        known = None
        if self.model_name == "resnet" or "num_layers" in model:
            known = known_operators(self.model_name, self.names, model)
        if "operators" in described:
            # Other implementations than Aceso's share nothing of what its operators share.
            known = known or Operators(sequence=(), model=model)
            known = dataclasses.replace(
                known,
                sequence=tuple(described["operators"]),
                layer_starts=frozenset(),
                shared_activations={},
            )
        if known is None:
            raise DatabaseError(
                f"{self.stem} is none of Aceso's models: {path.name} must list its operators"
            )
        said: dict[str, Any] = {name: described[name] for name in _PLAIN if name in described}
        said |= {name: frozenset(described[name]) for name in _SETS if name in described}
        known = dataclasses.replace(known, **said)
        unknown = sorted(set(known.sequence) - set(self.names))
        if unknown:
            raise DatabaseError(f"{self.stem} has no measurements of {', '.join(unknown)}")
        return known

    def file(self, samples: int, tp: int, algo: int) -> str:
        """The name of the file of operators for these degrees."""
        return f"{self.stem}_mbs{samples}_tp{tp}_algo{algo}.csv"

    def row(self, name: str, samples: int, tp: int, algo: int) -> tuple[float, ...]:
        """An operator's row in the order of `COLUMNS`.

        Between two measured numbers of samples values lie on a straight line.

        Raises:
            MissingRow: if it was not measured, nor any to both sides of `samples`, or failed.
        """
        sizes = [size for size in self.micro_batch_sizes if (size, tp, algo) in self._operators]
        if samples in sizes:
            low = high = samples
        else:
            below = [size for size in sizes if size < samples]
            above = [size for size in sizes if size > samples]
            if not below or not above:
                raise MissingRow(
                    f"{self.folder}: no {self.file(samples, tp, algo)}, for row {name}"
                )
            low, high = below[-1], above[0]
        rows = [self._operators[size, tp, algo][name] for size in (low, high)]
        for size, row in zip((low, high), rows):
            if max(row[0], row[1]) >= FAILED_US:
                raise MissingRow(
                    f"{self.folder}/{self.file(size, tp, algo)}: row {name} says that the "
                    "operator failed"
                )
        if low == high:
            return rows[0]
        share = (samples - low) / (high - low)
        return tuple(one + share * (other - one) for one, other in zip(*rows))

    def _collective_rows(self, collective: str, devices: int, nodes: int = 1) -> dict[str, float]:
        """The rows of a collective's file: milliseconds by the text of the size.

        Raises:
            MissingRow: if there is no such file.
        """
        across = f"_{nodes}nodes" if nodes > 1 else ""
        path = self.folder / f"prim_{self.stem}_{collective}_{devices}gpus{across}.csv"
        if not path.exists():
            raise MissingRow(
                f"{self.folder}: no {path.name}, for {collective} of {devices} devices on "
                f"{nodes} machine{'s' if nodes > 1 else ''}"
            )
        rows: dict[str, float] = {}
        for line, row in enumerate(_rows(path)[1:], start=2):
            if len(row) != 2:
                raise DatabaseError(f"{path}, line {line}: {len(row)} cells, not 2")
            _number(path, line, row[0])
            rows[row[0]] = _number(path, line, row[1])
        return rows

    def _collective(self, collective: str, devices: int, nodes: int = 1) -> Curve:
        """Milliseconds of a collective by MB; measurements that failed are left out.

        Raises:
            MissingRow: if there is no such file, or all in it failed.
        """
        rows = self.collective_rows(collective, devices, nodes)
        points = [(float(size), time) for size, time in rows.items() if time < FAILED_MS]
        if not points:
            raise MissingRow(f"{self.folder}: all of {collective} of {devices} devices failed")
        return Curve(points)

    def _read_link(self, between_nodes: bool) -> tuple[list[tuple[float, float]], Curve | None]:
        """What `bandwidth` and `message_end` give."""
        path = self.folder / f"p2p_{'inter' if between_nodes else 'intra'}_node.csv"
        if not path.exists():
            raise MissingRow(f"{self.folder}: no {path.name}")
        sizes, speeds, *ends = _rows(path)
        if len(sizes) != len(speeds):
            raise DatabaseError(f"{path}: {len(sizes)} sizes, {len(speeds)} bandwidths")
        points = [
            (_number(path, 1, size), _number(path, 2, speed)) for size, speed in zip(sizes, speeds)
        ]
        if any(speed == 0 for _, speed in points):
            raise DatabaseError(f"{path}: a bandwidth of 0")
        if not ends:
            return points, None
        if len(ends[0]) != len(sizes):
            raise DatabaseError(f"{path}: {len(sizes)} sizes, {len(ends[0])} times of ends")
        times = [_number(path, 3, time) for time in ends[0]]
        pairs = zip((size for size, _ in points), times)
        return points, Curve([(0.0, 0.0), *(p for p in pairs if p[0] > 0)])

    def bandwidth(self, between_nodes: bool) -> list[tuple[float, float]]:
        """MB and GB/s of messages inside of a machine, or between two.

        Raises:
            MissingRow: if there is no such file.
        """
        return self._link(between_nodes)[0]

    def message(self, between_nodes: bool) -> Curve:
        """Milliseconds of a message by MB.

        Raises:
            MissingRow: if there is no such link in the database.
        """
        points = self.bandwidth(between_nodes)
        # Aceso's unit: 1 GB/s is 1 MB in a millisecond. A message of nothing takes no time, and
        # below the smallest size bandwidth is the smallest's.
        return Curve([(0.0, 0.0), *((size, size / speed) for size, speed in points if size > 0)])

    def message_end(self, between_nodes: bool) -> Curve | None:
        """Milliseconds of a core that a message takes of each end, by MB; None: not measured.

        Raises:
            MissingRow: if there is no such link in the database.
        """
        return self._link(between_nodes)[1]


_SETS = ("layer_starts", "never_recomputed")
_PLAIN = (
    "layouts",
    "shared_activations",
    "memory_main_params",
    "memory_optimizer",
    "optimizer_divides",
)
