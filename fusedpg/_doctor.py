"""``python -m fusedpg check`` and ``bench``: two ranks on this machine, against torch and Gloo."""

from __future__ import annotations

import collections
import dataclasses
import functools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fusedpg
from fusedpg.fusion import all_reduce

RANKS = 2
OPERATION = timedelta(seconds=30)  # what a hang of one operation may cost
SCENARIO = 150.0  # seconds for all checks of one pair of processes
M = 1 << 20


class Skip(Exception):
    """This machine cannot do that."""


@dataclasses.dataclass
class Rank:
    rank: int
    size: int
    gloo: dist.ProcessGroup


def same(name: str, ours: Tensor, theirs: Tensor, tolerance: float = 0.0) -> None:
    if tolerance == 0.0:
        wrong = not torch.equal(ours, theirs)
    else:
        wrong = not torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    if wrong:
        worst = (ours.double() - theirs.double()).abs().max().item()
        raise AssertionError(f"{name}: differs from what torch computes, by up to {worst:.3g}")


# --- checks: each runs on all ranks and raises where a number is wrong


def whole_numbers(count: int, dtype: torch.dtype, rank: int, arena: bool) -> Tensor:
    """Values that sums of two ranks keep exactly in every type, other ones on each rank."""
    result = fusedpg.empty(count, dtype=dtype) if arena else torch.empty(count, dtype=dtype)
    return result.copy_((torch.arange(count) + rank) % 17)


def reductions(r: Rank, arena: bool) -> None:
    types = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
    for dtype in types:
        for count in (1, 1000, 300_000):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
                ours = whole_numbers(count, dtype, r.rank, arena)
                all_of = [whole_numbers(count, dtype, rank, False) for rank in range(r.size)]
                wanted = sum(all_of) if op == dist.ReduceOp.SUM else torch.stack(all_of).amax(0)
                dist.all_reduce(ours, op)
                same(f"all_reduce({op}) of {count} {dtype}", ours, torch.as_tensor(wanted))
    inputs = [whole_numbers(64, torch.float32, p + r.rank, arena) for p in range(r.size)]
    output = torch.empty(64)
    dist.reduce_scatter(output, inputs)
    parts = [whole_numbers(64, torch.float32, p + r.rank, False) for p in range(r.size)]
    same("reduce_scatter", output, torch.stack(parts).sum(0))


def moves(r: Rank, arena: bool) -> None:
    for count in (3, 300_000):
        mine = whole_numbers(count, torch.float32, r.rank, arena)
        all_of = [whole_numbers(count, torch.float32, rank, False) for rank in range(r.size)]
        gathered = [torch.empty(count) for _ in range(r.size)]
        dist.all_gather(gathered, mine)
        same("all_gather", torch.cat(gathered), torch.cat(all_of))
        copy = mine.clone()
        dist.broadcast(copy, src=1)
        same("broadcast", copy, all_of[1])
        crossed = torch.empty(r.size * count)
        dist.all_to_all_single(crossed, mine.repeat(r.size))
        same("all_to_all", crossed, torch.cat(all_of))
        if r.rank == 0:
            dist.send(mine, 1)
        elif r.rank == 1:
            received = torch.empty(count)
            dist.recv(received, 0)
            same("send and recv", received, all_of[0])
    dist.barrier()


def lamb(params: list[Tensor], grads: list[Tensor], lr: float) -> list[Tensor]:
    """The first step of LAMB (You et al. 2020, algorithm 2) with our defaults."""
    result = []
    for x, g in zip(params, grads, strict=True):
        u = g / (g.abs() + 1e-6) + 1e-2 * x
        result.append(x - lr * (x.norm() / u.norm()) * u)
    return result


def optimizer(r: Rank, name: str, **options: object) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 7))
    reference = nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 7))
    reference.load_state_dict(model.state_dict())
    ddp = nn.parallel.DistributedDataParallel(model)
    ours = getattr(fusedpg.optim, name)(model.parameters(), lr=1e-2, ddp=ddp, **options)
    theirs = None if name == "LAMB" else getattr(torch.optim, name)(reference.parameters(), lr=1e-2)
    x = torch.randn(r.size, 16, 20)
    for _ in range(1 if theirs is None else 3):
        ours.zero_grad()
        ddp(x[r.rank]).square().mean().backward()
        ours.step()
        reference.zero_grad()
        reference(x.flatten(0, 1)).square().mean().backward()
        if theirs is not None:
            theirs.step()
        else:
            params = list(reference.parameters())
            new = lamb([p.detach() for p in params], [p.grad for p in params], 1e-2)  # type: ignore[misc]
            with torch.no_grad():
                for param, value in zip(params, new, strict=True):
                    param.copy_(value)
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        same(f"{name} {options or ''}", mine.detach(), other.detach(), 1e-4)


def sparse(r: Rank) -> None:
    ours = torch.zeros(100_000)
    ours[512 * r.rank : 512 * r.rank + 100] = 1.0
    wanted = sum(
        torch.zeros(100_000).index_fill_(0, torch.arange(512 * p, 512 * p + 100), 1.0)
        for p in range(r.size)
    )
    fusedpg.sparse_all_reduce(ours)
    same("sparse_all_reduce", ours, torch.as_tensor(wanted))


def generated(r: Rank) -> None:
    @fusedpg.fuse
    def step(g: Tensor, w: Tensor, lr: float) -> Tensor:
        return w - lr * torch.tanh(all_reduce(g, "mean"))

    g, w = (
        torch.randn(r.size, 10_000, generator=torch.Generator().manual_seed(3)),
        torch.ones(10_000),
    )
    same("a fused function", step(g[r.rank], w, lr=0.5), w - 0.5 * torch.tanh(g.mean(0)), 1e-5)
    text = str(step.generated(g[r.rank], w, lr=0.5))
    if "extern" not in text:
        raise Skip(f"right, but not compiled: {text.strip().splitlines()[0]}")


def parallel(r: Rank) -> None:
    torch.manual_seed(0)
    first, second, x = nn.Linear(64, 128), nn.Linear(128, 64), torch.randn(5, 64)
    up = fusedpg.ColumnParallelLinear.from_linear(first, activation=F.gelu)
    down = fusedpg.RowParallelLinear.from_linear(second)
    same("tensor parallel layers", down(up(x), x), x + second(F.gelu(first(x))), 1e-4)


def compressed(r: Rank) -> None:
    torch.manual_seed(0)
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(100, 100))
    state = fusedpg.compress.from_params({"compressor": "topk", "compress_ratio": 1.0})
    ddp.register_comm_hook(state, fusedpg.compress.hook)
    x = torch.randn(r.size, 8, 100)
    ddp(x[r.rank]).square().mean().backward()
    weight = ddp.module.weight.detach().clone().requires_grad_()
    (x.flatten(0, 1) @ weight.T + ddp.module.bias.detach()).square().mean().backward()
    assert ddp.module.weight.grad is not None and weight.grad is not None
    same("compressed gradients", ddp.module.weight.grad, weight.grad, 1e-4)


def gpu(r: Rank) -> None:
    if not torch.version.cuda or torch.cuda.device_count() < r.size:
        raise Skip(f"{torch.cuda.device_count()} GPUs, {r.size} ranks")
    torch.cuda.set_device(r.rank)
    ours = whole_numbers(100_000, torch.float32, r.rank, False).cuda()
    dist.all_reduce(ours)
    wanted = sum(whole_numbers(100_000, torch.float32, rank, False) for rank in range(r.size))
    same("all_reduce on GPUs", ours.cpu(), torch.as_tensor(wanted))


def agree(r: Rank) -> None:
    """Ranks that call different things are told so, and go on."""
    try:
        dist.all_reduce(torch.ones(10 + r.rank))
    except dist.DistBackendError as error:
        assert "ranks disagree" in str(error), error
    else:
        raise AssertionError("tensors of different sizes were summed without an error")
    dist.barrier()


def killed(r: Rank) -> None:
    """A rank that ends without a word is noticed."""
    if r.rank == r.size - 1:
        os._exit(0)
    begin = time.monotonic()
    try:
        dist.all_reduce(torch.ones(10))
    except dist.DistBackendError as error:
        assert time.monotonic() - begin < 10, f"only after {time.monotonic() - begin:.0f} s"
        assert "rank 1" in str(error), error
    else:
        raise AssertionError("an all_reduce without the other rank gave a result")


Check = tuple[str, Callable[..., object], tuple[object, ...], dict[str, object]]


def check(name: str, function: Callable[..., object], *args: object, **options: object) -> Check:
    return name, function, args, options


SHARED_MEMORY = [
    check("reductions, ordinary tensors", reductions, False),
    check("reductions in the arena", reductions, True),
    check("moves, ordinary tensors", moves, False),
    check("moves in the arena", moves, True),
    *(check(f"optim.{name}", optimizer, name) for name in ("SGD", "Adam", "AdamW", "LAMB")),
    check("optim.AdamW, overlap", optimizer, "AdamW", overlap=True),
    check("optim.AdamW, shared parameters", optimizer, "AdamW", share_parameters=True),
    check("skipping zeros", sparse),
    check("fused function", generated),
    check("tensor parallel", parallel),
    check("compression", compressed),
    check("GPUs", gpu),
    check("a mismatch is an error", agree),
    check("a dead rank is noticed", killed),
]
BETWEEN_HOSTS = [
    check("reductions", reductions, False),
    check("moves", moves, False),
    check("optim.AdamW", optimizer, "AdamW"),
    check("a dead rank is noticed", killed),
]


# --- processes


def _rank(
    connection: Connection,
    rank: int,
    port: int,
    env: Mapping[str, str],
    work: Callable[..., object],
) -> None:
    os.environ.update(env)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here
    torch.set_num_threads(1)
    try:
        fusedpg.serve_gloo(False)  # it is Gloo that this compares with
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "fused", timeout=OPERATION, store=store, rank=rank, world_size=RANKS
        )
        gloo = dist.new_group(backend="gloo", timeout=OPERATION)
        work(Rank(rank, RANKS, gloo), lambda *message: connection.send(message))
        connection.send(("end",))
    except BaseException as error:
        connection.send(("error", f"{type(error).__name__}: {error}"))
    # Some checks have ended the group, and Gloo's threads wait for peers that are gone.
    sys.stdout.flush()
    os._exit(0)


def run(
    work: Callable[..., object], env: Callable[[int], Mapping[str, str]], hear: Callable[..., None]
) -> None:
    """Runs ``work(rank, say)`` on all ranks; ``hear`` gets the rank and its words."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[BaseProcess] = []
    pipes: dict[Connection, int] = {}
    for rank in range(RANKS):
        here, there = context.Pipe(duplex=False)
        arguments = (there, rank, store.port, env(rank), work)
        processes.append(context.Process(target=_rank, args=arguments, daemon=True))
        processes[-1].start()
        there.close()
        pipes[here] = rank
    deadline = time.monotonic() + SCENARIO
    try:
        while pipes:
            ready = wait(list(pipes), deadline - time.monotonic())
            if not ready:
                hear(-1, "error", f"ranks {list(pipes.values())} hang")
                return
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    message = pipe.recv()
                except EOFError:
                    del pipes[pipe]
                else:
                    hear(pipes[pipe], *message)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run_checks(checks: str, rank: Rank, say: Callable[..., None]) -> None:
    for name, function, args, options in globals()[checks]:
        why = ""
        try:
            function(rank, *args, **options)
        except Skip as skipped:
            why = str(skipped)
        say("done", name, why)


def _one_host(rank: int) -> dict[str, str]:
    return {}


def _two_hosts(rank: int) -> dict[str, str]:
    """Each rank pretends to be on a host of its own."""
    return {"FUSEDPG_HOST_ID": f"check{rank}"}


def _scenario(title: str, checks: str, env: Callable[[int], dict[str, str]]) -> bool:
    """Prints a line for each check; whether all passed."""
    print(f"{title}:")
    passed: collections.Counter[str] = collections.Counter()
    errors: list[str] = []

    def hear(rank: int, kind: str, *words: str) -> None:
        if kind == "error":
            errors.append(f"rank {rank}: {words[0]}" if rank >= 0 else words[0])
        elif kind == "done":
            passed[words[0]] += 1
            if rank == 0:
                print(
                    f"  {words[0]:34} {f'not here: {words[1]}' if words[1] else 'ok'}", flush=True
                )

    run(functools.partial(_run_checks, checks), env, hear)
    names = [name for name, *_ in globals()[checks]]
    # The last rank does not come back from the last check.
    wanted = dict.fromkeys(names, RANKS) | {names[-1]: RANKS - 1}
    missing = [name for name in names if passed[name] < wanted[name]]
    if missing or errors:
        print(f"  {missing[0] if missing else names[-1]:34} FAILED")
    for text in errors:
        print(f"    {text}")
    return not missing and not errors


def run_check() -> int:
    good = [
        _scenario("one host", "SHARED_MEMORY", _one_host),
        _scenario("two hosts", "BETWEEN_HOSTS", _two_hosts),
    ]
    if all(good):
        good.append(_print_rates())
    print("all right" if all(good) else "FAILED")
    return 0 if all(good) else 1


# --- figures


def _timed(function: Callable[[], object], seconds: float) -> float:
    """Median seconds of a call, of the slowest rank; all ranks call equally often."""
    function()
    times: list[float] = []
    end = time.monotonic() + seconds
    while True:
        dist.barrier()
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
        more = torch.tensor([float(time.monotonic() < end and len(times) < 500)])
        dist.all_reduce(more, dist.ReduceOp.MIN)
        if not more.item() and len(times) >= 3:
            break
    result = torch.tensor([statistics.median(times)])
    dist.all_reduce(result, dist.ReduceOp.MAX)
    return result.item()


def _arms(r: Rank, count: int) -> dict[str, dict[str, Callable[[], object]]]:
    """By operation, what is timed."""
    arena, ordinary, other = fusedpg.empty(count).zero_(), torch.zeros(count), torch.zeros(count)
    grads = fusedpg.empty(count).fill_(1e-3)
    _, length = fusedpg.shard_range(count, r.size, r.rank)
    m, v, step = torch.zeros(length), torch.zeros(length), torch.zeros(())
    param = nn.Parameter(torch.zeros(count))
    param.grad = torch.full((count,), 1e-3)
    adamw = torch.optim.AdamW([param], fused=True)

    def unfused() -> None:
        assert param.grad is not None
        dist.all_reduce(param.grad, group=r.gloo)
        param.grad /= r.size
        adamw.step()

    def fused() -> None:
        fusedpg.fused_adamw_(
            *([arena], [grads], [m], [v], [], [step]),
            lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=1e-2, eps=1e-8,
        )  # fmt: skip

    return {
        "all_reduce": {
            "arena": lambda: dist.all_reduce(arena),
            "ordinary": lambda: dist.all_reduce(ordinary),
            "gloo": lambda: dist.all_reduce(other, group=r.gloo),
            "copy": lambda: other.copy_(ordinary),
        },
        "AdamW step": {"arena": fused, "gloo": unfused, "copy": lambda: other.copy_(ordinary)},
    }


def _run_bench(sizes: tuple[int, ...], seconds: float, r: Rank, say: Callable[..., None]) -> None:
    for size in sizes:
        for name, arms in _arms(r, size // 4).items():
            say("row", name, size, {arm: _timed(f, seconds) for arm, f in arms.items()})


def _rows(sizes: tuple[int, ...], seconds: float) -> list[tuple[str, int, dict[str, float]]]:
    rows: list[tuple[str, int, dict[str, float]]] = []

    def hear(rank: int, kind: str, *words: Any) -> None:
        if kind == "error":
            raise RuntimeError(words[0])
        if kind == "row" and rank == 0:
            name, size, times = words
            rows.append((name, size, times))

    run(functools.partial(_run_bench, sizes, seconds), _one_host, hear)
    return rows


def _print_rates() -> bool:
    for name, size, times in _rows((16 * M,), 0.5):
        rate = {arm: f"{size / seconds / 1e9:.1f} GB/s" for arm, seconds in times.items()}
        ratio = times["gloo"] / times["arena"]
        text = f"{rate['arena']}, {ratio:.1f} times Gloo's {rate['gloo']}; a copy: {rate['copy']}"
        print(f"{name}, {size // M} MB, {RANKS} ranks: {text}")
    return True


def run_bench() -> int:
    print(f"ms, {RANKS} ranks with a thread each, fp32; medians\n")
    print(f"{'':22}{'arena':>10}{'ordinary':>10}{'Gloo':>10}{'copy':>10}")
    rows = _rows((4 << 10, 64 << 10, M, 16 * M, 64 * M), 1.0)
    for name, size, times in sorted(rows, key=lambda row: row[0] != "all_reduce"):
        label = f"{name}, {size // M} MB" if size >= M else f"{name}, {size >> 10} KB"
        arms = (times.get(arm) for arm in ("arena", "ordinary", "gloo", "copy"))
        print(f"{label:22}" + "".join(f"{1e3 * t:10.4f}" if t else f"{'':10}" for t in arms))
    print("\nAdamW step: fused_adamw_, and for Gloo its all_reduce and torch's AdamW(fused=True).")
    return 0
