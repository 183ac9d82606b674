"""Time collectives on the processors of one machine, against its peers and a plain copy.

    python benchmarks/collectives.py --backends fused,gloo,deepspeed,mpi --plot
    python benchmarks/collectives.py --world-size 4 --ops all_reduce --sizes 4K,1M --check-bars

fp32. A size is what nccl-tests calls one: the buffer of an all_reduce or broadcast, the gathered
output of an all_gather, the whole input of a reduce_scatter or all_to_all, on each rank. Algorithm
bandwidth is size / time, bus bandwidth nccl-tests' multiple of it. `x gloo` is how many times as
fast as Gloo's fast mode, `/ copy` the time over that of a copy of `size` bytes by all ranks at
once. "Arena" tensors come from `fusedpg.empty`, "ordinary" ones from torch. Every result is checked
against exact sums before anything is timed. DeepSpeed and Open MPI (requirements/mpi.txt, called
through mpi4py on the tensor's memory) run where they are installed, and in the same processes as
everything else: with `mpi` these are started by mpirun. They do all_reduce only. How times are
taken: see `_harness.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

import _harness as harness
import _mpi
from _harness import COPY, Bar, Context, Row

Group = dist.ProcessGroup
Bind = Callable[[Tensor], Callable[[], object]]  # a tensor to the all_reduce of it
# A value of an element, by its place and the rank that holds it: integers, exact in fp32 sums.
PERIOD = 251


def pattern(numel: int, rank: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + numel).remainder_(PERIOD).add_(rank).float()


@dataclass(frozen=True)
class Op:
    """One collective: its buffers, its call, its exact result, its bus factor."""

    call: Callable[[Tensor, Tensor, Group], object]  # output, input; in-place ops use the output
    in_place: bool
    output_share: Callable[[int], int]  # by the world size: total elements / output's elements
    input_share: Callable[[int], int]
    expected: Callable[[int, int, int], Tensor]  # total elements, rank, world size
    bus_factor: Callable[[int], float]


def whole(world_size: int) -> int:
    return 1


def shard(world_size: int) -> int:
    return world_size


def hop_share(world_size: int) -> float:
    return (world_size - 1) / world_size


def sum_over_ranks(numel: int, world_size: int, start: int = 0) -> Tensor:
    own = pattern(numel, 0, start)
    return own.mul_(world_size).add_(world_size * (world_size - 1) // 2)


def expect_all_reduce(numel: int, rank: int, world_size: int) -> Tensor:
    return sum_over_ranks(numel, world_size)


def expect_reduce_scatter(numel: int, rank: int, world_size: int) -> Tensor:
    return sum_over_ranks(numel // world_size, world_size, rank * (numel // world_size))


def expect_all_gather(numel: int, rank: int, world_size: int) -> Tensor:
    return torch.cat([pattern(numel // world_size, peer) for peer in range(world_size)])


def expect_broadcast(numel: int, rank: int, world_size: int) -> Tensor:
    return pattern(numel, 0)


def expect_all_to_all(numel: int, rank: int, world_size: int) -> Tensor:
    part = numel // world_size
    return torch.cat([pattern(part, peer, rank * part) for peer in range(world_size)])


OPS = {
    "all_reduce": Op(
        lambda out, src, group: dist.all_reduce(out, group=group),
        True, whole, whole, expect_all_reduce, lambda p: 2 * hop_share(p),
    ),
    "all_gather": Op(
        lambda out, src, group: dist.all_gather_into_tensor(out, src, group=group),
        False, whole, shard, expect_all_gather, hop_share,
    ),
    "reduce_scatter": Op(
        lambda out, src, group: dist.reduce_scatter_tensor(out, src, group=group),
        False, shard, whole, expect_reduce_scatter, hop_share,
    ),
    "broadcast": Op(
        lambda out, src, group: dist.broadcast(out, src=0, group=group),
        True, whole, whole, expect_broadcast, lambda p: 1.0,
    ),
    "all_to_all": Op(
        lambda out, src, group: dist.all_to_all_single(out, src, group=group),
        False, whole, whole, expect_all_to_all, hop_share,
    ),
}  # fmt: skip

K, M = 1 << 10, 1 << 20
ARENA, ORDINARY, GLOO, DEEPSPEED = "fused arena", "fused ordinary", "gloo", "deepspeed"
MPI = "open mpi"


def all_reduce_bars(world_size: int, arm: str, peer: str, limits: dict[int, float]) -> list[Bar]:
    return [
        Bar(world_size, "all_reduce", arm, size, peer, at_least=limit)
        for size, limit in limits.items()
    ]


BARS = [
    *all_reduce_bars(2, ARENA, GLOO, {4 * K: 20, 64 * K: 20, M: 10, 16 * M: 9, 100 * M: 6.5}),
    Bar(2, "all_reduce", ARENA, 100 * M, COPY, at_most=0.75),
    *all_reduce_bars(2, ORDINARY, GLOO, {4 * K: 20, 64 * K: 20, M: 4, 16 * M: 4, 100 * M: 4}),
    Bar(2, "all_reduce", ORDINARY, 100 * M, COPY, at_most=1.35),
    *all_reduce_bars(
        2, ORDINARY, DEEPSPEED, {4 * K: 1, 64 * K: 1, M: 1, 16 * M: 1.4, 100 * M: 2.5}
    ),
    *(
        bar
        for arm in (ARENA, ORDINARY)
        for bar in all_reduce_bars(2, arm, MPI, {64 * K: 1, M: 1, 16 * M: 1, 100 * M: 1})
    ),
    *(
        bar
        for arm in (ARENA, ORDINARY)
        for bar in all_reduce_bars(
            4, arm, GLOO, {4 * K: 10, 64 * K: 10, M: 10, 16 * M: 4, 100 * M: 4}
        )
    ),
    *(
        Bar(world_size, op, arm, size, GLOO, at_least=1)
        for world_size in (2, 4)
        for op in ("all_gather", "reduce_scatter", "broadcast", "all_to_all")
        for arm in (ARENA, ORDINARY)
        for size in (4 * K, 64 * K, M, 16 * M, 100 * M)
    ),
]


def main() -> int:
    parser = harness.Parser(
        __doc__, backends="fused,gloo,deepspeed,mpi", sizes="4K,64K,1M,16M,100M", rounds=31
    )
    parser.names("--ops", OPS)
    parser.add_argument("--tensor", choices=("arena", "ordinary", "both"), default="both")
    args = parser.parse_args()
    cases = [(name, size) for name in args.ops for size in args.sizes]
    rows = harness.run(measure, args, cases, title=case_title)
    return harness.finish("collectives", rows, args, bars=BARS)


def measure(context: Context, args: argparse.Namespace, case: tuple[str, int]) -> list[Row]:
    (name, size), op = case, OPS[case[0]]
    numel = size // 4 // context.world_size * context.world_size
    arms: dict[str, Callable[[], object]] = {COPY: harness.copy_arm(size)}
    for backend, group in context.groups.items():
        for arena in kinds_of_tensor(backend, args.tensor):
            arm = {True: ARENA, False: ORDINARY}[arena] if backend == "fused" else backend
            arms[arm] = make_arm(op, numel, group, arena, context, f"{case_title(case)}, {arm}")
    if name == "all_reduce":
        for arm, bind in peers(context, "deepspeed" in args.backends).items():
            arms[arm] = make_peer_arm(bind, numel, context, arm)
    factor = op.bus_factor(context.world_size)
    return harness.measure(
        context, arms, case=name, size=size, rounds=args.rounds, bus_factor=factor
    )


def peers(context: Context, deepspeed: bool) -> dict[str, Bind]:
    """Libraries that are no backends of c10d."""
    found: dict[str, Bind] = {}
    call = harness.load_deepspeed(context.rank, context.world_size) if deepspeed else None
    if call is not None:
        found[DEEPSPEED] = lambda tensor: partial(call, tensor)
    if _mpi.is_rank():
        found[MPI] = _mpi.load()
    return found


def case_title(case: tuple[str, int]) -> str:
    return f"{case[0]} {harness.format_size(case[1])}"


def kinds_of_tensor(backend: str, tensor: str) -> list[bool]:
    if backend != "fused" or tensor == "ordinary":
        return [False]
    return [True] if tensor == "arena" else [True, False]


def make_arm(
    op: Op, numel: int, group: Group, arena: bool, context: Context, title: str
) -> Callable[[], object]:
    """Buffers of one arm and its call, after one call with a known result."""
    rank, world_size = context.rank, context.world_size
    output = allocate(numel // op.output_share(world_size), arena, group)
    source = output if op.in_place else allocate(numel // op.input_share(world_size), arena, group)
    source.copy_(pattern(source.numel(), rank))
    op.call(output, source, group)
    harness.require(torch.equal(output, op.expected(numel, rank, world_size)), f"wrong: {title}")
    # Zeros: sums stay finite however many calls are timed.
    output.zero_()
    source.zero_()
    return lambda: op.call(output, source, group)


def allocate(numel: int, arena: bool, group: Group) -> Tensor:
    if not arena:
        return torch.empty(numel)
    import fusedpg

    tensor = fusedpg.empty(numel, group=group)
    harness.require(fusedpg.in_arena(tensor, group=group), "fusedpg.empty is not in the arena")
    return tensor


def make_peer_arm(bind: Bind, numel: int, context: Context, name: str) -> Callable[[], object]:
    """An all_reduce of its own tensor, in place, that is none of c10d's."""
    tensor = pattern(numel, context.rank)
    call = bind(tensor)
    context.clock.barrier()
    call()
    expected = expect_all_reduce(numel, context.rank, context.world_size)
    harness.require(torch.equal(tensor, expected), f"wrong: all_reduce on {name}")
    tensor.zero_()
    return call


if __name__ == "__main__":
    sys.exit(main())
