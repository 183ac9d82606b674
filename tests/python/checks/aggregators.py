"""Groups that use aggregators, against groups that do not."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import fusedpg
from harness import Context

Op = dist.ReduceOp
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64, torch.uint8, torch.int16)
# Above what goes by small messages, and not a multiple of anything.
LARGE = 400_003

_groups: dict[str, Any] = {}


def group_with(places: str, seconds: float = 30.0) -> Any:
    """A group of all ranks that uses these aggregators; made once."""
    group = _groups.get(places)
    if group is None or not dist.is_initialized():
        group = dist.new_group(
            timeout=timedelta(seconds=seconds), pg_options=fusedpg.Options(aggregators=places)
        )
        _groups[places] = group
    return group


def values(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if not dtype.is_floating_point:
        limit = 200 if dtype == torch.uint8 else 30_000
        return torch.randint(0, limit, (numel,), generator=generator).to(dtype)
    v = torch.randn(numel, generator=generator) * torch.exp(
        2 * torch.randn(numel, generator=generator)
    )
    return v.to(dtype)


def bits(t: torch.Tensor) -> bytes:
    return torch.cat([t.reshape(-1)]).view(torch.uint8).numpy().tobytes()


def equals_without(context: Context, places: str, dtype: torch.dtype, numel: int) -> None:
    """Every reduction has the bits that it has from rank to rank."""
    group = group_with(places)
    ops = [Op.SUM, Op.AVG, Op.MIN, Op.MAX, Op.PRODUCT]
    if not dtype.is_floating_point:
        ops += [Op.BAND, Op.BOR, Op.BXOR]
    for op in ops:
        mine = values(context.rank, numel, dtype)
        ours, theirs = mine.clone(), mine.clone()
        dist.all_reduce(ours, op, group=group)
        dist.all_reduce(theirs, op)
        assert bits(ours) == bits(theirs), (dtype, op)


def equals_numpy(context: Context, places: str, case: dict[str, Any]) -> None:
    """A sum in rank order, by numpy."""
    dtype, numel = case["dtype"], case["numel"]
    group = group_with(places)
    before = fusedpg.stats(group).get("all_reduce", {"paths": {}})["paths"].get("aggregated", 0)
    whole = [values(rank, numel, dtype, case["seed"]) for rank in range(context.world_size)]
    t = torch.zeros(numel + case["offset"], dtype=dtype)[case["offset"] :]
    t.copy_(whole[context.rank])
    work = dist.all_reduce(t, group=group, async_op=case["async_op"])
    if work is not None:
        work.wait()
    wide = [part.float() if dtype in (torch.bfloat16, torch.float16) else part for part in whole]
    total = wide[0].numpy().copy()
    for part in wide[1:]:
        total = total + part.numpy()
    assert bits(t) == bits(torch.from_numpy(total).to(dtype))
    after = fusedpg.stats(group)["all_reduce"]["paths"].get("aggregated", 0)
    small = t.nbytes * (context.world_size - 1) <= 128 << 10
    assert after - before == (0 if small else 1)


def bytes_of_link(context: Context, places: str) -> None:
    """As many as the tensor has, each way."""
    group = group_with(places)
    t = torch.ones(LARGE)
    fusedpg.stats(group, reset=True)
    dist.all_reduce(t, group=group)
    stats = fusedpg.stats(group)["all_reduce"]
    assert stats["paths"]["aggregated"] == 1
    assert stats["bytes_received"] - t.nbytes < 5000 * context.world_size
    assert 0 < stats["bytes_sent"] - t.nbytes < 5000 * context.world_size
    assert fusedpg.group_info(group)["aggregators"] == places.split(",")
    assert "aggregators" not in fusedpg.group_info()


def several_groups(context: Context, places: str, rounds: int) -> None:
    """Two groups work at the same time, each on a thread."""
    groups = [dist.new_group(pg_options=fusedpg.Options(aggregators=places)) for _ in range(2)]
    wrong: list[str] = []

    def work(n: int) -> None:
        for step in range(rounds):
            t = torch.full((LARGE,), float(context.rank + 1 + n + step))
            dist.all_reduce(t, group=groups[n])
            want = sum(rank + 1 + n + step for rank in range(context.world_size))
            if not bool((t == want).all()):
                wrong.append(f"group {n}, step {step}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    for group in groups:
        dist.destroy_process_group(group)


def ddp_is_unchanged(context: Context, places: str) -> None:
    """A step of DDP has the same gradients."""
    found = []
    for group in (None, group_with(places)):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.Linear(400, 300))
        ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        generator = torch.Generator().manual_seed(context.rank)
        ddp(torch.randn(8, 300, generator=generator)).square().sum().backward()
        found.append([bits(p.grad) for p in model.parameters() if p.grad is not None])
    assert found[0] == found[1] and len(found[0]) == 4


def all_to_one(context: Context, places: str, text: str) -> None:
    """The first operation raises on every rank what is wrong with the aggregators."""
    group = dist.new_group(
        timeout=timedelta(seconds=20), pg_options=fusedpg.Options(aggregators=places)
    )
    try:
        dist.all_reduce(torch.ones(LARGE), group=group)
    except Exception as error:
        assert text in str(error), error
    else:
        raise AssertionError("nothing raised")
    with contextlib.suppress(Exception):
        dist.destroy_process_group(group)


def join(context: Context, prefix: str, ranks: list[int], places: str, seconds: float) -> None:
    """A default group of some ranks that uses aggregators."""
    _groups.clear()
    dist.init_process_group(
        context.backend,
        store=dist.PrefixStore(prefix, context.store),
        rank=ranks.index(context.rank),
        world_size=len(ranks),
        timeout=timedelta(seconds=seconds),
        pg_options=fusedpg.Options(aggregators=places),
    )


def leave(context: Context) -> None:
    dist.destroy_process_group()


def some_rounds(context: Context, rounds: int) -> None:
    fusedpg.stats(reset=True)
    size, rank = dist.get_world_size(), dist.get_rank()
    for _ in range(rounds):
        t = torch.full((LARGE,), float(rank + 1))
        dist.all_reduce(t)
        assert bool((t == size * (size + 1) / 2).all())
    assert fusedpg.stats()["all_reduce"]["paths"]["aggregated"] == rounds


def until_it_fails(context: Context, path: str) -> tuple[float, str]:
    """When an operation raised (time.time()), and what; all before that were right."""
    size, rank = dist.get_world_size(), dist.get_rank()
    step = 0
    while True:
        t = torch.full((LARGE,), float(rank + 1))
        try:
            dist.all_reduce(t)
        except Exception as error:
            now = time.time()
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
            return now, str(error)
        assert bool((t == size * (size + 1) / 2).all())
        step += 1
        if rank == 0 and step == 3:
            with open(path, "w") as file:
                file.write("go")
