"""``fusedpg.stats`` and ``fusedpg.group_info`` as text that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch.distributed as dist

from fusedpg._types import Stats

_COUNTERS = {
    "calls": "Finished calls by operation and by the way of their data.",
    "bytes_sent": "Bytes from this rank to its peers, through shared memory or a wire.",
    "bytes_received": "Bytes from its peers to this rank, through shared memory or a wire.",
    "messages_sent": "Messages of this rank between hosts.",
}
_GAUGES = {
    "arena_used_bytes": ("arena_used", "Bytes of tensors in this rank's arena."),
    "arena_reserved_bytes": ("arena_reserved", "Address space of this rank's arena."),
    "sequence_number": ("sequence_number", "Operations of the group so far."),
}


def _line(name: str, labels: Mapping[str, object], value: object) -> str:
    def quoted(text: str) -> str:
        return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    inside = ",".join(f'{key}="{quoted(str(text))}"' for key, text in labels.items())
    return f"fusedpg_{name}{{{inside}}} {value}"


def _lines(where: dict[str, object], info: Mapping[str, object], stats: Stats) -> Iterator[str]:
    yield "# TYPE fusedpg_group info"
    yield "# HELP fusedpg_group What connects the ranks of the group."
    about = {"engine": info["engine"], "transport": info.get("transport", ""), "isa": info["isa"]}
    yield _line("group_info", where | about, 1)
    yield "# TYPE fusedpg_failed gauge"
    yield "# HELP fusedpg_failed 1 once the group has failed."
    yield _line("failed", where, int(info["state"] == "failed"))
    for name, (key, help_text) in _GAUGES.items():
        yield f"# TYPE fusedpg_{name} gauge"
        yield f"# HELP fusedpg_{name} {help_text}"
        yield _line(name, where, info[key])
    yield "# TYPE fusedpg_waited_seconds counter"
    yield "# UNIT fusedpg_waited_seconds seconds"
    yield "# HELP fusedpg_waited_seconds For how long collectives of this rank waited for a peer."
    for peer, seconds in stats["waited"].items():
        yield _line("waited_seconds_total", where | {"peer": peer}, f"{seconds:.9f}")
    operations = {op: counts for op, counts in stats.items() if op != "waited"}
    for name, help_text in _COUNTERS.items():
        yield f"# TYPE fusedpg_{name} counter"
        yield f"# HELP fusedpg_{name} {help_text}"
        for op, counts in operations.items():
            if name == "calls":
                for path, calls in counts["paths"].items():
                    yield _line("calls_total", where | {"op": op, "path": path}, calls)
            else:
                yield _line(f"{name}_total", where | {"op": op}, counts[name])
    yield "# EOF"


def openmetrics(group: dist.ProcessGroup | None = None) -> str:
    """This rank's counters of a group as OpenMetrics text, for a file or an HTTP answer.

    Names begin with ``fusedpg_``; labels are ``group``, ``rank``, and of counters ``op``, ``path``
    and ``peer``. Local: never a collective.

    Args:
        group: a group of the fused backend; default: the default group.

    Returns:
        The text, which ends with ``# EOF`` and a newline.
    """
    from fusedpg import functional

    chosen = dist.distributed_c10d._get_default_group() if group is None else group
    where = {"group": chosen.group_name, "rank": chosen.rank()}
    info, stats = functional.group_info(chosen), functional.stats(chosen)
    return "\n".join(_lines(where, info, stats)) + "\n"
