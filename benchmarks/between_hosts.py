"""Time collectives, the fused step and training between hosts, against Gloo and the link.

    python benchmarks/between_hosts.py --check-bars
    python benchmarks/between_hosts.py --layouts 2x1 --rates 1gbit --parts all_reduce --sizes 16M

Hosts are network namespaces of this machine whose links have a rate (needs root, `ip` and `tc`;
exits with 2 where that cannot be): see tests/python/hosts.py. Each has cores of its own, where the
machine has one for each. A layout is hosts x ranks on each.
fp32, ordinary tensors. The parts: `all_reduce` by size, where ranks share a host also of tensors
from `fusedpg.empty` ("fused arena"); `adamw`, which is `fused_adamw_` beside
Gloo's all_reduce, a division and `AdamW(fused=True)`, on one flat buffer of parameters; `send`, a
tensor from the first rank to the last one and back by `dist.send` and `dist.recv`; `exchange`, one
each way at once between the same two by `dist.batch_isend_irecv`; `ddp` and `fsdp2`, training
steps of an MLP with 25 M parameters, whose script is the same on both backends.
Every result is checked before anything is timed. "link" is what the link needs for the
2 (H-1)/H N bytes that cross it at least, "link with headers" what they need as full packets of TCP,
less what the link lets through at once (no row where that is all). "plain sockets", between two
ranks from 16 MB on, send N bytes each way at once on two connections, and do nothing with them;
then a rank adds up N/2 bytes ("and the sum"), as an all-reduce has to. The bytes that a host has
sent, with all headers, come from its interface's counter. Beside DDP's steps stands how much of the
time the host's cores idle, by /proc/stat.
How times are taken: see `_harness.py`.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import _harness as harness
import _hosts as hosts
import _steps as steps
import collectives
from _harness import Bar, Context, Hosts, Row
from _training import Arm, fully_sharded, parameter_bytes, same_losses

K, M = 1 << 10, 1 << 20
LINK = "link"
WIRE = "link with headers"
FRAME, CARRIED = 1514, 1448  # bytes of a full packet, and of our data in it
SOCKETS = "plain sockets"
SOCKETS_AND_SUM = "plain sockets, and the sum"
ALONE = "no_sync"  # the same step without a collective
# Of DDP's step: with a hook that communicates nothing, and its parts beside backward.
NO_COMM, FORWARD, OPTIMIZER = "no_comm", "forward alone", "optimizer alone"
BOUND = "step's bound"  # what nobody's communication can beat, see bound_row()
COMPUTE = (ALONE, NO_COMM, FORWARD, OPTIMIZER)
UNLIMITED = "unlimited"
RATES = {UNLIMITED: None, "10gbit": 10e9, "1gbit": 1e9}  # bits a second
PARTS = ("all_reduce", "adamw", "send", "exchange", "ddp", "fsdp2")
SIZES = (4 * K, 64 * K, M, 16 * M, 100 * M)
ROUNDS = {UNLIMITED: 21, "10gbit": 11, "1gbit": 5}
MORE = 5  # times these up to 1 MB, where calls are short and vary
MORE_EXCHANGES = 3  # these vary too: both ways at once, or one after the other
TRAINED = "10gbit"  # the rate at which models are trained
CHECKED_STEPS = 5


def name_of(part: str, layout: str, rate: str) -> str:
    part = "adamw step" if part == "adamw" else part
    return f"{part}, {layout.replace('x', ' x ')}, {rate}"


def all_reduce_bar(world_size: int, rate: str, size: int, peer: str, **limit: float) -> Bar:
    name = name_of("all_reduce", f"2x{world_size // 2}", rate)
    return Bar(world_size, name, "fused", size, peer, **limit)


def step_bar(world_size: int, rate: str, at_least: float) -> Bar:
    name = name_of("adamw", f"2x{world_size // 2}", rate)
    return Bar(
        world_size, name, steps.FUSED, 100 * M, steps.GLOO, at_least=at_least
    )  # fmt: skip


def bars() -> list[Bar]:
    size = parameter_bytes("mlp")
    return [
        *(all_reduce_bar(2, UNLIMITED, s * K, "gloo", at_least=4) for s in (4, 64)),
        *(all_reduce_bar(2, UNLIMITED, s * M, "gloo", at_least=2) for s in (1, 16)),
        all_reduce_bar(2, UNLIMITED, 100 * M, "gloo", at_least=1.2),
        all_reduce_bar(2, "10gbit", 100 * M, LINK, at_most=1.08),
        all_reduce_bar(2, "1gbit", 100 * M, LINK, at_most=1.03),
        all_reduce_bar(4, "1gbit", 100 * M, "gloo", at_least=1.4),
        *(all_reduce_bar(4, UNLIMITED, s, "gloo", at_least=1.8) for s in SIZES),
        *(step_bar(2, *one) for one in ((UNLIMITED, 1.7), ("10gbit", 1.4), ("1gbit", 1.03))),
        *(step_bar(4, *one) for one in ((UNLIMITED, 1.7), ("10gbit", 1.4), ("1gbit", 1.4))),
        *(
            Bar(4, name_of(part, "2x2", TRAINED), "fused", size, "gloo", at_least=1.3)
            for part in ("ddp", "fsdp2")
        ),
    ]


Case = tuple[str, int]  # a part and a size


def cases(args: argparse.Namespace) -> list[Case]:
    found: list[Case] = []
    for part in args.parts:
        if part in ("ddp", "fsdp2"):
            found += [(part, parameter_bytes("mlp"))] if args.rate == TRAINED else []
            continue
        # Small ones are a matter of latency, which no rate changes.
        least = M if part == "adamw" or args.rate != UNLIMITED else 0
        found += [(part, size) for size in args.sizes if size >= least]
    return found


def main() -> int:
    sizes = ",".join(str(size) for size in SIZES)
    parser = harness.Parser(__doc__, sizes=sizes, rounds=0)
    parser.add_argument("--layouts", default="2x1,2x2", help="hosts x ranks on each")
    parser.names("--rates", RATES, help="of each host's link")
    parser.names("--parts", PARTS)
    args = parser.parse_args()
    for layout in args.layouts.split(","):
        count, ranks = map(int, layout.split("x"))
        rows: list[Row] = []
        for rate in args.rates:
            args.layout, args.rate = layout, rate  # for ranks
            where = Hosts(count, ranks, None if rate == UNLIMITED else rate)
            title = collectives.case_title
            rows += harness.run(measure, args, cases(args), title=title, hosts=where)
        args.world_size = count * ranks
        print_bytes(rows, count)
        harness.finish(f"between_hosts_{layout}", rows, args, limit=LINK, bars=bars())
    return 0


# ---------------------------------------------------------------------------------------------
# On a rank


def measure(context: Context, args: argparse.Namespace, case: Case) -> list[Row]:
    (part, size), layout, rate = case, args.layout, args.rate
    count = int(layout.split("x")[0])
    name = name_of(part, layout, rate)
    if part == "all_reduce":
        arms = all_reduce_arms(size, context, name)
    elif part == "adamw":
        arms = steps.checked(context, size, (steps.FUSED, steps.GLOO))
    elif part == "send":
        arms = send_arms(size, context)
    elif part == "exchange":
        arms = exchange_arms(size, context)
    else:
        arms = training_arms(part, context)
    more = MORE if size <= M else MORE_EXCHANGES if part == "exchange" else 1
    rounds = args.rounds or ROUNDS[rate] * more
    rows = harness.measure(context, arms, case=name, size=size, rounds=rounds)
    sent = {arm: hosts.bytes_sent(context, call) for arm, call in arms.items()}
    for row in rows:
        row.more["sent"] = sent[row.arm]  # over host 0's link, with headers
        if part == "ddp":  # the share of the time in which host 0's cores have nothing to do
            row.more["idle"] = hosts.idle_share(context, arms[row.arm])
    bits = RATES[rate]
    if bits is not None and part not in ("send", "exchange"):
        crossing = 2 * (count - 1) / count * size
        rows.append(link_row(name, size, crossing, 8 / bits))
        burst = hosts.link(rate)["burst"]
        if (packets := crossing * FRAME / CARRIED) > burst:
            rows.append(link_row(name, size, packets, 8 / bits, WIRE, burst))
    if part == "ddp":
        rows.append(bound_row(rows))
    return rows


def link_row(
    name: str, size: int, sent: float, per_byte: float, arm: str = LINK, burst: float = 0
) -> Row:
    time = max(0.0, sent - burst) * per_byte
    return Row.of(name, size, arm, [time], more={"sent": sent})


def bound_row(rows: Sequence[Row]) -> Row:
    """DDP communicates during backward: before it are no gradients, and the optimizer needs all."""
    step, forward, optimizer, link = (
        next(row for row in rows if row.arm == arm) for arm in (NO_COMM, FORWARD, OPTIMIZER, WIRE)
    )
    around = forward.median + optimizer.median
    time = around + max(step.median - around, link.median)
    return Row.of(link.case, link.size, BOUND, [time], more={"sent": link.more["sent"]})


def all_reduce_arms(size: int, context: Context, name: str) -> dict[str, Callable[[], object]]:
    op = collectives.OPS["all_reduce"]
    numel = size // 4 // context.world_size * context.world_size

    def arm(backend: str, arena: bool) -> Callable[[], object]:
        group = context.groups[backend]
        return collectives.make_arm(op, numel, group, arena, context, f"{name}, {backend}")

    arms = {backend: arm(backend, False) for backend in context.groups}
    if shares_hosts(context):
        arms[collectives.ARENA] = arm("fused", True)
    if context.world_size == 2 and size >= 16 * M:
        sockets = PlainSockets(context.rank, size)
        arms |= {SOCKETS: sockets.exchange, SOCKETS_AND_SUM: sockets.exchange_and_add}
    return arms


class PlainSockets:
    """What an all-reduce of two ranks sends: N bytes each way, on a connection each."""

    def __init__(self, rank: int, size: int) -> None:
        store, key = dist.distributed_c10d._get_default_store(), f"plain sockets of {size} bytes"
        address = os.environ["MASTER_ADDR"]  # rank 0's
        if rank == 0:
            with socket.create_server((address, 0)) as server:
                store.set(key, str(server.getsockname()[1]))
                ends = [server.accept()[0] for _ in range(2)]
        else:
            port = int(store.get(key))
            ends = [socket.create_connection((address, port)) for _ in range(2)]
            for number, end in enumerate(ends):  # they may be accepted in either order
                end.sendall(bytes([number]))
        if rank == 0:
            ends = list(dict(sorted((end.recv(1)[0], end) for end in ends)).values())
        self._to, self._from = ends if rank == 0 else ends[::-1]
        self._sent, self._received = (torch.full((size,), rank, dtype=torch.uint8) for _ in "ab")
        self.exchange()
        harness.require(bool((self._received == 1 - rank).all()), SOCKETS)

    def exchange(self) -> None:
        sender = threading.Thread(target=self._to.sendall, args=(self._sent.numpy(),))
        sender.start()
        left = memoryview(self._received.numpy())
        while left:
            count = self._from.recv_into(left)
            if count == 0:
                raise ConnectionError("the other rank has gone")
            left = left[count:]
        sender.join()

    def exchange_and_add(self) -> None:
        self.exchange()
        mine, theirs = (x.view(torch.float32).chunk(2)[0] for x in (self._sent, self._received))
        torch.add(mine, theirs, out=theirs)


def shares_hosts(context: Context) -> bool:
    """Whether each rank has neighbours on its host, and thus an arena."""
    import fusedpg

    return bool(fusedpg.group_info(context.groups["fused"])["arena_reserved"])


def send_arms(size: int, context: Context) -> dict[str, Callable[[], object]]:
    """There and back, between the first rank and the last one; the others have nothing to do."""
    last = context.world_size - 1
    x = torch.full((size // 4,), float(context.rank + 1))

    def there_and_back(group: dist.ProcessGroup) -> None:
        if context.rank == 0:
            dist.send(x, last, group=group)
            dist.recv(x, last, group=group)
        elif context.rank == last:
            dist.recv(x, 0, group=group)
            dist.send(x, 0, group=group)

    arms = {name: partial(there_and_back, group) for name, group in context.groups.items()}
    for name, arm in arms.items():
        x.fill_(float(context.rank + 1))
        arm()
        ends = context.rank in (0, last)
        harness.require(bool((x == (1 if ends else context.rank + 1)).all()), f"send, {name}")
    return arms


def exchange_arms(size: int, context: Context) -> dict[str, Callable[[], object]]:
    """Both ways at once, between the first rank and the last one."""
    last = context.world_size - 1
    peer = {0: last, last: 0}.get(context.rank)
    x = torch.full((size // 4,), float(context.rank + 1))
    y = torch.zeros_like(x)

    def exchange(group: dist.ProcessGroup) -> None:
        if peer is None:
            return
        both = [dist.P2POp(dist.isend, x, peer, group), dist.P2POp(dist.irecv, y, peer, group)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    arms = {name: partial(exchange, group) for name, group in context.groups.items()}
    for name, arm in arms.items():
        y.zero_()
        arm()
        harness.require(bool((y == (0 if peer is None else peer + 1)).all()), f"exchange, {name}")
    return arms


class ShardedArm(Arm):
    def wrap(self) -> nn.Module:
        return self.module if self.group is None else fully_sharded(self.module, self.group, 0)


def training_arms(part: str, context: Context) -> dict[str, Callable[[], object]]:
    """A user's unchanged script; alone where there is no group."""
    kind = Arm if part == "ddp" else ShardedArm
    arms = {name: kind("mlp", group) for name, group in context.groups.items()}
    losses = same_losses(part, {n: arm.step for n, arm in arms.items()}, CHECKED_STEPS)
    # Of all ranks' batches: one of them alone may get worse at first.
    dist.all_reduce(losses, group=context.groups["gloo"])
    harness.require(bool(losses[-1] < losses[0]), f"{part}: does not learn: {losses}")
    alone = kind("mlp", None)
    steps: dict[str, Callable[[], object]] = {name: arm.step for name, arm in arms.items()}
    steps[ALONE] = alone.step
    if part == "ddp":
        silent = Arm("mlp", context.groups["fused"]).without_communication()
        steps[NO_COMM] = silent.step
        steps |= {FORWARD: alone.forward, OPTIMIZER: alone.optimizer.step}
    return steps


# ---------------------------------------------------------------------------------------------
# Output


def print_bytes(rows: Sequence[Row], count: int) -> None:
    """What crossed a host's link, over the least that has to."""
    lines = []
    for row in rows:
        if row.arm not in (LINK, WIRE, SOCKETS, SOCKETS_AND_SUM, BOUND, *COMPUTE) and row.size >= M:
            least = 2 * (count - 1) / count * row.size
            sent = row.more["sent"]
            share = "" if row.case.startswith("fsdp2") else f"{sent / least:.3f}"
            lines.append([*harness.work_of(row), f"{sent * 1e-6:.4g}", share])
    harness.show("Bytes that a host sends", harness.WORK, ["MB", "of 2 (H-1)/H N"], lines)
    for row in rows:
        if (idle := row.more.get("idle")) is not None:
            arm, step = harness.arm_title(row.arm), harness.words.case(row.case)
            print(f"{step}, {arm}: the host's cores idle {100 * idle:.0f}% of the time")


if __name__ == "__main__":
    sys.exit(main())
