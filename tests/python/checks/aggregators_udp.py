"""Jobs of fusedpg.aggregation by UDP."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedpg
from checks.aggregators import bits, values
from fusedpg.aggregation import Config, Context
from harness import Context as Rank

FLOATS = "cpu_exponent_quantizer"


def config(places: str, **more: Any) -> Config:
    return Config(**{
        "backend": "udp", "aggregators": places, "packet_numel": 256, "prepostprocessor": FLOATS,
        **more,
    })  # fmt: skip


def sums(context: Rank, places: str, more: dict[str, Any], sizes: list[int]) -> dict[str, int]:
    """Floats have the bits of quantized_all_reduce, integers those of all_reduce. Returns the
    counters of all threads together."""
    chosen = config(places, **more)
    with Context(chosen) as jobs:
        todo, want = [], []
        for k, numel in enumerate(sizes):
            for dtype in (torch.float32, torch.int32):
                mine = values(context.rank, numel, dtype, k)
                right = mine.clone()
                if dtype == torch.float32:
                    fusedpg.quantized_all_reduce(right, chosen.packet_numel)
                else:
                    dist.all_reduce(right)
                want.append(right)
                apart = k % 2 == 0
                output = torch.empty_like(mine) if apart else None
                todo.append((jobs.all_reduce_async(mine, output), mine.clone() if apart else None))
        for (job, given), right in zip(todo, want):
            assert bits(job.wait()) == bits(right), (context.rank, job.id)
            assert given is None or bits(job.input) == bits(given)
        stats = jobs.stats()
        assert sum(stats.bytes_sent) == sum(c["bytes_sent"] for c in stats.counters)
        names = stats.counters[0]
        return {name: sum(c[name] for c in stats.counters) for name in names}


def refuses(context: Rank, more: dict[str, Any], text: str) -> None:
    """All ranks raise."""
    with pytest.raises((RuntimeError, ValueError)) as caught:
        Context(Config(**more)).start()
    assert text in str(caught.value), caught.value


def other_types(context: Rank, places: str) -> None:
    for dtype, more in ((torch.float64, {}), (torch.float32, {"prepostprocessor": "bypass"})):
        with Context(config(places, **more)) as jobs:
            job = jobs.all_reduce_async(torch.ones(3, dtype=dtype))
            with pytest.raises(RuntimeError, match="takes int32"):
                job.wait()


def leave(context: Rank) -> None:
    dist.destroy_process_group()


def until_it_fails(context: Rank, places: str, go: str) -> tuple[float, str]:
    """When and how a job failed. All sums were right."""
    size = dist.get_world_size()
    with Context(config(places)) as jobs:
        for number in range(10**6):
            t = torch.full((20_000,), float(dist.get_rank() + 1))
            try:
                jobs.all_reduce(t)
            except RuntimeError as error:
                return time.time(), str(error)
            assert torch.equal(t, torch.full_like(t, size * (size + 1) / 2)), number
            if number == 3 and dist.get_rank() == 0:
                Path(go).touch()
    raise AssertionError


def fails_by_itself(context: Rank, places: str) -> tuple[float, str]:
    """Rank 1 raises inside of its context."""
    dist.barrier()
    began = time.time()
    try:
        with Context(config(places)) as jobs:
            jobs.all_reduce(torch.ones(10))
            if dist.get_rank() == 1:
                raise KeyError("its own")
            jobs.all_reduce(torch.ones(10))
    except (RuntimeError, KeyError) as error:
        return time.time() - began, str(error)
    raise AssertionError


_started: list[Context] = []


def start(context: Rank, places: str) -> None:
    _started.append(Context(config(places)).start())


def one_more_and_stop(context: Rank) -> None:
    jobs = _started.pop()
    t = jobs.all_reduce(torch.full((1000,), float(context.rank)))
    assert torch.equal(t, torch.full_like(t, 3.0))
    jobs.stop()
