"""Small databases for the tests of plans: random numbers in the profiler's format."""

from __future__ import annotations

import json
import random
from pathlib import Path

from fusedpg.plan.database import COLUMNS, Database

ACESO = Path(__file__).with_name("data") / "aceso"
COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")


def write_rows(path: Path, *rows: list[object]) -> None:
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))


def write_toy(
    folder: Path,
    seed: int,
    ops: int = 4,
    samples: tuple[int, ...] = (1, 2, 4),
    degrees: tuple[int, ...] = (1, 2, 4),
    algos: int = 1,
    inter_node: bool = False,
) -> Database:
    """A database of a model of `ops` operators, each of a kind of its own."""
    random_ = random.Random(seed)
    names = [f"op{i}" for i in range(ops)]
    base = {
        name: {
            "time": 10 ** random_.uniform(2, 4),
            "size": random_.choice([1, 2, 4, 8]),
            "weights": random_.choice([0, 10, 50, 100]),
            "activations": random_.choice([0, 20, 40, 100]),
        }
        for name in names
    }
    for mbs in samples:
        for tp in degrees:
            for algo in range(algos):
                rows = []
                for name in names:
                    one = base[name]
                    time = one["time"] * mbs**0.9 / tp ** random_.uniform(0.4, 1)
                    sizes = [one["size"] * mbs] * 2
                    per_device = [one["weights"] / tp, one["activations"] * mbs / tp]
                    reserved = [random_.choice([0, 5, 10]) * mbs for _ in range(2)]
                    backward = time * random_.uniform(1.5, 2.5)
                    row = [time, backward, *sizes, *per_device, *reserved, one["weights"] / tp]
                    row += [1.0, 0.0, 0.0]
                    rows.append([name, *(round(value, 3) for value in row)])
                path = folder / f"toy_s_mbs{mbs}_tp{tp}_algo{algo}.csv"
                write_rows(path, ["op_name", *COLUMNS], *rows)
    for collective in COLLECTIVES:
        for devices in (2, 3, 4):
            speed = random_.uniform(5, 20)
            times = [[size, 0.05 + size / speed] for size in (1, 8, 64, 512)]
            write_rows(
                folder / f"prim_toy_s_{collective}_{devices}gpus.csv",
                ["data_size(MB)", "time(ms)"],
                *times,
            )
    write_rows(folder / "p2p_intra_node.csv", [1, 8, 64], [5, 8, 10])
    if inter_node:
        write_rows(folder / "p2p_inter_node.csv", [1, 8, 64], [0.5, 0.8, 1])
    kinds = ["replicated", "hidden", "heads"]
    described = {
        "operators": names,
        "layouts": {name: [random_.choices(kinds, k=2) for _ in range(algos)] for name in names},
        "overlap": 0.5,
        "memory_main_params": 0,
        "memory_optimizer": 2,
        "model": {"num_layers": ops},
    }
    (folder / "model_toy_s.json").write_text(json.dumps(described))
    return Database(folder, "toy", "s")
