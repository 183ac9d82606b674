"""Draws the plots again and writes the tables of the documents, from saved results alone.

    python benchmarks/report.py               # all of it (make figures)
    python benchmarks/report.py --shown       # those pictures that documents show
    python benchmarks/report.py benchmarks/results/ddp_p2.json    # that of these results only

Nothing is measured, and pictures need no built fusedpg. A table stands in a document of DOCUMENTS
between `<!-- table:NAME -->` and `<!-- /table -->`; NAME is one of the functions in TABLES below.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import _harness as harness
import _plots as plots
import _steps as steps
import _words as words
import between_hosts
import collectives as ops
import llm
import many_hosts as many
import serve_gloo
from _harness import (
    COPY,
    FIGURES,
    RESULTS,
    Row,
    find,
    format_size,
    load,
    markdown,
    ratio_to_peer,
)

ROOT = RESULTS.parent.parent
DOCUMENTS = (
    "README.md",
    "docs/guides/serve-llama.md",
    "docs/guides/tensor_parallel.md",
    "docs/evidence/benchmarks.md",
    "docs/guides/compression.md",
    "docs/guides/plan.md",
    "docs/guides/serve_gloo.md",
)
K, M = 1 << 10, 1 << 20
MLP = 100486440  # bytes of its parameters
SIZES = (4 * K, 64 * K, M, 16 * M, 100 * M)


def rows_of(name: str) -> list[Row]:
    rows: list[Row] = load(RESULTS / f"{name}.json")["rows"]
    return rows


def get(rows: Sequence[Row], case: str, size: int, arm: str) -> Row:
    row = find(rows, case, size, arm)
    assert row is not None, (case, size, arm)
    return row


# ---------------------------------------------------------------------------------------------
# Tables


def ms(row: Row) -> str:
    value = 1e3 * plots.typical(row)
    if value < 0.1:
        return f"{value:.4f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 20 else f"{value:.0f}"


def cell(row: Row | None, peer: Row | None, digits: int = 1) -> str:
    """Its time, and behind that of others than peer and copy how many times as fast they are."""
    if row is None or peer is None:
        return ""
    if row is peer or row.arm == COPY:
        return ms(row)
    return f"{ms(row)} ({ratio_to_peer(row, peer):.{digits}f}x)"


def cells(
    rows: Sequence[Row], case: str, size: int, arms: Iterable[str], peer: str, digits: int = 1
) -> list[str]:
    gloo = get(rows, case, size, peer)
    return [cell(get(rows, case, size, arm), gloo, digits) for arm in arms]


def all_reduce() -> str:
    rows = rows_of("collectives_p2")
    arms = ("fused arena", "fused ordinary", "deepspeed", "gloo")
    head = ["size", *map(words.arm, arms), "copy of the same bytes"]
    lines = (
        [format_size(size), *cells(rows, "all_reduce", size, (*arms, COPY), "gloo")]
        for size in SIZES
    )
    return markdown(head, lines)


def collectives(world_size: int) -> str:
    rows = rows_of(f"collectives_p{world_size}")

    def ratios(op: str, size: int) -> str:
        gloo = get(rows, op, size, "gloo")
        arms = (get(rows, op, size, arm) for arm in ("fused arena", "fused ordinary"))
        return " / ".join(f"{ratio_to_peer(arm, gloo):.1f}" for arm in arms)

    ops = dict.fromkeys(row.case for row in rows)
    head = ["", *map(format_size, SIZES)]
    return markdown(head, ([f"`{op}`", *(ratios(op, size) for size in SIZES)] for op in ops))


def fused_step() -> str:
    arms = (steps.GLOO, steps.UNFUSED, steps.FUSED, COPY)
    lines = (
        [str(p), format_size(size), *cells(rows, steps.ADAMW, size, arms, steps.GLOO)]
        for p in (2, 4)
        for rows in [rows_of(f"fused_step_p{p}")]
        for size in SIZES[1:]
    )
    head = ["ranks", "parameters", "Gloo `all_reduce` + `AdamW(fused=True)`"]
    head += ["the same on `fused`", "`fused_adamw_`", "copy of the same bytes"]
    return markdown(head, lines)


def by_case(rows: Sequence[Row], peer: str) -> str:
    """Arms down, cases across."""
    rows = [row for row in rows if not row.arm.startswith(words.BEST)]
    cases = list(dict.fromkeys((row.case, row.size) for row in rows))

    def of(case: tuple[str, int], arm: str) -> str:
        return cell(find(rows, *case, arm), find(rows, *case, peer), 2)

    arms = dict.fromkeys(row.arm for row in rows)
    head = ["ms", *(words.case(case) for case, _ in cases)]
    return markdown(head, ([words.arm(arm), *(of(case, arm) for case in cases)] for arm in arms))


def training() -> str:
    models = ("mlp", "transformer", "cnn")
    return by_case([row for row in rows_of("optimizers_p2") if row.case in models], "a")


def malloc() -> str:
    rows = [r for r in rows_of("optimizers_malloc_p2") if not r.arm.startswith(words.BEST)]
    gloo = get(rows, rows[0].case, rows[0].size, "a")

    def line(row: Row) -> list[str]:
        faults, cpu = row.more["faults"], 1e3 * row.more["cpu"]
        return [words.arm(row.arm), cell(row, gloo, 2), f"{faults:.0f}", f"{cpu:.0f}"]

    head = [words.case(rows[0].case), "ms", "page faults", "ms of CPU"]
    return markdown(head, map(line, rows))


def many_parameters() -> str:
    return by_case(rows_of("optimizers_small_p2"), "a")


def memory() -> str:
    rows = rows_of("optimizers_memory_p2")
    lines = ([words.arm(row.arm), f"{row.median / M:.0f}"] for row in rows)
    return markdown(["MLP, 25 M parameters", "MiB a rank"], lines)


def one_step() -> str:
    tables = [rows_of("optimizers_p2"), rows_of("optimizers_step_p4")]

    def line(row: Row, peer: str) -> list[str]:
        found = ([find(rows, row.case, row.size, a) for a in (row.arm, peer)] for rows in tables)
        return [words.arm(row.arm), *(cell(*both) for both in found)]

    return markdown(
        ["ms", "2 ranks", "4 ranks"],
        (
            line(row, peer)
            for case, peer in {steps.ADAMW: steps.GLOO, steps.LAMB: steps.LAMB_GLOO}.items()
            for row in tables[0]
            if row.case == case and (row.arm != COPY or case == steps.ADAMW)
        ),
    )


def asynchronous() -> str:
    rows, sizes = rows_of("async_op_p2"), SIZES[:4]
    ways = {"sync": "synchronous", "async": "`async_op=True` and `wait()`"}
    ways["functional"] = "functional collective"
    lines = (
        [title, case, *(cells(rows, case, size, [way], f"gloo {way}")[0] for size in sizes)]
        for way, title in ways.items()
        for case in ("arena", "ordinary")
    )
    return markdown(["", "tensors", *map(format_size, sizes)], lines)


def hosts(name: str) -> str:
    """Between hosts: what goes over the wire takes Gloo, us, and the link at its rate."""
    rows = rows_of(name)

    def line(case: str, size: int) -> list[str]:
        peer = next(
            r for r in rows
            if (r.case, r.size) == (case, size) and r.arm in ("gloo", steps.GLOO)
        )  # fmt: skip
        ours = get(rows, case, size, "fused" if peer.arm == "gloo" else steps.FUSED)
        link = find(rows, case, size, between_hosts.LINK)
        arena = find(rows, case, size, ops.ARENA)
        return [
            words.case(case), format_size(size), ms(peer), cell(ours, peer),
            *([cell(arena, peer)] if arenas else []),
            "" if link is None else f"{ours.median / link.median:.2f}x",
        ]  # fmt: skip

    arenas = any(row.arm == ops.ARENA for row in rows)
    cases = dict.fromkeys((row.case, row.size) for row in rows)
    head = ["ms", "size", "Gloo, with torch's optimizer", "fused"]
    head += [*(["in the arena"] if arenas else []), "of the link's time"]
    return markdown(head, (line(*case) for case in cases))


def compressed() -> str:
    """Training with compressed gradients, rate by rate."""
    rows = rows_of("compress_p2")
    lines = (
        [words.case(row.case), words.arm(row.arm), f"{1 / row.median:.2f}",
         f"{ratio_to_peer(row, get(rows, row.case, row.size, 'gloo')):.2f}x",
         f"{row.more['sent'] * 1e-6:.1f}" if row.more["sent"] else "", row.more["choice"]]
        for row in rows
    )  # fmt: skip
    return markdown(["", "", "steps/s", "Gloo's", "MB a host sends", "chosen"], lines)


def compression_kernels() -> str:
    """Beside a plain read and write of as many bytes."""
    rows = rows_of("compress_kernels_p1")
    pairs = ((r, get(rows, r.case, r.size, COPY)) for r in rows if r.arm == "kernel")
    lines = ([f"`{r.case}`", ms(r), ms(c), f"{c.median / r.median:.2f}"] for r, c in pairs)
    return markdown(["100 MB", "ms", "read and write", "of its rate"], lines)


def compression_accuracy() -> str:
    """What training by each compressor comes to."""
    fast, slow, lm = (
        {row.arm: row for row in rows_of(f"compress_accuracy_{task}_p2")}
        for task in ("cnn", "cnn_slow", "lm")
    )

    def figures(row: Any, scale: float, digits: int) -> str:
        found = [] if row is None else row.more["accuracy"]
        return ", ".join(f"{scale * x:.{digits}f}" for x in found)

    head = ["by seed", "CNN, % right", "CNN, smaller steps", "language model, bits a character"]
    return markdown(
        head,
        (
            [name, figures(row, 100, 0), figures(slow.get(name), 100, 0),
             figures(lm.get(name), 1, 2)]
            for name, row in fast.items()
        ),
    )  # fmt: skip


# Whose bars are those of which results.
BARS = (
    ("collectives", "collectives_p2 collectives_p4"),
    ("fused_step", "fused_step_p2 fused_step_p4"),
    ("ddp", "ddp_p2"),
    ("optimizers", "optimizers_p2 optimizers_small_p2"),
    ("_apart", "optimizers_malloc_p2"),
    ("optimizers", "optimizers_step_p1 optimizers_step_p4"),
    ("async_op", "async_op_p2"),
    ("sparse", "sparse_p2 sparse_hosts_1gbit_p2"),
    ("new_group", "new_group_p2 new_group_p4 new_group_p8"),
    ("many_hosts", "many_hosts_p64 many_hosts_p128"),
    ("between_hosts", "between_hosts_2x1_p2 between_hosts_2x2_p4"),
    ("data_parallel", "data_parallel_p2"),
    ("model_parallel", "model_parallel_p2"),
    ("pipeline_parallel", "pipeline_parallel_p4"),
    ("llm", "llm_p2"),
    ("compress", "compress_p2"),
    ("compress_kernels", "compress_kernels_p1"),
)


def missed() -> str:
    """Targets that the saved results do not meet."""
    bars: dict[str, Sequence[harness.Bar]] = {}
    for benchmark, names in BARS:
        module = importlib.import_module(benchmark)
        found = module.bars if hasattr(module, "bars") else module.BARS
        bars |= dict.fromkeys(names.split(), found() if callable(found) else found)
    judged = []
    for name, promised in bars.items():
        report = load(RESULTS / f"{name}.json")
        judged += harness.judged(report["rows"], promised, report["world_size"])
    lines = []
    for bar, wanted, measured, good in judged:
        if not good:
            ranks = f"{bar.world_size} rank" + ("s" if bar.world_size > 1 else "")
            what = f"{words.case(bar.case)}, {format_size(bar.size)}, {ranks}"
            against = f"{words.arm(bar.arm)}, against {words.arm(bar.peer)}"
            lines.append([what, against, wanted, measured])
    table = markdown(["", "", "wanted", "measured"], lines)
    met = len(judged) - len(lines)
    return f"{met} of {len(judged)} targets are met; these are not:\n\n{table}"


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
    mlp = words.case("mlp")
    arms = ("a", "d", "f")  # Gloo, nothing but the backend, ours
    # Each with its rows, case, size, and those arms.
    table: dict[str, tuple[Sequence[Row], str, int, tuple[str, ...]]] = {
        f"{mlp}; glibc's defaults": (mallocs, "mlp", MLP, arms),
        f"{mlp}; memory kept": (training, "mlp", MLP, arms),
        "transformer, 10 M parameters; memory kept": (training, "transformer", 38373416, arms),
        "CNN, bound by its arithmetic; memory kept": (training, "cnn", 454952, arms),
        "decoding one token, 8 layers of width 1,024": (
            rows_of("llm_p2"), "decode", 4 * llm.WIDTH,
            ("DTensor on gloo", "DTensor on fused", llm.OURS),
        ),
    }  # fmt: skip
    ours = "`fusedpg.optim.AdamW`; for decoding `fusedpg.tensor_parallel`"
    text = markdown(
        ["ms", "Gloo", "`fused`, nothing else changed", ours],
        ([name, *cells(*one, one[-1][0], 2)] for name, one in table.items()),
    )
    kept = [ms(get(mallocs, "mlp", MLP, arm)) for arm in ("a, kept", "f, kept")]
    return (
        f"{text}\n\nThe first row is of another day, on which Gloo took {kept[0]} ms and fusedpg "
        f"{kept[1]} with memory kept: compare within a row."
    )


def serve_llama() -> str:
    rows = rows_of("llm_p2")
    cases = {
        f"{what}, {dtype}": (case, count * llm.WIDTH * size)
        for case, count, what in (("decode", 1, "one token"), ("prefill", 256, "256 tokens"))
        for dtype, size in (("float32", 4), ("bfloat16", 2))
    }
    arms = dict.fromkeys(row.arm for row in rows if row.case == "decode")
    return markdown(
        ["ms", *cases],
        ([words.arm(arm), *(ms(get(rows, *x, arm)) for x in cases.values())] for arm in arms),
    )


def single_layers() -> str:
    rows = rows_of("llm_p2")
    columns = {
        f"{count} token{'s' * (count > 1)}, {dtype}": count * llm.WIDTH * size
        for dtype, size in (("float32", 4), ("bfloat16", 2))
        for count in llm.TOKENS
    }

    def line(kind: str, arm: str) -> list[str]:
        both = (
            [get(rows, kind, size, a).median for a in (arm, llm.PLAIN)] for size in columns.values()
        )
        return [kind if arm == llm.OURS else f"{kind}: {arm}", *(f"{a / b:.2f}" for a, b in both)]

    return markdown(
        ["", *columns], (line(kind, arm) for kind in llm.KINDS for arm in (llm.OURS, llm.AGAIN))
    )


def served_steps() -> str:
    rows = rows_of("serve_gloo_steps_p2")
    lines = []
    for program in dict.fromkeys(row.case for row in rows):
        gloo, served = (1e3 * get(rows, program, 0, arm).median for arm in ("gloo", "served"))
        lines.append([program, f"{gloo:.1f} ms", f"{served:.1f} ms", f"{gloo / served:.2f}"])
    return markdown(["a step of", "Gloo", "served", "times"], lines)


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
    "served": lambda: serve_gloo.summary(serve_gloo.load(RESULTS / "served/programs.json")),
    "served_steps": served_steps,
    "serve_llama": serve_llama,
    "single_layers": single_layers,
}
SHOWN = re.compile(rf"/{FIGURES.relative_to(ROOT).as_posix()}/([\w/]+\.png)\)")
TABLE = re.compile(r"(<!-- table:(\w+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def rewritten(text: str) -> str:
    """A document with the tables of the saved results."""
    return TABLE.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[3]}", text)


# ---------------------------------------------------------------------------------------------
# Pictures


def pictures_of(path: Path) -> dict[str, plots.Draw]:
    """Those of saved results, by the stem of their files."""
    report = load(path)
    if report["unit"] != "seconds":
        return {}
    return plots.pictures(path.stem, path.stem, report["rows"], report["world_size"])


def pictures() -> dict[str, plots.Draw]:
    """All, by their files' names in build/figures."""
    found: dict[str, plots.Draw] = {}
    for path in sorted(RESULTS.glob("*.json")):
        found |= pictures_of(path)
    for path in sorted((RESULTS / "loss").glob("*.json")):
        rows = json.loads(path.read_text())["rows"]
        found[f"{path.stem}_loss"] = partial(plots.draw_curves, rows)
    for path in sorted((RESULTS / "aggregators").glob("*.json")):
        found[f"aggregators/{path.stem}"] = plots.of_aggregators(path)
    for path in sorted((RESULTS / "plans").glob("*.json")):
        title = f"A GPT of 25 M parameters on 4 ranks, {path.stem.replace('_', ' ')}"
        found[f"plans/{path.stem}"] = partial(
            plots.draw_plans, json.loads(path.read_text())["rows"], title
        )
    return {f"{name}.png": draw for name, draw in found.items()}


def shown() -> list[str]:
    """The pictures that documents show, by their files' names."""
    texts = (path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    return list(dict.fromkeys(name for text in texts for name in SHOWN.findall(text)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="*", type=Path, help="JSON files; default: all")
    parser.add_argument("--shown", action="store_true", help="pictures of documents; no tables")
    args = parser.parse_args()
    if args.results:
        found = {f"{n}.png": d for path in args.results for n, d in pictures_of(path).items()}
    else:
        found = pictures()
    if args.shown:
        found = {name: found[name] for name in shown()}
    for name, draw in found.items():
        plots.save(FIGURES / name, draw)
    if not args.results and not args.shown:
        for name in DOCUMENTS:
            path = ROOT / name
            path.write_text(rewritten(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
