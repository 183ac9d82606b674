"""Subject: groups that use aggregators, against sums in double precision."""

from __future__ import annotations

import atexit
import dataclasses
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import fusedpg
import harness
from fuzz.core import Choices, Pair, Tape, TapeChoices, done, draw_tape
from harness import Context

WHERE = ("processes", "threads")
EXAMPLES = 2
KEY = "00112233445566778899aabbccddeeff"
_processes: list[Any] = []
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64)
SIZES = (0, 1, 255, 257, 10_000, 70_001, 200_000, 600_003)


def tensor(
    seed: int, rank: int, numel: int, dtype: torch.dtype, density: float, block: int
) -> torch.Tensor:
    """Small whole numbers, whose sums have no rounding, in some blocks; and of floats now and then
    what is no number."""
    draw = torch.Generator().manual_seed(7919 * seed + rank)
    t = torch.randint(-3, 4, (numel,), generator=draw).to(dtype)
    blocks = -(-numel // block)
    absent = torch.rand(blocks, generator=draw) >= density
    t[absent.repeat_interleave(block)[:numel]] = 0
    if dtype.is_floating_point and numel and seed % 3 == 0:
        for value in (float("nan"), float("inf"), -float("inf"), -0.0):
            t[int(torch.randint(numel, (1,), generator=draw))] = value
    return t


class Call:
    """An operation under way, and what must come of it."""

    def __init__(self, context: Context, draw: TapeChoices, groups: list[Any]) -> None:
        seed, which = draw.getrandbits(24), draw.randrange(len(groups))
        self.text = f"seed {seed} group {which}"
        group = groups[which]
        dtype, block = draw.choice(DTYPES), draw.choice([32, 256, 1000, 65536])
        density = draw.choice([0.0, 0.01, 0.1, 1.0])
        kind = draw.choice(["dense", "dense", "sparse", "sparse", "bitmap", "coordinates", "list"])
        sizes = [draw.choice(SIZES) for _ in range(draw.randint(2, 4) if kind == "list" else 1)]
        op = draw.choice([dist.ReduceOp.SUM, dist.ReduceOp.SUM, dist.ReduceOp.MAX])
        asynchronous = draw.random() < 0.5
        if kind != "dense":
            op = dist.ReduceOp.SUM
        self.text += f" {kind} {sizes} {dtype} {op} block {block} density {density}"
        whole = [
            [tensor(seed + n, rank, numel, dtype, density, block) for n, numel in enumerate(sizes)]
            for rank in range(context.world_size)
        ]
        bitmap = None
        if kind == "bitmap":
            maps = []
            for rank, (one,) in enumerate(whole):
                own = torch.Generator().manual_seed(seed + rank)
                maps.append(torch.rand(-(-len(one) // block), generator=own) < 0.5)
                one[(~maps[rank]).repeat_interleave(block)[: len(one)]] = 0
            bitmap = maps[context.rank]
        wide = torch.float64 if dtype.is_floating_point else torch.int64
        self.want = [
            stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.sum(0)
            for parts in zip(*whole)
            for stacked in [torch.stack([part.to(wide) for part in parts])]
        ]
        self.tensors = whole[context.rank]
        if bitmap is not None:
            absent = (~bitmap).repeat_interleave(block)[: sizes[0]]
            self.tensors[0][absent] = context.rank + 1  # which does not count
        if kind == "coordinates":
            self.tensors = [
                self.tensors[0].unflatten(0, (-1, 1)).to_sparse(1)
                if sizes[0] % 2
                else self.tensors[0].to_sparse()
            ]
        if kind == "list":
            self.work = dist.all_reduce_coalesced(self.tensors, op, group, asynchronous)
        elif kind in ("sparse", "bitmap"):
            self.work = fusedpg.sparse_all_reduce(
                self.tensors[0], op, group, asynchronous, block_size=block, bitmap=bitmap
            )
        else:
            self.work = dist.all_reduce(self.tensors[0], op, group, asynchronous)

    def check(self) -> None:
        if self.work is not None:
            self.work.wait()
        for found, want in zip(self.tensors, self.want):
            dense = found.to_dense().view(-1) if found.is_sparse else found
            right = (dense.to(want.dtype) == want) | (want.isnan() & dense.isnan())
            assert bool(right.all()), self.text
            if not found.is_sparse:
                found.fill_(7)  # it belongs to the program again


def options(draw: TapeChoices, places: str) -> fusedpg.Options:
    some = places.split(",")[: draw.randint(1, 2)]
    return fusedpg.Options(
        aggregators=",".join(some),
        aggregate=draw.choice(["on", "auto"]),
        aggregate_rates=draw.choice(["", "1,10", "1,1", "10,1"]),
        block_skip=draw.choice(["off", "on", "auto"]),
        aggregate_message_bytes=draw.choice([0, 4096, 100_000, 248 << 10]),
    )


def workers(where: str) -> harness.Workers:
    from test_aggregators import Aggregator, on_hosts  # it starts processes, and knows how

    if not _processes:
        _processes.extend([Aggregator(), Aggregator()])
        for one in _processes:
            atexit.register(one.close)
    places = ",".join(one.place for one in _processes)
    return harness.pool(3, env=on_hosts(3, PLACES=places), oracle=False, one_host=False)


@dataclasses.dataclass(frozen=True)
class Program:
    """Where the aggregators are, and the choices of what is done with them."""

    where: str
    tape: Tape


def draw(choose: Choices, where: str) -> Program:
    return Program(where, draw_tape(choose, 500, 1000))


def run(program: Program, context: Context) -> Iterator[Pair]:
    if program.where == "processes":
        yield from calls(context, os.environ["PLACES"], program.tape)
        return
    from fusedpg.aggregator import Aggregator

    server = Aggregator(key=KEY) if context.rank < 2 else None
    both: list[Any] = [None] * context.world_size
    dist.all_gather_object(both, server.place if server else None)
    yield from calls(context, f"{both[0]},{both[1]}", program.tape)
    dist.barrier()
    if server is not None:
        server.close()


def calls(context: Context, places: str, tape: Tape) -> Iterator[Pair]:
    """The same of all ranks, at a pace of their own."""
    draw, pace = tape.choices(), random.Random(context.rank)
    groups = [dist.new_group(pg_options=options(draw, places)) for _ in range(3)]
    flying: list[Call] = []
    while draw.left > 0:
        if draw.random() < 0.03:
            for call in flying:
                call.check()
            flying.clear()
            dist.destroy_process_group(groups.pop(draw.randrange(len(groups))))
            groups.append(dist.new_group(pg_options=options(draw, places)))
        if pace.random() < 0.1:
            time.sleep(0.01 * pace.random())
        flying.append(Call(context, draw, groups))
        yield done(flying[-1].text)
        while len(flying) > draw.randint(0, 4):
            flying.pop(draw.randrange(len(flying))).check()
    for call in flying:
        call.check()
    for group in groups:
        dist.destroy_process_group(group)
