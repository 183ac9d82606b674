"""Draws the plots again and writes the tables of the documents, from saved results alone.

    python benchmarks/report.py                                   # all of it (make figures)
    python benchmarks/report.py benchmarks/results/ddp_p2.json    # this plot only

Nothing is measured. A table stands in a document of DOCUMENTS between `<!-- table:NAME -->` and
`<!-- /table -->`; NAME is one of the functions in TABLES below.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import _harness as harness
import _plots as plots
import _words as words
import between_hosts
import compress
import compress_accuracy
import compress_kernels
import data_parallel
import fused_step as fused_steps
import many_hosts as many
import model_parallel
import pipeline_parallel
import scaling
import serve_gloo
import serve_gloo_steps
import sparse
from _apart import ApartRow
from _harness import COPY, RESULTS, Row, find, format_size, ratio_to_peer
from _sparse_arms import SparseRow
from collectives import ARENA

ROOT = RESULTS.parent.parent
DOCUMENTS = (
    "README.md",
    "docs/evidence/benchmarks.md",
    "docs/guides/compression.md",
    "docs/guides/plan.md",
    "docs/guides/serve_gloo.md",
)
K, M = 1 << 10, 1 << 20
SIZES = (4 * K, 64 * K, M, 16 * M, 100 * M)
Lines = Iterable[Sequence[str]]
# What a benchmark adds to Row, by a field of it.
ROWS: dict[str, Any] = {
    "density": SparseRow,
    "faults": ApartRow,
    "compression": compress.CompressRow,
    "accuracy": compress_accuracy.AccuracyRow,
    "received": pipeline_parallel.CrossingRow,
    "sent": between_hosts.HostsRow,
    "predicted": scaling.ScalingRow,
}


def load(path: Path) -> dict[str, Any]:
    """A saved report, with its rows as such."""
    report: dict[str, Any] = json.loads(path.read_text())
    report["rows"] = [
        next((kind for field, kind in ROWS.items() if field in r), Row)(**r) for r in report["rows"]
    ]
    return report


def rows_of(name: str) -> list[Row]:
    rows: list[Row] = load(RESULTS / f"{name}.json")["rows"]
    return rows


def get(rows: Sequence[Row], case: str, size: int, arm: str) -> Row:
    row = find(rows, case, size, arm)
    assert row is not None, (case, size, arm)
    return row


# ---------------------------------------------------------------------------------------------
# Tables


def markdown(head: Sequence[str], lines: Lines) -> str:
    table = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in table)


def ms(row: Row) -> str:
    value = 1e3 * plots.typical(row)
    if value < 0.1:
        return f"{value:.4f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 20 else f"{value:.0f}"


def with_ratio(row: Row, peer: Row) -> str:
    return f"{ms(row)} ({ratio_to_peer(row, peer):.1f}x)"


def all_reduce() -> str:
    rows = rows_of("collectives_p2")
    arms = ("fused arena", "fused ordinary", "deepspeed")

    def line(size: int) -> list[str]:
        gloo, copy = (get(rows, "all_reduce", size, arm) for arm in ("gloo", COPY))
        cells = [with_ratio(get(rows, "all_reduce", size, arm), gloo) for arm in arms]
        return [format_size(size), *cells, ms(gloo), ms(copy)]

    head = ["size", *(words.arm(arm) for arm in arms), "Gloo", "copy of the same bytes"]
    return markdown(head, map(line, SIZES))


def collectives(world_size: int) -> str:
    rows = rows_of(f"collectives_p{world_size}")

    def cell(op: str, size: int) -> str:
        gloo = get(rows, op, size, "gloo")
        return " / ".join(
            f"{ratio_to_peer(get(rows, op, size, arm), gloo):.1f}"
            for arm in ("fused arena", "fused ordinary")
        )

    ops = dict.fromkeys(row.case for row in rows)
    head = ["", *map(format_size, SIZES)]
    return markdown(head, ([f"`{op}`", *(cell(op, size) for size in SIZES)] for op in ops))


def fused_step() -> str:
    lines = []
    for world_size in (2, 4):
        rows = rows_of(f"fused_step_p{world_size}")
        for size in (64 * K, M, 16 * M, 100 * M):
            gloo, unfused, fused, copy = (
                get(rows, "adamw step", size, arm)
                for arm in (
                    "gloo all_reduce + AdamW", "fused all_reduce + AdamW", "fused_adamw_", COPY
                )
            )  # fmt: skip
            cells = [ms(gloo), with_ratio(unfused, gloo), with_ratio(fused, gloo), ms(copy)]
            lines.append([str(world_size), format_size(size), *cells])
    head = ["ranks", "parameters", "Gloo `all_reduce` + `AdamW(fused=True)`"]
    head += ["the same on `fused`", "`fused_adamw_`", "copy of the same bytes"]
    return markdown(head, lines)


def by_case(rows: Sequence[Row], peer: str) -> str:
    """Arms down, cases across."""
    rows = [row for row in rows if not row.arm.startswith(plots.REPEATED)]
    cases = list(dict.fromkeys((row.case, row.size) for row in rows))

    def cell(case: tuple[str, int], arm: str) -> str:
        row, gloo = (find(rows, *case, name) for name in (arm, peer))
        if row is None or gloo is None:
            return ""
        return ms(row) if row is gloo else f"{ms(row)} ({ratio_to_peer(row, gloo):.2f}x)"

    arms = dict.fromkeys(row.arm for row in rows)
    head = ["ms", *(words.case(case) for case, _ in cases)]
    return markdown(head, ([words.arm(arm), *(cell(case, arm) for case in cases)] for arm in arms))


def training() -> str:
    models = ("mlp", "transformer", "cnn")
    return by_case([row for row in rows_of("optimizers_p2") if row.case in models], "a")


def malloc() -> str:
    rows: Sequence[Any] = rows_of("optimizers_malloc_p2")
    rows = [row for row in rows if not row.arm.startswith(plots.REPEATED)]
    gloo = get(rows, rows[0].case, rows[0].size, "a")

    def line(row: ApartRow) -> list[str]:
        time = ms(row) if row is gloo else f"{ms(row)} ({ratio_to_peer(row, gloo):.2f}x)"
        return [words.arm(row.arm), time, f"{row.faults:.0f}", f"{1e3 * row.cpu:.0f}"]

    head = [words.case(rows[0].case), "ms", "page faults", "ms of CPU"]
    return markdown(head, map(line, rows))


def many_parameters() -> str:
    return by_case(rows_of("optimizers_small_p2"), "a")


def memory() -> str:
    rows = rows_of("optimizers_memory_p2")
    lines = ([words.arm(row.arm), f"{row.median / M:.0f}"] for row in rows)
    return markdown(["MLP, 25 M parameters", "MiB a rank"], lines)


def one_step() -> str:
    tables = {2: rows_of("optimizers_p2"), 4: rows_of("optimizers_step_p4")}
    arms = {"adamw step": "gloo all_reduce + AdamW", "lamb step": "gloo all_reduce + LAMB"}
    lines = []
    for case, peer in arms.items():
        for row in tables[2]:
            if row.case != case or (row.arm == COPY and case != "adamw step"):
                continue
            cells = []
            for rows in tables.values():
                same, gloo = (find(rows, case, row.size, arm) for arm in (row.arm, peer))
                assert gloo is not None
                cells.append("" if same is None else ms(same))
                if same is not None and same is not gloo and row.arm != COPY:
                    cells[-1] = with_ratio(same, gloo)
            lines.append([words.arm(row.arm), *cells])
    return markdown(["ms", *(f"{p} ranks" for p in tables)], lines)


def asynchronous() -> str:
    rows = rows_of("async_op_p2")
    ways = {"sync": "synchronous", "async": "`async_op=True` and `wait()`"}
    ways["functional"] = "functional collective"
    lines = []
    for way, title in ways.items():
        for case in ("arena", "ordinary"):
            cells = []
            for size in (4 * K, 64 * K, M, 16 * M):
                row, gloo = (get(rows, case, size, arm) for arm in (way, f"gloo {way}"))
                cells.append(with_ratio(row, gloo))
            lines.append([title, case, *cells])
    return markdown(["", "tensors", *map(format_size, (4 * K, 64 * K, M, 16 * M))], lines)


def hosts(name: str) -> str:
    """Between hosts: what goes over the wire takes Gloo, us, and the link at its rate."""
    rows = rows_of(name)

    def line(case: str, size: int) -> list[str]:
        peer = next(
            r for r in rows
            if (r.case, r.size) == (case, size) and r.arm in ("gloo", fused_steps.GLOO)
        )  # fmt: skip
        ours = get(rows, case, size, "fused" if peer.arm == "gloo" else fused_steps.FUSED)
        link = find(rows, case, size, between_hosts.LINK)
        arena = find(rows, case, size, ARENA)
        return [
            words.case(case), format_size(size), ms(peer), with_ratio(ours, peer),
            *(["" if arena is None else with_ratio(arena, peer)] if arenas else []),
            "" if link is None else f"{ours.median / link.median:.2f}x",
        ]  # fmt: skip

    arenas = any(row.arm == ARENA for row in rows)
    cases = dict.fromkeys((row.case, row.size) for row in rows)
    head = ["ms", "size", "Gloo, with torch's optimizer", "fused"]
    head += [*(["in the arena"] if arenas else []), "of the link's time"]
    return markdown(head, (line(*case) for case in cases))


def compressed() -> str:
    """Training with compressed gradients, rate by rate."""
    lines = []
    rows = rows_of("compress_p2")
    for row in rows:
        gloo = get(rows, row.case, row.size, "gloo")
        assert isinstance(row, compress.CompressRow)
        lines.append(
            [words.case(row.case), words.arm(row.arm), f"{1 / row.median:.2f}",
             f"{ratio_to_peer(row, gloo):.2f}x",
             f"{row.sent * 1e-6:.1f}" if row.sent else "", row.choice]
        )  # fmt: skip
    return markdown(["", "", "steps/s", "Gloo's", "MB a host sends", "chosen"], lines)


def compression_kernels() -> str:
    """Beside a plain read and write of as many bytes."""
    rows = rows_of("compress_kernels_p1")
    lines = []
    for row in rows:
        if row.arm == compress_kernels.KERNEL:
            plain = get(rows, row.case, row.size, COPY)
            lines.append([f"`{row.case}`", ms(row), ms(plain), f"{plain.median / row.median:.2f}"])
    return markdown(["100 MB", "ms", "read and write", "of its rate"], lines)


def compression_accuracy() -> str:
    """What training by each compressor comes to."""
    fast, slow, lm = (
        {row.arm: row for row in rows_of(f"compress_accuracy_{task}_p2")}
        for task in compress_accuracy.TASKS
    )

    def figures(row: Any, scale: float, digits: int) -> str:
        return "" if row is None else ", ".join(f"{scale * x:.{digits}f}" for x in row.accuracy)

    head = ["by seed", "CNN, % right", "CNN, smaller steps", "language model, bits a character"]
    return markdown(
        head,
        (
            [name, figures(row, 100, 0), figures(slow.get(name), 100, 0),
             figures(lm.get(name), 1, 2)]
            for name, row in fast.items()
        ),
    )  # fmt: skip


def missed() -> str:
    """Targets that the saved results do not meet."""
    steps = importlib.import_module("_step_arms").bars()
    bars = {
        "collectives_p2": importlib.import_module("collectives").BARS,
        "collectives_p4": importlib.import_module("collectives").BARS,
        "fused_step_p2": importlib.import_module("fused_step").BARS,
        "fused_step_p4": importlib.import_module("fused_step").BARS,
        "ddp_p2": importlib.import_module("ddp").bars(),
        "optimizers_p2": importlib.import_module("optimizers").bars(0),
        "optimizers_small_p2": importlib.import_module("optimizers").bars(0),
        "optimizers_malloc_p2": importlib.import_module("_apart").bars(),
        "optimizers_step_p1": steps,
        "optimizers_step_p4": steps,
        "async_op_p2": importlib.import_module("async_op").BARS,
        "tensor_parallel_p2": importlib.import_module("tensor_parallel").BARS,
        "sparse_p2": sparse.BARS,
        "sparse_hosts_1gbit_p2": sparse.BARS,
        **{f"new_group_p{p}": importlib.import_module("new_group").BARS for p in (2, 4, 8)},
        **{f"many_hosts_p{p}": many.BARS for p in (64, 128)},
        "between_hosts_2x1_p2": between_hosts.bars(),
        "between_hosts_2x2_p4": between_hosts.bars(),
        "data_parallel_p2": data_parallel.BARS,
        "model_parallel_p2": model_parallel.BARS,
        "pipeline_parallel_p4": pipeline_parallel.BARS,
        "compress_p2": compress.bars(),
        "compress_kernels_p1": compress_kernels.bars(100 * M),
    }
    lines = []
    met = 0
    for name, promised in bars.items():
        report = load(RESULTS / f"{name}.json")
        for bar in promised:
            row, peer = (find(report["rows"], bar.case, bar.size, a) for a in (bar.arm, bar.peer))
            if bar.world_size != report["world_size"] or row is None or peer is None:
                continue
            measured, good = harness.judge(bar, row, peer)
            met += good
            if not good:
                wanted = f">= {bar.at_least:g}x" if bar.at_least else f"<= {bar.at_most:g}x"
                ranks = f"{bar.world_size} rank" + ("s" if bar.world_size > 1 else "")
                what = f"{words.case(bar.case)}, {format_size(bar.size)}, {ranks}"
                against = f"{words.arm(bar.arm)}, against {words.arm(bar.peer)}"
                lines.append([what, against, wanted, f"{measured:.2f}x"])
    table = markdown(["", "", "wanted", "measured"], lines)
    return f"{met} of {met + len(lines)} targets are met; these are not:\n\n{table}"


def new_groups() -> str:
    lines = []
    for p in (2, 4, 8):
        ours, gloo = (get(rows_of(f"new_group_p{p}"), "new_group", 0, a) for a in ("fused", "gloo"))
        times = [f"{1e3 * t:.1f}" for t in (gloo.median, gloo.fast, ours.median)]
        lines.append([str(p), *times, f"{ours.median / gloo.median:.2f}x"])
    return markdown(["ranks", "Gloo", "Gloo's fast mode", "fused", "of Gloo's median time"], lines)


def many_hosts() -> str:
    lines = []
    for p in (64, 128):
        rows = rows_of(f"many_hosts_p{p}") + rows_of(f"many_hosts_descriptors_p{p}")
        for case in (many.CREATION, many.FIRST, many.LATER, many.UNUSED, many.USED):
            size = many.SIZE if "all_reduce" in case else 0
            found = [get(rows, case, size, arm).median for arm in ("gloo", "fused")]
            counts = case in (many.UNUSED, many.USED)
            cells = [f"{value:.0f}" if counts else f"{1e3 * value:.0f} ms" for value in found]
            lines.append([str(p), case, *cells])
    return markdown(["hosts", "", "Gloo", "fused"], lines)


def planned(hosts: int) -> str:
    saved = json.loads((RESULTS / "plans" / f"{hosts}_hosts.json").read_text())
    lines = []
    for row in saved["rows"]:
        line = [row["name"], f"{row['ms']:,.0f}", f"{row['speed']:.2f}", "", "", "", ""]
        if "mb" in row:
            line[3:] = [
                f"{row['predicted_ms']:,.0f}",
                f"{100 * (row['predicted_ms'] / row['ms'] - 1):+.1f}%",
                f"{row['mb']:,.0f}",
                f"{row['predicted_mb']:,.0f}",
            ]
        lines.append(line)
    return markdown(["plan", "ms", "speed", "predicted", "error", "MB", "predicted"], lines)


def readme() -> str:
    """The one table of the README: steps as people run them now, with unchanged code, with ours."""
    mallocs, training = rows_of("optimizers_malloc_p2"), rows_of("optimizers_p2")
    decoding = rows_of("model_parallel_p2")
    mlp = words.case("mlp")
    # Each with its rows, case, size, and arms: Gloo, nothing but the backend, ours.
    cases: dict[str, tuple[Sequence[Row], tuple[str, int], tuple[str, str, str]]] = {
        f"{mlp}; glibc's defaults": (mallocs, ("mlp", 100486440), ("a", "d", "f")),
        f"{mlp}; memory kept": (training, ("mlp", 100486440), ("a", "d", "f")),
        "transformer, 10 M parameters; memory kept": (
            training,
            ("transformer", 38373416),
            ("a", "d", "f"),
        ),
        "CNN, bound by its arithmetic; memory kept": (
            training,
            ("cnn", 454952),
            ("a", "d", "f"),
        ),
        "decoding one token, 8 layers of width 1,024": (
            decoding,
            ("decode", 4096),
            ("gloo DTensor", "fused DTensor", "fused styles"),
        ),
    }
    lines = []
    for name, (rows, case, (gloo, unchanged, ours)) in cases.items():
        peer = get(rows, *case, gloo)
        mine = [get(rows, *case, arm) if arm else None for arm in (unchanged, ours)]
        cells = [f"{ms(row)} ({ratio_to_peer(row, peer):.2f}x)" if row else "" for row in mine]
        lines.append([name, ms(peer), *cells])
    ours = "`fusedpg.optim.AdamW`; for decoding `fusedpg.tensor_parallel`"
    table = markdown(["ms", "Gloo", "`fused`, nothing else changed", ours], lines)
    kept = [ms(get(mallocs, "mlp", 100486440, arm)) for arm in ("a, kept", "f, kept")]
    return (
        f"{table}\n\nThe first row is of another day, on which Gloo took {kept[0]} ms and fusedpg "
        f"{kept[1]} with memory kept: compare within a row."
    )


TABLES: dict[str, Callable[[], str]] = {
    "readme": readme,
    "all_reduce": all_reduce,
    "collectives_p2": lambda: collectives(2),
    "collectives_p4": lambda: collectives(4),
    "fused_step": fused_step,
    "ddp": lambda: by_case(rows_of("ddp_p2"), "gloo"),
    "training": training,
    "many_parameters": many_parameters,
    "malloc": malloc,
    "memory": memory,
    "one_step": one_step,
    "asynchronous": asynchronous,
    "missed": missed,
    "compressed": compressed,
    "compression_kernels": compression_kernels,
    "compression_accuracy": compression_accuracy,
    "new_group": new_groups,
    "hosts_2x1": lambda: hosts("between_hosts_2x1_p2"),
    "hosts_2x2": lambda: hosts("between_hosts_2x2_p4"),
    "many_hosts": many_hosts,
    "planned_1": lambda: planned(1),
    "planned_2": lambda: planned(2),
    "served": lambda: serve_gloo.summary(serve_gloo.load(RESULTS / "served" / "two_ranks.json")),
    "served_steps": lambda: serve_gloo_steps.table(
        serve_gloo_steps.load(RESULTS / "served" / "steps.json")
    ),
    "tensor_parallel": lambda: by_case(rows_of("tensor_parallel_p2"), "gloo"),
}
TABLE = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def rewritten(text: str) -> str:
    """A document with the tables of the saved results."""
    return TABLE.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[3]}", text)


# ---------------------------------------------------------------------------------------------
# Plots


def draw(path: Path) -> None:
    report = load(path)
    if report["unit"] != "seconds":
        return
    name, rows, world_size = path.stem, report["rows"], report["world_size"]
    save = plots.save_plot
    if name.startswith("sparse"):
        save = sparse.save_plot
    elif name.startswith("between_hosts"):
        save = between_hosts.save_plot
    elif name.startswith("compress_p"):
        save = compress.save_plot
    elif name.startswith("scaling"):
        save = scaling.save_plot
    elif name.startswith("pipeline_parallel"):
        save = pipeline_parallel.save_plot
    elif name.startswith("optimizers"):
        save = plots.save_optimizers
    elif name.startswith("fused_step_hosts"):
        save = plots.save_step_densities
    save(path.with_suffix(".png"), rows, world_size)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="*", type=Path, help="JSON files; default: all")
    args = parser.parse_args()
    for path in args.results or sorted(RESULTS.glob("*.json")):
        draw(path.resolve())
    if not args.results:
        for name in DOCUMENTS:
            path = ROOT / name
            path.write_text(rewritten(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
