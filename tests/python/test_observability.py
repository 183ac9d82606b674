"""The counters of a group as OpenMetrics text."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

import fusedpg
from harness import Context, on_ranks

pytestmark = pytest.mark.fused_only

LINE = re.compile(r'(fusedpg_\w+)\{((?:\w+="(?:[^"\\]|\\.)*",?)*)\} (\d+)')
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], int]:
    lines = text.split("\n")
    assert lines[-2:] == ["# EOF", ""]
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families))
    result = {}
    for line in lines[:-2]:
        if line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        assert match, line
        key = (match[1], frozenset(LABEL.findall(match[2])))
        assert key not in result, line
        assert match[1].removesuffix("_total").removesuffix("_info") in families
        result[key] = int(match[3])
    return result


@on_ranks(2, 3)
def test_openmetrics(context: Context) -> None:
    group = dist.new_group(group_desc="by hand")
    dist.all_reduce(torch.ones(1000), group=group)
    fusedpg.sparse_all_reduce(torch.zeros(100_000), group=group)
    stats, info = fusedpg.stats(group), fusedpg.group_info(group)
    found = samples(fusedpg.openmetrics(group))
    where = {"group": group.group_name, "rank": str(context.rank)}

    def value(name: str, **labels: str) -> int:
        return found[f"fusedpg_{name}", frozenset((where | labels).items())]

    assert set(stats) == {"all_reduce", "sparse_all_reduce"}
    for op, counts in stats.items():
        assert sum(counts["paths"].values()) == counts["calls"] == 1
        for path, calls in counts["paths"].items():
            assert value("calls_total", op=op, path=path) == calls
        for name in ("bytes_sent", "bytes_received", "messages_sent"):
            assert value(f"{name}_total", op=op) == counts[name]
    assert stats["all_reduce"]["bytes_sent"] >= 4000
    assert value("sequence_number") == info["sequence_number"] > 0
    assert value("arena_reserved_bytes") == info["arena_reserved"] > 0
    assert value("failed") == 0
    assert value("group_info", engine="shm", transport="", isa=info["isa"]) == 1
    assert fusedpg.openmetrics() != fusedpg.openmetrics(group)
    dist.destroy_process_group(group)


def test_labels_are_escaped() -> None:
    from fusedpg import _metrics

    line = _metrics._line("x", {"group": 'a"b\\c\nd'}, 3)
    assert line == 'fusedpg_x{group="a\\"b\\\\c\\nd"} 3'
