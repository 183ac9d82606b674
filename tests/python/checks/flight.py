"""Operations for torch's flight recorder, and what goes wrong at their end."""

from __future__ import annotations

import datetime
import json
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fusedpg
from harness import Context


def _dump(**arguments: bool) -> dict[str, Any]:
    from torch._C import _distributed_c10d as c10d

    return pickle.loads(c10d._dump_fr_trace(**arguments))  # type: ignore[no-any-return]


def _operations(rank: int) -> None:
    pair = [torch.ones(2), torch.ones(2)]
    dist.all_reduce(torch.ones(4, 2, dtype=torch.float16))
    dist.all_reduce(torch.ones(3), async_op=True).wait()
    dist.all_gather(pair, torch.ones(2))
    dist.all_gather_into_tensor(torch.ones(4), torch.ones(2))
    dist.reduce_scatter(torch.ones(2), pair)
    dist.broadcast(torch.ones(3), 0)
    dist.all_to_all_single(torch.ones(4), torch.ones(4))
    dist.gather(torch.ones(2), pair if rank == 0 else None)
    dist.barrier()
    part = fusedpg.shard_range(10, 2, rank)[1]
    state = [torch.zeros(part), torch.zeros(part)]
    params, grads, steps = [torch.ones(10)], [torch.ones(10)], [torch.zeros(())]
    hyper = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8}
    fusedpg.fused_adamw_(params, grads, state[:1], state[1:], [], steps, **hyper)
    # In one order on rank 0, in the other on rank 1; the last one of whom it comes.
    for _ in range(2):
        works = [dist.isend(torch.ones(5), 1 - rank), dist.irecv(torch.ones(5), 1 - rank)]
        for work in works:
            assert work is not None
            work.wait()
    if rank == 0:
        dist.send(torch.ones(7), 1)
    else:
        dist.recv(torch.ones(7))


FAULTS: dict[str, Callable[[int], Any]] = {
    "none": lambda rank: None,
    "operations": lambda rank: (
        dist.all_reduce(torch.ones(4)) if rank == 0 else dist.broadcast(torch.ones(4), 0)
    ),
    "sizes": lambda rank: dist.all_reduce(torch.ones(4 + rank)),
    "absent": lambda rank: dist.all_reduce(torch.ones(4)) if rank == 0 else time.sleep(1.5),
}


def run(context: Context, fault: str, served: bool, folder: str) -> dict[str, Any]:
    """All kinds of operations, a fault, and this rank's dump in the folder; returns it."""
    fusedpg.serve_gloo(served)
    dist.init_process_group(
        "gloo" if served else "fused",
        store=dist.PrefixStore(Path(folder).name, context.store),
        rank=context.rank,
        world_size=context.world_size,
        timeout=datetime.timedelta(seconds=1 if fault == "absent" else 20),
    )
    try:
        _operations(context.rank)
        named = dist.new_group([0, 1], group_desc="a description")
        dist.all_reduce(torch.ones(1), group=named)
        error = ""
        try:
            FAULTS[fault](context.rank)
        except (RuntimeError, ValueError) as raised:
            error = str(raised)
        assert bool(error) == (fault != "none" and (fault, context.rank) != ("absent", 1)), error
        dump = _dump()
        Path(folder, f"rank_{context.rank}").write_bytes(pickle.dumps(dump))
        return dump
    finally:
        dist.destroy_process_group()
        fusedpg.serve_gloo(False)


def arguments(context: Context) -> None:
    """What the dumps' arguments leave out, and the same as JSON."""
    from torch._C import _distributed_c10d as c10d

    assert "entries" not in _dump(includeCollectives=False)
    active = _dump(onlyActive=True).get("entries", [])
    # What Gloo has done stays "scheduled" in torch's recorder.
    assert not [e for e in active if "operation" in e and e["retired"]]
    dist.all_reduce(torch.ones(3))
    last = json.loads(c10d._dump_fr_trace_json())["entries"][-1]
    assert (last["profiling_name"], last["input_sizes"]) == ("gloo:all_reduce", [[3]])
    assert last["state"] == "completed"
    assert "frames" not in last
