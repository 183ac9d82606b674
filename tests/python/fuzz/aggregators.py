"""Subject: groups that use aggregators, against groups that do not, and sums in double precision.

Numbers are small and whole, of which all sums are exact, or of every magnitude: then the bits are
those that the same operation has from rank to rank.
"""

from __future__ import annotations

import atexit
import dataclasses
import math
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import fusedpg
import harness
from checks.aggregators import block_view, same_bits_but_which_nan, values
from fuzz.core import Choices, Pair, Tape, TapeChoices, done, draw_tape
from harness import Context

WHERE = ("processes", "threads")
EXAMPLES = 2
KEY = "00112233445566778899aabbccddeeff"
_processes: list[Any] = []
Op = dist.ReduceOp
# Of blocks; dense tensors have some more.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
DENSE = (*DTYPES, torch.uint8, torch.int16)
SIZES = (0, 1, 255, 257, 10_000, 70_001, 200_000, 600_003)
# Of tensors with coordinates: sizes, and how many of them have coordinates.
COORDINATES = [((50, 3), 1), ((7, 9, 4), 2), ((200,), 1), ((5, 300), 1), ((900, 64), 1)]
COORDINATES += [((3, 70_000), 1), ((2, 0), 1), ((40_000, 0), 1)]


@dataclasses.dataclass(frozen=True)
class Data:
    """What ranks have: each the same of all."""

    seed: int
    dtype: torch.dtype
    exact: bool
    block: int
    density: float
    overlap: str

    @property
    def wide(self) -> torch.dtype:
        return torch.float64 if self.dtype.is_floating_point else torch.int64

    def tensor(self, rank: int, size: int, numel: int, number: int) -> torch.Tensor:
        """Some blocks, and in floats now and then what is no number."""
        shared = torch.Generator().manual_seed(self.seed + number)
        draw = torch.Generator().manual_seed(7919 * (self.seed + number) + rank)
        blocks = -(-numel // self.block)
        owner = torch.randint(0, size, (blocks,), generator=shared)
        keep = torch.rand(blocks, generator=shared if self.overlap == "all" else draw)
        present = keep < self.density
        if self.overlap == "none":
            present &= owner == rank
        elif self.overlap == "one rank":
            present &= torch.tensor(rank == size - 1)
        t = torch.randint(-3, 4, (numel,), generator=draw).to(self.dtype)
        if not self.exact:
            t = values(rank, numel, self.dtype, self.seed + number)
        t[(~present).repeat_interleave(self.block)[:numel]] = 0
        if self.dtype.is_floating_point and numel and self.seed % 3 == 0:
            for value in (float("nan"), float("inf"), -float("inf"), -0.0):
                t[int(torch.randint(numel, (1,), generator=draw))] = value
        return t

    def coordinates(self, rank: int, sizes: tuple[int, ...], dims: int, count: int) -> torch.Tensor:
        """So many entries, some of which have equal coordinates."""
        draw = torch.Generator().manual_seed(100 * self.seed + rank)
        indices = [torch.randint(0, size, (count,), generator=draw) for size in sizes[:dims]]
        entries = self.tensor(rank, 1, count * math.prod(sizes[dims:]), 0)
        entries = entries.view(count, *sizes[dims:])
        return torch.sparse_coo_tensor(torch.stack(indices), entries, sizes)


class Call:
    """An operation under way, and what must come of it."""

    def __init__(
        self, context: Context, draw: TapeChoices, groups: list[Groups], idle: bool
    ) -> None:
        """`idle`: nothing else is under way."""
        which, size = draw.randrange(len(groups)), context.world_size
        self.group, self.plain = groups[which].group, groups[which].plain
        kind = draw.choice(["dense", "dense", "sparse", "sparse", "bitmap", "coordinates", "list"])
        data = Data(
            draw.getrandbits(24),
            draw.choice({"dense": DENSE, "coordinates": (*DTYPES, torch.uint8)}.get(kind, DTYPES)),
            draw.random() < 0.5,
            draw.choice([32, 100, 256, 4096, 65536]),
            draw.choice([0.0, 0.01, 0.1, 1.0]),
            draw.choice(["random", "all", "none", "one rank"]),
        )
        ops = [Op.SUM, Op.SUM, Op.AVG]
        if kind == "dense":
            ops += [Op.MIN, Op.MAX, Op.PRODUCT]
            ops += [] if data.dtype.is_floating_point else [Op.BAND, Op.BOR, Op.BXOR]
        op = draw.choice(ops)
        sizes = [draw.choice(SIZES) for _ in range(draw.randint(2, 4) if kind == "list" else 1)]
        asynchronous, offset, strided = draw.random() < 0.5, draw.randint(0, 5), False
        self.text = f"group {which} {kind} {sizes} {op} offset {offset} {data}"
        whole = [
            [data.tensor(rank, size, numel, n) for n, numel in enumerate(sizes)]
            for rank in range(size)
        ]
        if kind == "bitmap":
            looks, strided = draw.choice([(), (0,), (1, 2)]), draw.random() < 0.5
            maps = []
            for rank, (one,) in enumerate(whole):
                own = torch.Generator().manual_seed(data.seed + rank)
                maps.append(torch.rand(-(-len(one) // data.block), generator=own) < 0.5)
                if rank not in looks:
                    one[(~maps[rank]).repeat_interleave(data.block)[: len(one)]] = 0
        mine = whole[context.rank]
        if kind == "coordinates":
            shape, dims = draw.choice(COORDINATES)
            counts = [draw.choice([0, 1, 20] if data.exact else [0, 1, 40, 700]) for _ in whole]
            entries = [data.coordinates(r, shape, dims, n) for r, n in enumerate(counts)]
            mine = [entries[context.rank]]
            whole = [[one.to(data.wide).to_dense().reshape(-1)] for one in entries]
        self.want = self._in_one_process(op, whole, data) if data.exact else None
        self.more: dict[str, Any] = {}
        if kind in ("sparse", "bitmap"):
            self.more["block_size"] = data.block
        if kind == "bitmap" and context.rank not in looks:
            self.more["bitmap"] = maps[context.rank]
            absent = (~maps[context.rank]).repeat_interleave(data.block)[: sizes[0]]
            mine[0][absent] = float("nan") if data.dtype.is_floating_point else 5  # counts nowhere
        self.kind, self.op = kind, op
        self.tensors = [self._placed(t, offset, strided) for t in mine]
        self.alike = [t.clone() for t in self.tensors]
        self._begin(self.plain, self.alike, False)
        if idle:
            fusedpg.stats(self.group, reset=True)
        self.work = self._begin(self.group, self.tensors, asynchronous)
        if idle and not asynchronous and kind == "dense" and groups[which].always:
            small = self.tensors[0].nbytes * (size - 1) <= 128 << 10
            paths = fusedpg.stats(self.group)["all_reduce"]["paths"]
            assert paths.get("aggregated", 0) == (not small), (self.text, paths)
        if idle and not asynchronous and kind == "sparse":
            self._densities(data.block, [one for (one,) in whole], context.rank)

    def _placed(self, t: torch.Tensor, offset: int, strided: bool) -> torch.Tensor:
        """Somewhere in memory."""
        if t.is_sparse:
            return t
        if strided:
            return torch.stack([t, t], 1)[:, 0]
        memory = torch.empty(len(t) + offset, dtype=t.dtype)
        return memory[offset:].copy_(t)

    def _begin(self, group: Any, tensors: list[torch.Tensor], asynchronous: bool) -> Any:
        if self.kind == "list":
            return dist.all_reduce_coalesced(tensors, self.op, group, asynchronous)
        if self.kind in ("sparse", "bitmap"):
            return fusedpg.sparse_all_reduce(tensors[0], self.op, group, asynchronous, **self.more)
        return dist.all_reduce(tensors[0], self.op, group, asynchronous)

    @staticmethod
    def _in_one_process(
        op: Any, whole: list[list[torch.Tensor]], data: Data
    ) -> list[torch.Tensor] | None:
        """In double precision, where every order of additions is exact."""
        if op not in (Op.SUM, Op.MIN, Op.MAX):
            return None
        stacked = [torch.stack([part.to(data.wide) for part in parts]) for parts in zip(*whole)]
        join = {Op.SUM: torch.sum, Op.MIN: torch.amin, Op.MAX: torch.amax}[op]
        return [join(one, 0).to(data.dtype).to(data.wide) for one in stacked]

    def _densities(self, block: int, whole: list[torch.Tensor], rank: int) -> None:
        present = [(block_view(one, block) != 0).any(1) for one in whole]
        stats, blocks = fusedpg.stats(self.group)["sparse_all_reduce"], len(present[0])
        if blocks:
            assert stats["density"] == int(present[rank].sum()) / blocks, self.text
            assert stats["union_density"] == int(torch.stack(present).any(0).sum()) / blocks

    def check(self) -> None:
        if self.work is not None:
            self.work.wait()
        for number, (found, alike) in enumerate(zip(self.tensors, self.alike)):
            if found.is_sparse:
                assert found.is_coalesced() and torch.equal(found.indices(), alike.indices())
                assert same_bits_but_which_nan(found.values(), alike.values()), self.text
            else:
                assert same_bits_but_which_nan(found, alike), self.text
            if self.want is not None:
                want = self.want[number]
                dense = found.to(want.dtype).to_dense().reshape(-1)
                right = (dense == want) | (want.isnan() & dense.isnan())
                assert bool(right.all()), self.text
            if not found.is_sparse:
                found.fill_(7)  # it belongs to the program again


@dataclasses.dataclass
class Groups:
    """A group with aggregators, and one from rank to rank whose other options are the same."""

    group: Any
    plain: Any
    always: bool  # large dense tensors go by aggregators

    @classmethod
    def new(cls, draw: TapeChoices, places: str) -> Groups:
        chosen = options(draw, places)
        plain = fusedpg.Options(block_skip=chosen.block_skip)
        made = [dist.new_group(pg_options=one) for one in (chosen, plain)]
        return cls(*made, chosen.aggregate == "on" and chosen.block_skip == "off")


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
    groups = [Groups.new(draw, places) for _ in range(3)]
    flying: list[Call] = []
    while draw.left > 0:
        if draw.random() < 0.03:
            for call in flying:
                call.check()
            flying.clear()
            leave(groups.pop(draw.randrange(len(groups))))
            groups.append(Groups.new(draw, places))
        if pace.random() < 0.1:
            time.sleep(0.01 * pace.random())
        flying.append(Call(context, draw, groups, idle=not flying))
        yield done(flying[-1].text)
        while len(flying) > draw.randint(0, 4):
            flying.pop(draw.randrange(len(flying))).check()
    for call in flying:
        call.check()
    for both in groups:
        leave(both)


def leave(both: Groups) -> None:
    dist.destroy_process_group(both.group)
    dist.destroy_process_group(both.plain)
