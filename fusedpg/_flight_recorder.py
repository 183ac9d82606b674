"""fusedpg's operations in the dumps of torch's flight recorder.

torch's recorder cannot be written to from outside of its library, so csrc/c10d/flight_recorder.hpp
keeps the operations, and ``torch._C._distributed_c10d._dump_fr_trace`` is replaced by a function
that adds them. ``python -m torch.distributed.flight_recorder.fr_trace`` reads what it writes.
"""

from __future__ import annotations

import functools
import json
import pickle
from typing import Any

# Operations that torch's analyser does not know, by one that it knows and that has, as they have,
# tensors of the same sizes on all ranks.
_LIKE_ALL_REDUCE = "all_reduce"
_OTHERS = {"share_memory": "barrier"}
_KNOWN = {
    "broadcast",
    "reduce",
    "all_gather",
    "_all_gather_base",
    "all_reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "send",
    "recv",
}
# The same for lists of tensors.
_COALESCED = {
    "all_reduce": "allreduce_coalesced",
    "all_gather": "ALLGATHER_coalesced",
    "_all_gather_base": "ALLGATHER_coalesced",
    "reduce_scatter": "REDUCE_SCATTER_coalesced",
    "_reduce_scatter_base": "REDUCE_SCATTER_coalesced",
}
# The analyser reads operations of the libraries that it has a list of.
_PREFIX = "gloo:"


def _joined(sizes: list[list[int]], dtypes: list[str], ranks: int) -> tuple[object, object]:
    """A list with one tensor a rank as Gloo's dumps have it: one tensor with a dimension more."""
    if len(sizes) == ranks and all(size == sizes[0] for size in sizes):
        return [[ranks, *sizes[0]]], dtypes[:1]
    return sizes, dtypes


def _messages(found: dict[str, Any], group: tuple[str, str, list[int]]) -> tuple[str, list[int]]:
    """The name and the ranks of a group for all messages from one rank to another.

    The analyser expects all ranks of a group in each operation of it, and numbers in order.
    """
    me, peer, ranks = found["rank"], found["peer"], group[2]
    source, target = (me, peer) if found["title"].endswith("send") else (peer, me)
    return f"{group[0]} from {source} to {target}", sorted((ranks[source], ranks[target]))


def _entry(found: dict[str, Any], group: tuple[str, str, list[int]], pg_id: int) -> dict[str, Any]:
    """One operation in the format of torch's dumps."""
    name, description, ranks = group
    operation = found["title"].partition(":")[2]
    inputs, input_dtypes = found["input_sizes"], found["input_dtypes"]
    outputs, output_dtypes = found["output_sizes"], found["output_dtypes"]
    kind = _OTHERS.get(operation, operation)
    if kind not in _KNOWN and kind != "barrier":
        kind, outputs, output_dtypes = _LIKE_ALL_REDUCE, inputs, input_dtypes
    if kind == "all_gather" and len(inputs) == 1:
        outputs, output_dtypes = _joined(outputs, output_dtypes, len(ranks))
    elif kind == "reduce_scatter" and len(outputs) == 1:
        inputs, input_dtypes = _joined(inputs, input_dtypes, len(ranks))
    elif kind in _COALESCED and max(len(inputs), len(outputs)) > 1:
        kind = _COALESCED[kind]
    me, peer = found["rank"], found["peer"]
    p2p = peer is not None
    if p2p:
        name = _messages(found, group)[0]
        place = sorted((group[2][me], group[2][peer])).index  # among the two
        arrow = "->" if kind == "send" else "<-"
        kind = f"{kind} {place(group[2][me])}{arrow}{place(group[2][peer])}"
    started, completed = found["started_ns"] or None, found["completed_ns"] or None
    return {
        "pg_id": pg_id,
        "process_group": (name, description),
        "collective_seq_id": found["sequence"],
        "p2p_seq_id": found["sequence"] if p2p else 0,
        "op_id": found["sequence"],
        "profiling_name": _PREFIX + kind,
        "operation": operation,  # a field of ours
        "time_created_ns": found["created_ns"],
        "input_sizes": inputs,
        "input_dtypes": input_dtypes,
        "output_sizes": outputs,
        "output_dtypes": output_dtypes,
        "state": "completed" if completed else "started" if started else "scheduled",
        "time_discovered_started_ns": started,
        "time_discovered_completed_ns": completed,
        "retired": found["ended"],
        "timeout_ms": found["timeout_ms"],
        "is_p2p": p2p,
        "frames": [],
    }


def _add(dump: dict[str, Any], collectives: bool, active: bool) -> dict[str, Any]:
    """A dump of torch's with our operations."""
    from fusedpg._registration import loaded_extension

    module = loaded_extension()
    if module is None:
        return dump
    found, groups = module._flight_recorder_dump()
    if not groups:
        return dump
    # A name for no group, which Gloo's part writes (torch 2.13).
    config = {key: value for key, value in dump.get("pg_config", {}).items() if key}
    status = dict(dump.get("pg_status", {}))
    theirs = list(dump.get("entries", []))
    first = 1 + max([-1, *map(int, status), *(entry["pg_id"] for entry in theirs)])
    for number, (name, description, ranks) in groups.items():
        config[name] = {"name": name, "desc": description, "ranks": str(list(ranks))}
        mine = [e for e in found if e["group"] == number and e["peer"] is None]
        last = {
            "last_enqueued_collective": [e["sequence"] for e in mine],
            "last_started_collective": [e["sequence"] for e in mine if e["started_ns"]],
            "last_completed_collective": [e["sequence"] for e in mine if e["completed_ns"]],
        }
        status[str(first + number)] = {key: max(of, default=-1) for key, of in last.items()}
    for entry in found:
        if entry["peer"] is not None:
            group = groups[entry["group"]]
            name, ranks = _messages(entry, group)
            config[name] = {"name": name, "desc": group[1], "ranks": str(ranks)}
    result = {**dump, "pg_config": config, "pg_status": status}
    if collectives:
        ours = [
            _entry(entry, groups[entry["group"]], first + entry["group"])
            for entry in found
            if not (active and entry["ended"])
        ]
        entries = sorted(theirs + ours, key=lambda entry: entry["time_created_ns"])
        result["entries"] = [{**entry, "record_id": i} for i, entry in enumerate(entries)]
    return result


def install() -> None:
    """Has torch's dumps contain our operations; more than once does no harm."""
    from torch._C import _distributed_c10d

    c10d: Any = _distributed_c10d
    dump = getattr(c10d, "_dump_fr_trace", None)
    if dump is None or hasattr(dump, "fusedpg"):
        return
    in_json = c10d._dump_fr_trace_json

    @functools.wraps(dump)
    def with_ours(
        includeCollectives: bool | None = None,
        includeStackTraces: bool | None = None,
        onlyActive: bool | None = None,
    ) -> bytes:
        theirs = pickle.loads(dump(includeCollectives, includeStackTraces, onlyActive))
        return pickle.dumps(_add(theirs, includeCollectives is not False, bool(onlyActive)))

    @functools.wraps(in_json)
    def with_ours_in_json(
        includeCollectives: bool | None = None, onlyActive: bool | None = None
    ) -> bytes:
        theirs = json.loads(in_json(includeCollectives, onlyActive))
        ours = _add(theirs, includeCollectives is not False, bool(onlyActive))
        for entry in ours.get("entries", []):
            entry.pop("frames", None)
            for key in ("time_discovered_started_ns", "time_discovered_completed_ns"):
                entry[key] = entry[key] or 0
        return json.dumps(ours).encode()

    with_ours.fusedpg = True  # type: ignore[attr-defined]
    c10d._dump_fr_trace = with_ours
    c10d._dump_fr_trace_json = with_ours_in_json
