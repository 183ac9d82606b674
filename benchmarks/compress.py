"""Train with compressed gradients between hosts: steps a second, and loss against time.

    python benchmarks/compress.py --check-bars
    python benchmarks/compress.py --rates 1gbit --parts loss

A DDP step of an MLP of 25 M parameters (batch of 4 a rank, SGD with momentum) on hosts that are
network namespaces whose links have a rate (needs root, `ip` and `tc`; exits with 2 where that
cannot be), with one rank each; and where there is no link to save, "one host" of as many ranks. The
arms, in turn:

    gloo, gloo bf16       DDP on Gloo; with torch's bf16_compress_hook
    fused, fused bf16     the same on our backend
    top-k 1 % ...         fusedpg.compress, with error feedback, by schedule: each parameter by
                          itself ("layer"), DDP's buckets, all at once ("one"), or "auto"
    ..., our SGD          the same with fusedpg.optim.SGD(comm_hook=(state, hook)): gradients stay
                          where they are
    other compressors     one piece a bucket
    no_sync               the step without communication, which nothing can beat

"compression" is what compressing and decompressing for two ranks takes, by the same code in a group
of one rank. What crosses the link is counted by its interface. All arms train one model in turn,
whose weights must stay the same on all ranks. The part "loss" trains each method from the same
weights for as many seconds, with a batch of 16 a rank, and says how far the loss came: to tell
which of ten points, normal in all coordinates, a normal one of 5 times their spread belongs to.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import _harness as harness
import _hosts as hosts
import _plots as plots
import fusedpg
from _harness import Bar, Context, Hosts, Row
from _training import make_mlp, parameter_bytes
from fusedpg import compress

UNLIMITED = "unlimited"
ONE_HOST = "one host"
RATES = ("100mbit", "1gbit", "10gbit", UNLIMITED, ONE_HOST)
GLOO, BF16 = "gloo", "gloo bf16"
ALONE = "no_sync"
BATCH, LR, MOMENTUM = 4, 1e-3, 0.9
ROUNDS = {"100mbit": 2, "1gbit": 5, "10gbit": 7, UNLIMITED: 7, ONE_HOST: 9}
LOSS_SECONDS = {"100mbit": 60.0, "1gbit": 30.0}
LOSS_BATCH, LOSS_LR, SPREAD, POINT = 16, 5e-3, 0.2, 5  # steps a point

TOPK = {"compressor": "topk", "memory": "residual", "compress_ratio": 0.01}
SIGN = {"compressor": "efsignsgd", "memory": "residual"}
METHODS: dict[str, tuple[dict[str, Any], str]] = {
    "top-k 1 %, layer": (TOPK, "layer"),
    "top-k 1 %, bucket": (TOPK, "bucket"),
    "top-k 1 %, one": (TOPK, "one"),
    "top-k 1 %, auto": (TOPK, "auto"),
    "EF sign, layer": (SIGN, "layer"),
    "EF sign, bucket": (SIGN, "bucket"),
    "EF sign, one": (SIGN, "one"),
    "EF sign, auto": (SIGN, "auto"),
    "EF sign, ps": ({**SIGN, "communicator": "ps"}, "bucket"),
    "random-k 1 %": (
        {**TOPK, "compressor": "randomk", "communicator": "allreduce"}, "bucket"
    ),
    "DGC 1 %": ({"compressor": "dgc", "memory": "dgc", "compress_ratio": 0.01}, "bucket"),
    "fp16": ({"compressor": "fp16", "communicator": "allreduce"}, "bucket"),
    "QSGD 127": ({"compressor": "qsgd"}, "bucket"),
    "TernGrad": ({"compressor": "terngrad"}, "bucket"),
    "natural": ({"compressor": "natural"}, "bucket"),
    "1-bit": ({"compressor": "onebit", "memory": "residual"}, "bucket"),
    "PowerSGD 4": (
        {
            "compressor": "powersgd", "memory": "powersgd", "communicator": "allreduce",
            "compress_rank": 4,
        },
        "bucket",
    ),
}  # fmt: skip
AUTO = ("top-k 1 %", "EF sign")
# Behind the name of a method: its arm with an optimizer of ours.
OURS = ", our SGD"
METHODS |= {f"{name}, auto{OURS}": METHODS[f"{name}, auto"] for name in AUTO}
SOME = [name for name in METHODS if name.startswith(AUTO) and not name.endswith("ps")]


def name_of(rate: str) -> str:
    return f"step, {rate}"


def bars() -> list[Bar]:
    size = parameter_bytes("mlp")
    found = [
        Bar(2, name_of("1gbit"), f"{method}, auto{which}", size, GLOO, at_least=times)
        for method, times in zip(AUTO, (8, 10))
        for which in ("", OURS)
    ]
    for rate in ("100mbit", "1gbit", "10gbit"):
        for method in AUTO:
            found += [
                Bar(2, name_of(rate), f"{method}, auto", size, f"{method}, {other}", at_least=0.98)
                for other in ("layer", "one")
            ]
    # Where there is nothing to gain it may not cost much either.
    for rate in (UNLIMITED, ONE_HOST):
        found += [
            Bar(2, name_of(rate), f"{method}, auto", size, "fused", at_least=0.9) for method in AUTO
        ]
    return found


def main() -> int:
    parser = harness.Parser(__doc__, rounds=0)
    parser.add_argument("--hosts", type=int, default=2)
    parser.names("--rates", RATES)
    parser.names("--parts", ("steps", "loss"))
    parser.add_argument("--methods", help="only those whose names contain one of these")
    args = parser.parse_args()
    rows: list[Row] = []
    for rate in args.rates:
        args.rate = rate  # for ranks
        parts = [p for p in args.parts if p == "steps" or rate in LOSS_SECONDS]
        limit = rate if rate.endswith("bit") else None
        where = Hosts(1, args.hosts) if rate == ONE_HOST else Hosts(args.hosts, 1, limit)
        rows += harness.run(measure, args, parts, hosts=where)
    args.world_size = args.hosts
    curves = [row.more for row in rows if row.case.startswith("loss")]
    timed = [row for row in rows if not row.case.startswith("loss")]
    print_more(timed)
    for curve in curves:
        print_curve(curve)
    if timed:
        harness.finish("compress", timed, args, limit=ALONE, bars=bars())
    if curves and not args.no_save:
        # Not among the results, which are rows of timings.
        stem = f"compress_p{args.hosts}"
        harness.write(harness.RESULTS / f"loss/{stem}.json", harness.about(), curves)
        draw = partial(plots.draw_curves, curves)
        plots.save(harness.FIGURES / f"{stem}_loss.png", draw)
    return 0


# ---------------------------------------------------------------------------------------------
# On a rank


class Training:
    """A user's script: a model, DDP, an optimizer of torch, and batches of a fixed task."""

    def __init__(
        self,
        model: nn.Module,
        rank: int,
        group: Any,
        hook: Any,
        state: Any,
        optimizer: torch.optim.Optimizer | None,
        batch: int = BATCH,
    ) -> None:
        self.state = state
        if optimizer is None:
            model = copy.deepcopy(model)  # ours moves parameters
        self.model = model
        self._ddp: nn.Module = model
        if group is not None:
            self._ddp = ddp = DistributedDataParallel(
                model, process_group=group, gradient_as_bucket_view=True
            )
            if optimizer is None:
                local = fusedpg.group_info(group)["local_ranks"]
                optimizer = fusedpg.optim.SGD(
                    model.parameters(), lr=LR, momentum=MOMENTUM, ddp=ddp, comm_hook=(state, hook),
                    process_group=dist.new_group(
                        local, backend="fused", use_local_synchronization=True
                    ),
                )  # fmt: skip
            elif hook is not None:
                self._ddp.register_comm_hook(state, hook)
        assert optimizer is not None
        self._optimizer = optimizer
        self._draw = torch.Generator().manual_seed(1 + rank)
        width = next(iter(model.parameters())).shape[1]
        self._centres = SPREAD * torch.randn(10, width, generator=torch.Generator().manual_seed(0))
        self._batch = batch
        self._draws()

    def _draws(self) -> None:
        self._y = torch.randint(10, (self._batch,), generator=self._draw)
        noise = torch.randn(self._batch, self._centres.shape[1], generator=self._draw)
        self._x = self._centres[self._y] + noise

    def step(self, new: bool = False) -> float:
        if new:
            self._draws()
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self._ddp(self._x), self._y)
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())


def chosen(args: argparse.Namespace) -> list[str]:
    wanted = args.methods.split(",") if args.methods else [""]
    names = METHODS if args.rate in ("1gbit", "10gbit") or args.methods else SOME
    return [name for name in names if any(w in name for w in wanted)]


def in_bf16(group: Any, bucket: Any) -> Any:
    """torch's hook; by its own name DDP refuses it without CUDA."""
    return default_hooks.bf16_compress_hook(group, bucket)


in_bf16.__annotations__.clear()  # DDP wants them as types, or not at all


def make_arm(
    name: str,
    model: nn.Module,
    context: Context,
    optimizer: torch.optim.Optimizer,
    batch: int = BATCH,
) -> Training:
    fused, gloo = context.groups["fused"], context.groups["gloo"]
    if name in METHODS:
        params, schedule = METHODS[name]
        state = compress.from_params(params, group=fused, schedule=schedule)
        torchs = None if name.endswith(OURS) else optimizer
        return Training(model, context.rank, fused, compress.hook, state, torchs, batch)
    group = {"fused": fused, "gloo": gloo}.get(name.split()[0])
    hook = in_bf16 if name.endswith("bf16") else None
    return Training(model, context.rank, group, hook, group if hook else None, optimizer, batch)


def measure(context: Context, args: argparse.Namespace, part: str) -> list[Row]:
    return steps(context, args) if part == "steps" else losses(context, args)


def steps(context: Context, args: argparse.Namespace) -> list[Row]:
    torch.manual_seed(0)
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, fused=True)
    arms: dict[str, Callable[[], object]] = {}
    sent: dict[str, float] = {}
    apart: dict[str, float] = {}
    choices: dict[str, str] = {}
    for name in (GLOO, BF16, "fused", "fused bf16", *chosen(args), ALONE):
        arm = make_arm(name, model, context, optimizer)
        for _ in range(3):
            arm.step()
        if METHODS.get(name, ({}, ""))[1] == "auto":
            settle(arm, context)
        if name != ALONE:
            harness.require(alike(arm.model, context), f"{name}: ranks have other weights")
        arms[name] = arm.step
        if args.rate != ONE_HOST:
            sent[name] = hosts.bytes_over_link(context, arm.step, 1)[0][context.rank]
        if name in METHODS:
            apart[name] = compression(name, context)
            if METHODS[name][1] == "auto":
                choices[name] = choice(arm.state.report())
                if context.rank == 0:
                    print(f"{args.rate}, {name}:\n{arm.state.report()}", file=sys.stderr)
    rounds = args.rounds or ROUNDS[args.rate]
    rows = harness.measure(
        context, arms, case=name_of(args.rate), size=parameter_bytes("mlp"), rounds=rounds
    )
    for row in rows:
        row.more = {
            "sent": sent.get(row.arm, 0.0),  # bytes over the link in a step
            "compression": apart.get(row.arm, 0.0),  # seconds of it by itself
            "choice": choices.get(row.arm, ""),  # of schedule="auto"
        }
    return rows


def choice(report: compress.Report) -> str:
    chosen = next(one for one in report.tried if one.chosen)
    if chosen.candidate.plain:
        return "no compression"
    return f"{len(chosen.elements)} group{'s'[: len(chosen.elements) > 1]}"


def settle(arm: Training, context: Context) -> None:
    """Until the search has ended."""
    for _ in range(400):
        arm.step()
        if any(one.chosen for one in arm.state.report().tried):
            return
    harness.require(False, "the search of schedule='auto' has not ended")


def alike(model: nn.Module, context: Context) -> bool:
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return harness.same_on_all_ranks(flat) if context.world_size > 1 else True


def compression(name: str, context: Context) -> float:
    """Compressing a gradient, and decompressing two, without a wire: the median of three."""
    from fusedpg.compress._base import Context as At
    from fusedpg.compress._piece import Piece, Runs

    params, _ = METHODS[name]
    compressor, memory = (compress.from_params(params).compressor,
                          compress.from_params(params).memory)  # fmt: skip
    if params["compressor"] == "powersgd":
        return 0.0  # not without a wire
    numel = parameter_bytes("mlp") // 4
    kept: dict[str, Tensor] = {}
    piece = Piece(
        "0", numel, Runs(), 0, 2, 1, torch.float32, torch.device("cpu"),
        lambda key, begin, end, _: kept.setdefault(key, torch.zeros(numel))[begin:end],
    )  # fmt: skip
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(context.rank))
    samples = []
    for _ in range(4):
        context.clock.barrier()
        begin = time.perf_counter()
        payload, at = memory.encode(compressor, grad, piece)
        assert isinstance(at, At)
        payload = [part.clone() if part.data_ptr() == grad.data_ptr() else part for part in payload]
        compressor.combine(grad, [payload, payload], memory.scale, at)
        samples.append(time.perf_counter() - begin)
        grad.copy_(torch.randn(numel, generator=torch.Generator().manual_seed(context.rank)))
    return sorted(samples[1:])[1]


def losses(context: Context, args: argparse.Namespace) -> list[Row]:
    """Loss against time, each method for as long; a row has its curve."""
    torch.manual_seed(0)
    initial = make_mlp()
    for p in initial.parameters():  # as torch begins, a signal is lost in five layers of ReLU
        if p.dim() == 2:
            nn.init.kaiming_normal_(p, nonlinearity="relu")
        else:
            nn.init.zeros_(p)
    with torch.no_grad():
        initial[-1].weight.mul_(0.1)
    limit = LOSS_SECONDS[args.rate]
    found = []
    for name in (GLOO, BF16, "top-k 1 %, auto", "EF sign, auto"):
        if args.methods and name in METHODS and name not in chosen(args):
            continue
        model = copy.deepcopy(initial)
        optimizer = torch.optim.SGD(model.parameters(), lr=LOSS_LR, momentum=MOMENTUM, fused=True)
        arm = make_arm(name, model, context, optimizer, LOSS_BATCH)
        points: list[tuple[float, float]] = []
        context.clock.barrier()
        begin, recent, count = time.perf_counter(), 0.0, 0
        going = torch.ones(1)
        while going.item():
            loss = torch.tensor([arm.step(new=True)])
            dist.all_reduce(loss, group=context.groups["gloo"])
            recent, count = recent + float(loss) / context.world_size, count + 1
            if count % POINT == 0:
                points.append((time.perf_counter() - begin, recent / POINT))
                recent = 0.0
            going[0] = float(time.perf_counter() - begin < limit)
            dist.all_reduce(going, op=dist.ReduceOp.MIN, group=context.groups["gloo"])
        harness.require(alike(arm.model, context), f"{name}: ranks have other weights")
        curve = {"method": name, "rate": args.rate, "steps": count, "points": points}
        found.append(Row.of(f"loss, {args.rate}", parameter_bytes("mlp"), name, [1.0], more=curve))
        del arm
    return found


# ---------------------------------------------------------------------------------------------
# Output


def print_more(rows: Sequence[Row]) -> None:
    lines = []
    for row in rows:
        sent, compression, choice = row.more.values()
        gloo = harness.find(rows, row.case, row.size, GLOO)
        faster = f"{harness.ratio_to_peer(row, gloo):.2f}" if gloo is not None else ""
        lines.append(
            [row.case, row.arm, choice, f"{1 / row.median:.3g}", faster,
             f"{sent * 1e-6:.4g}" if sent else "",
             f"{1e3 * compression:.1f}" if compression else ""]
        )  # fmt: skip
    title = "Steps a second, bytes on a host's link, and compression by itself"
    figures = ["steps/s", "x gloo", "MB sent", "compression ms"]
    harness.show(title, ["work", "arm", "chosen"], figures, lines, wrap=True)


def print_curve(curve: dict[str, Any]) -> None:
    points = curve["points"]
    print(
        f"loss at {curve['rate']}, {curve['method']}: {points[0][1]:.3f} -> {points[-1][1]:.3f} "
        f"in {curve['steps']} steps, {points[-1][0]:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
