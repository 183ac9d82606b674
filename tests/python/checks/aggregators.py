"""Groups that use aggregators, against groups that do not."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import fusedpg
from checks.faults import rejoin
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


def mostly_zeros(rank: int, size: int, case: dict[str, Any]) -> torch.Tensor:
    """Blocks of a rank: of all at random, the same of all ranks, none of two ranks, or none."""
    generator = torch.Generator().manual_seed(case["seed"])
    block, numel, dtype = case["block"], case["numel"], case["dtype"]
    blocks = -(-numel // block)
    draw = torch.rand(blocks, generator=generator)
    if case["overlap"] == "none":
        owner = torch.randint(0, size, (blocks,), generator=generator)
        keep = (draw < case["density"]) & (owner == rank)
    elif case["overlap"] == "random":
        mine = torch.Generator().manual_seed(case["seed"] + 1 + rank)
        keep = torch.rand(blocks, generator=mine) < case["density"]
    elif case["overlap"] == "one rank":
        keep = (draw < case["density"]) & (rank == size - 1)
    else:
        keep = draw < case["density"]
    t = values(rank, numel, dtype, case["seed"])
    t[t == 0] = 1
    for b in range(blocks):
        part = t[b * block : (b + 1) * block]
        special = (b * 7 + rank + case["seed"]) % 11
        if not keep[b]:
            part.zero_()
        elif dtype.is_floating_point and special == 0:
            part.fill_(-0.0)
        elif dtype.is_floating_point and special == 1:
            part.fill_(float("nan") if case["nan"] else -0.0)
    return t


def same_bits_but_which_nan(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if ours.dtype.is_floating_point:
        nan = ours.isnan()
        if not torch.equal(nan, theirs.isnan()):
            return False
        ours, theirs = ours.masked_fill(nan, 1), theirs.masked_fill(nan, 1)
    return bits(ours) == bits(theirs)


def embedding_is_unchanged(context: Context, places: str) -> None:
    """DDP with nn.Embedding(sparse=True): the same gradients, by aggregators."""
    group = group_with(places)
    found = []
    for where in (None, group):
        torch.manual_seed(3)
        model = torch.nn.Embedding(1000, 32, sparse=True)
        ddp = torch.nn.parallel.DistributedDataParallel(model, process_group=where)
        fusedpg.stats(group, reset=True)
        draw = torch.Generator().manual_seed(context.rank)
        ddp(torch.randint(0, 1000, (64,), generator=draw)).square().sum().backward()
        grad = model.weight.grad
        assert grad is not None and grad.is_sparse
        found.append(bits(grad.coalesce().to_dense()))
    assert found[0] == found[1]
    assert fusedpg.stats(group)["all_reduce"]["paths"] == {"aggregated": 1}


def block_view(t: torch.Tensor, block: int) -> torch.Tensor:
    """Rows are the blocks' bytes, with zeros behind the last one."""
    raw = t.view(torch.uint8)
    width = block * t.element_size()
    return torch.cat([raw, raw.new_zeros(-len(raw) % width)]).view(-1, width)


def absent_blocks_never_travel(context: Context, places: str) -> None:
    """A rank sends its blocks, and gets those that any rank has."""
    group, size = group_with(places), context.world_size
    case = {"block": 256, "numel": 256 * 4000, "dtype": torch.float32, "density": 0.1,
            "overlap": "none", "seed": 3, "nan": False}  # fmt: skip
    mine = mostly_zeros(context.rank, size, case)
    present = int((mine.view(-1, 256).view(torch.int32) != 0).any(1).sum())
    total = torch.tensor([present])
    dist.all_reduce(total)
    fusedpg.stats(group, reset=True)
    fusedpg.sparse_all_reduce(mine, group=group)
    stats = fusedpg.stats(group)["sparse_all_reduce"]
    overhead = 5000 * size  # what ranks agree on, and the words of messages
    assert 0 < stats["bytes_sent"] - present * 1028 < overhead
    assert 0 < stats["bytes_received"] - int(total) * 1028 < overhead


def messages_have_their_size(context: Context, places: str) -> None:
    """Blocks of 1 KiB: four of them a message, or 64."""
    sent = []
    for size in (4096, 65536):
        group = dist.new_group(
            pg_options=fusedpg.Options(aggregators=places, aggregate_message_bytes=size)
        )
        mine = torch.ones(256 * 4096)
        fusedpg.sparse_all_reduce(mine, group=group, block_size=256)
        assert bool((mine == context.world_size).all())
        sent.append(fusedpg.stats(group)["sparse_all_reduce"]["messages_sent"])
        dist.destroy_process_group(group)
    # Each is two, with its word.
    assert abs(sent[0] - sent[1] - 2 * (4096 // 4 - 4096 // 64)) <= 4, sent


def block_skip_goes_by_aggregators(context: Context, places: str) -> None:
    """A plain all-reduce of a group with block_skip; "auto" hears of the density."""
    for mode in ("on", "auto"):
        group = dist.new_group(
            pg_options=fusedpg.Options(aggregators=places, aggregate="on", block_skip=mode)
        )
        for step in range(4):
            mine, whole = torch.zeros(LARGE), torch.zeros(LARGE)
            mine[1000 * context.rank :][:500] = 1.5 + step
            for rank in range(context.world_size):
                whole[1000 * rank :][:500] = 1.5 + step
            dist.all_reduce(mine, group=group)
            assert torch.equal(mine, whole)
        stats = fusedpg.stats(group)["all_reduce"]
        assert stats["paths"] == {"aggregated": 4}
        # The first one of "auto" is dense, with a look at a sample.
        looked = 4 if mode == "on" else 3
        assert stats["bytes_received"] < (4 - looked) * mine.nbytes + looked * 50_000
        # From now on most blocks are there: "auto" finds it, and stops looking.
        for _ in range(20):
            mine = torch.ones(LARGE)
            dist.all_reduce(mine, group=group)
            assert bool((mine == context.world_size).all())
        dist.destroy_process_group(group)


def threshold_keeps_the_rest(context: Context, places: str) -> None:
    """Error feedback: what is sent and what is kept are the tensor."""
    group, size = group_with(places), context.world_size
    case = {"block": 256, "numel": 70_001, "dtype": torch.float32, "density": 0.5,
            "overlap": "random", "seed": 8, "nan": False}  # fmt: skip
    found = []
    for where in (group, None):
        mine = mostly_zeros(context.rank, size, case)
        residual = torch.zeros_like(mine)
        for _ in range(2):
            fusedpg.sparse_all_reduce(mine, group=where, threshold=30.0, residual=residual)
        found.append((bits(mine), bits(residual)))
    assert found[0] == found[1]


def chosen(group: Any) -> str:
    return fusedpg.group_info(group)["aggregate"].split(":")[0]


def follows_the_rates(context: Context, places: str, rates: str, wanted: str) -> None:
    """A dense tensor goes where links of these rates carry it sooner; its bits are the same."""
    group = dist.new_group(
        pg_options=fusedpg.Options(aggregators=places, aggregate="auto", aggregate_rates=rates)
    )
    mine = values(context.rank, LARGE, torch.float32)
    ours, theirs = mine.clone(), mine.clone()
    dist.all_reduce(ours, group=group)
    dist.all_reduce(theirs)
    assert bits(ours) == bits(theirs)
    assert chosen(group) == wanted
    path = {"aggregators": "aggregated", "rank to rank": "messages"}[wanted]
    assert fusedpg.stats(group)["all_reduce"]["paths"] == {path: 1}
    dist.destroy_process_group(group)


def learns_the_overlap(context: Context, places: str) -> None:
    """Blocks that no two ranks share go from rank to rank, those that all have by aggregators;
    which these are, the group finds by the operation before."""
    group = dist.new_group(
        pg_options=fusedpg.Options(aggregators=places, aggregate="auto", aggregate_rates="1,10")
    )
    for overlap, wanted in (
        ("none", "rank to rank"), ("none", "rank to rank"), ("all", "rank to rank"),
        ("all", "aggregators"), ("all", "aggregators"), ("none", "aggregators"),
        ("none", "rank to rank"),
    ):  # fmt: skip
        case = {"block": 256, "numel": 256 * 2000, "dtype": torch.float32, "density": 0.3,
                "overlap": overlap, "seed": 5, "nan": False}  # fmt: skip
        whole = [mostly_zeros(rank, context.world_size, case) for rank in range(context.world_size)]
        ours, theirs = whole[context.rank].clone(), whole[context.rank].clone()
        fusedpg.sparse_all_reduce(ours, group=group)
        fusedpg.sparse_all_reduce(theirs)
        assert bits(ours) == bits(theirs)
        assert chosen(group) == wanted, (overlap, fusedpg.group_info(group)["aggregate"])
    dist.destroy_process_group(group)


def measures_links(context: Context, places: str) -> None:
    """Without rates: small tensors from rank to rank; the first large one measures, which counts
    nowhere; all ranks choose alike."""
    group = dist.new_group(pg_options=fusedpg.Options(aggregators=places, aggregate="auto"))
    small = torch.full((100_000,), context.rank + 1.0)
    dist.all_reduce(small, group=group)
    total = context.world_size * (context.world_size + 1) / 2
    assert bool((small == total).all())
    assert "no rates before" in fusedpg.group_info(group)["aggregate"]
    fusedpg.stats(group, reset=True)
    for _ in range(3):
        large = torch.full((LARGE,), context.rank + 1.0)
        dist.all_reduce(large, group=group)
        assert bool((large == total).all())
    stats = fusedpg.stats(group)["all_reduce"]
    assert sum(stats["paths"].values()) == 3
    assert stats["bytes_sent"] < 3 * 1.5 * large.nbytes
    choice = fusedpg.group_info(group)["aggregate"]
    assert "ms by aggregators" in choice
    choices: list[Any] = [None] * context.world_size
    dist.all_gather_object(choices, choice)
    assert len(set(choices)) == 1
    dist.destroy_process_group(group)


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
        # Rank 0 knows the cause; nobody blames a rank that only heard of it.
        blamed = re.findall(r"(?:cause is|to fail was) rank (\d+)", str(error))
        assert set(blamed) <= ({"0"} if context.rank else set()), error
    else:
        raise AssertionError("nothing raised")
    with contextlib.suppress(Exception):
        dist.destroy_process_group(group)


def join(context: Context, prefix: str, ranks: list[int], places: str, seconds: float) -> None:
    """A default group of some ranks that uses aggregators."""
    _groups.clear()
    rejoin(context, prefix, ranks, seconds, aggregators=places)


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


def until_it_fails(context: Context, path: str, blocks: bool = False) -> tuple[float, str]:
    """When an operation raised (time.time()), and what; all before that were right. `blocks`: a
    tensor of several messages for each aggregator, of which ranks have other blocks."""
    size, rank = dist.get_world_size(), dist.get_rank()
    numel = 256 * 12_000 if blocks else LARGE
    step = 0
    while True:
        t = torch.zeros(numel) if blocks else torch.full((numel,), float(rank + 1))
        if blocks:
            t.view(-1, 256)[rank::2] = float(rank + 1)
        try:
            fusedpg.sparse_all_reduce(t) if blocks else dist.all_reduce(t)
        except Exception as error:
            now = time.time()
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
            return now, str(error)
        if blocks:
            want = torch.zeros(12_000)
            for r in range(size):
                want[r::2] += r + 1
            assert bool((t.view(-1, 256) == want[:, None]).all())
        else:
            assert bool((t == size * (size + 1) / 2).all())
        step += 1
        if rank == 0 and step == 3:
            with open(path, "w") as file:
                file.write("go")
