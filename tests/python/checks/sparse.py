"""Reductions that skip zeros, against the dense ones.

No postponed annotations here: DDP inspects those of its hooks.
"""

import dataclasses
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedpg
from checks.cases import digest
from checks.fused_ops import Model, Run
from harness import Context

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
}


@dataclasses.dataclass(frozen=True)
class Case:
    numel: int
    block: int = 256
    density: float = 0.1
    overlap: str = "random"  # "random", "full" or "none"
    dtype: str = "fp32"
    op: str = "SUM"
    arena: bool = False
    offset: int = 0  # the tensor begins so many elements into its storage
    special: bool = False
    seed: int = 0


def present(case: Case, rank: int, world_size: int) -> torch.Tensor:
    """Which blocks a rank has."""
    blocks = -(-case.numel // case.block)
    shared = torch.Generator().manual_seed(case.seed)
    own = torch.Generator().manual_seed(case.seed * 100 + rank + 1)
    drawn = torch.rand(blocks, generator=own if case.overlap == "random" else shared)
    chosen = drawn < case.density
    if case.overlap == "none":
        chosen &= torch.randint(world_size, (blocks,), generator=shared) == rank
    return chosen


def values(case: Case, rank: int, world_size: int) -> torch.Tensor:
    """Integers, of which every order of additions makes the same."""
    generator = torch.Generator().manual_seed(case.seed * 100 + rank + 51)
    data = torch.randint(-8, 9, (case.numel,), generator=generator)
    mask = present(case, rank, world_size).repeat_interleave(case.block)[: case.numel]
    data = (data * mask).to(DTYPES[case.dtype])
    if case.special and case.numel > 100:
        data[7] = -0.0
        data[33] = -0.0 if rank == 0 else 0.0
        data[60] = float("nan") if rank == 0 else 1.0
        data[70] = float("inf") if rank == 0 else 0.0
        data[-1] = 1e-40 if case.dtype in ("fp32", "fp64") else data[-1]
    return data


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """What must be equal: all but the payload of NaN."""
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    types = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(types[tensor.element_size()])


def placed(
    case: Case, data: torch.Tensor, device: torch.device | str = "cpu", group: Any = None
) -> torch.Tensor:
    numel = case.numel + case.offset
    if case.arena:
        tensor = fusedpg.empty(numel, dtype=data.dtype, device=device, group=group)
    else:
        tensor = torch.empty(numel, dtype=data.dtype, device=device)
    return tensor[case.offset :].copy_(data)


def equals_dense(context: Context, *cases: Case) -> None:
    for case in cases:
        data = values(case, context.rank, context.world_size)
        op = getattr(dist.ReduceOp, case.op)
        dense = placed(case, data)
        dist.all_reduce(dense, op)
        sparse = placed(case, data)
        fusedpg.sparse_all_reduce(sparse, op, block_size=case.block)
        got = bits(sparse).clone()
        sparse.fill_(1)  # while others may be at it yet
        assert torch.equal(got, bits(dense)), case
        again = placed(case, data)
        work = fusedpg.sparse_all_reduce(again, op, async_op=True, block_size=case.block)
        assert work is not None
        work.wait()
        assert torch.equal(bits(again), got), case


def moved_bytes(context: Context, density: float) -> dict[str, Any]:
    """What one call moves, beside the formula of docs/guides/sparse.md."""
    case = Case(256 * 64 * 3 * context.world_size, density=density, seed=3)
    data = placed(case, values(case, context.rank, context.world_size))
    fusedpg.stats(reset=True)
    fusedpg.sparse_all_reduce(data, block_size=case.block)
    found = fusedpg.stats()["sparse_all_reduce"]
    masks = [present(case, rank, context.world_size) for rank in range(context.world_size)]
    union = torch.stack(masks).any(0)
    assert found["calls"] == 1
    assert found["blocks"] == len(union)
    assert found["blocks_union"] == int(union.sum())
    assert found["blocks_present"] == int(masks[context.rank].sum())
    assert found["union_density"] == float(union.double().mean())
    names: list[Any] = [None] * context.world_size
    dist.all_gather_object(names, os.environ.get("FUSEDPG_HOST_ID", ""))
    # In shared memory ranks read for themselves, as hosts of one rank each.
    alone = len(set(names)) == 1
    hosts = list(range(context.world_size)) if alone else names
    here = [rank for rank, host in enumerate(hosts) if host == hosts[context.rank]]
    mine = torch.stack([masks[rank] for rank in here]).any(0).double().mean()
    away = 1 - len(here) / context.world_size
    results = union.double().mean() * (len(set(hosts)) - 1) / context.world_size
    return found | {
        "formula": float(mine / len(here) * away + results) * data.nbytes,
        "bitmaps": 2 * len(union) / 8 * (context.world_size - 1),
    }


def bitmap_cases() -> dict[str, Any]:
    """Hypothesis' strategies for the cases of obeys_bitmap()."""
    import hypothesis.strategies as st  # not in workers

    return {
        "numel": st.one_of(st.integers(0, 600), st.integers(0, 60_000)),
        "block": st.sampled_from([32, 100, 256, 4096, 65536]),
        "density": st.sampled_from([0.0, 0.1, 0.5, 1.0]),
        "dtype": st.sampled_from(list(DTYPES)),
        "average": st.booleans(),
        "strided": st.booleans(),
        "async_op": st.booleans(),
        "looks": st.sampled_from([(), (0,), (1, 2)]),
        "seed": st.integers(0, 1000),
    }


def obeys_bitmap(context: Context, case: dict[str, Any]) -> None:
    """The sum of the blocks that bitmaps name, whatever the others hold. Ranks in `looks` have no
    bitmap, and send what is not zero."""
    size, rank, block, numel = context.world_size, context.rank, case["block"], case["numel"]
    dtype = DTYPES[case["dtype"]]
    blocks = -(-numel // block)
    everything, left = [], []
    for r in range(size):
        draw = torch.Generator().manual_seed(31 * case["seed"] + r)
        data = torch.randint(-8, 9, (numel,), generator=draw).to(dtype)
        data *= (torch.rand(blocks, generator=draw) < 0.5).repeat_interleave(block)[:numel]
        bitmap = torch.rand(blocks, generator=draw) < case["density"]
        chosen = bitmap.repeat_interleave(block)[:numel]
        counts = data if r in case["looks"] else torch.where(chosen, data, torch.zeros_like(data))
        if r not in case["looks"] and dtype.is_floating_point:
            data = torch.where(chosen, data, torch.full_like(data, float("nan")))
        everything.append(counts)
        left.append((data, None if r in case["looks"] else bitmap))
    want = torch.stack([one.double() for one in everything]).sum(0)
    if case["average"]:
        want = want / size if dtype.is_floating_point else (want / size).trunc()
    data, bitmap = left[rank]
    t = torch.stack([data, data], 1)[:, 0] if case["strided"] else data.clone()
    op = dist.ReduceOp.AVG if case["average"] else dist.ReduceOp.SUM
    before = None if bitmap is None else bitmap.clone()
    work = fusedpg.sparse_all_reduce(
        t, op, async_op=case["async_op"], block_size=block, bitmap=bitmap
    )
    if work is not None:
        work.wait()
    near = 1e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-6
    exact = 0.0 if not case["average"] or not dtype.is_floating_point else near
    torch.testing.assert_close(t.double(), want, rtol=exact, atol=0)
    assert bitmap is None or torch.equal(bitmap, before)
    digests: list[Any] = [None] * size
    dist.all_gather_object(digests, digest([bits(t)]))
    assert len(set(digests)) == 1


_alone: dict[int, Any] = {}


def context_group(context: Context) -> Any:
    """A group of this rank only."""
    if id(context) not in _alone:
        groups = [dist.new_group([rank]) for rank in range(context.world_size)]
        _alone[id(context)] = groups[context.rank]
    return _alone[id(context)]


def new_group(**options: Any) -> Any:
    return dist.new_group(pg_options=fusedpg.Options(**options))


def by_option(context: Context, mode: str) -> dict[str, int]:
    """Plain all_reduce in a group that skips; returns the calls by path."""
    group = new_group(block_skip=mode, block_size=128)
    for step in range(20):
        for density in (0.02, 1.0):
            numel = 100_000 if density < 1 else 90_000
            case = Case(numel, 128, density, arena=step % 2 == 0, seed=step)
            data = values(case, context.rank, context.world_size)
            want = data.clone()
            dist.all_reduce(want, group=context.oracle)
            got = placed(case, data)
            dist.all_reduce(got, group=group)
            assert torch.equal(got, want)
    paths: dict[str, int] = fusedpg.stats(group)["all_reduce"]["paths"]
    dist.destroy_process_group(group)
    return paths


def equals_oracle(context: Context, *cases: Case) -> None:
    """Plain all_reduce in the default group, which leaves it to its delegate."""
    fusedpg.stats(reset=True)
    for case in cases:
        data = placed(case, values(case, context.rank, context.world_size))
        want = data.clone()
        dist.all_reduce(want, group=context.oracle)
        dist.all_reduce(data)
        assert torch.equal(bits(data), bits(want)), case
    assert "all_reduce" not in fusedpg.stats()


class Words(nn.Module):
    """A large embedding of which a batch uses few rows, and a small dense part."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(4000, 32, mode="mean", sparse=sparse)
        self.out = nn.Linear(32, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.table(words))
        return result


def train_words(
    context: Context,
    group: Any,
    *,
    sparse: bool = False,
    state: Any = None,
    steps: int = 8,
    bucket_cap_mb: float = 0.3,
) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    module = Words(sparse)
    ddp = DistributedDataParallel(module, process_group=group, bucket_cap_mb=bucket_cap_mb)
    if state is not None:
        from fusedpg.ddp import block_sparse_hook

        ddp.register_comm_hook(state, block_sparse_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + context.rank)
        target = torch.randint(0, 5, (16,), generator=generator)
        words = torch.randint(0, 60, (16, 6), generator=generator) + 60 * target[:, None]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(words), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [p.detach().clone() for p in module.parameters()]


def hook_without_threshold(context: Context) -> str:
    from fusedpg.ddp import BlockSparseState

    want = train_words(context, None)
    got = train_words(context, None, state=BlockSparseState(block_size=32))
    assert got[0] == want[0]
    for mine, other in zip(got[1], want[1], strict=True):
        assert torch.equal(mine, other)
    return digest(got[1])


def hook_with_threshold(context: Context) -> str:
    """It skips, keeps what it skipped through DDP's rebuilt buckets, and learns."""
    from fusedpg.ddp import BlockSparseState

    exact, _ = train_words(context, None, steps=30)
    state = BlockSparseState(block_size=32, threshold=2e-3)
    fusedpg.stats(reset=True)
    losses, parameters = train_words(context, None, state=state, steps=30, bucket_cap_mb=0.0001)
    found = fusedpg.stats()["sparse_all_reduce"]
    assert found["density"] < 0.1
    flats = state._residuals._flats["residual"]
    assert any(bool(flat.tensor.any()) for flat in flats)
    assert sum(losses[-5:]) < sum(losses[:5])
    assert abs(sum(losses[-5:]) - sum(exact[-5:])) < 0.1 * sum(exact[-5:])
    return digest(parameters)


# --- fused optimizer steps -------------------------------------------------------------

STEPS: dict[str, dict[str, Any]] = {
    "sgd": {"op": "sgd"},
    "adam": {"op": "adam"},
    "adamw": {"op": "adamw"},
    "amsgrad": {"op": "adamw", "hyper": (("amsgrad", True),)},
}
SIZES = (70_001, 5, 0, 4096, 12_345)


def after_steps(context: Context, run: Run, block_skip: bool) -> list[torch.Tensor]:
    """Parameters and state after three steps."""
    model = Model(context, run)
    for step in range(3):
        model.set_gradients(step)
        model.step(block_skip=block_skip)
    return model.state()


def fused_steps(context: Context, name: str, kind: str) -> None:
    for memory in ("ordinary", "arena", "mixed"):
        for density in (0.02, 0.5, 1.0):
            run = Run(
                **STEPS[name],
                shapes=tuple((size,) for size in SIZES),
                dtypes=(DTYPES[kind],),
                master=kind != "fp32",
                memory=memory,
                present=density,
            )
            want = after_steps(context, run, block_skip=False)
            fusedpg.stats(reset=True)
            got = after_steps(context, run, block_skip=True)
            for mine, other in zip(got, want, strict=True):
                assert torch.equal(bits(mine), bits(other))
            if context.world_size == 1:
                continue
            if "cuda_path" in fusedpg.group_info():
                path = fusedpg.group_info()["cuda_path"]
                assert path == ("direct" if memory == "arena" else "stock")
                continue
            found = fusedpg.stats()[f"fused_{run.op}_"]
            assert found["paths"] == {"block_sparse": 3}
            assert abs(found["density"] - density) < 0.1
            if not context.one_host and fusedpg.group_info()["local_world_size"] == 1:
                # Gradients go to their owners, large ones by blocks; parameters to all.
                size = torch.empty((), dtype=DTYPES[kind]).element_size()
                large, small = max(SIZES), sum(SIZES) - max(SIZES)
                sent = (large * (density + 1) + small * 2) * size
                share = (context.world_size - 1) / context.world_size
                assert found["bytes_sent"] == pytest.approx(3 * share * sent, rel=0.1, abs=20_000)


# --- torch.sparse_coo ------------------------------------------------------------


def coordinates(context: Context, dtype: str, op: str) -> str:
    digests = []
    for entries in (0, 1, 40):
        for sizes, dims in (((50, 3), 1), ((7, 9, 4), 2), ((200,), 1)):
            generator = torch.Generator().manual_seed(10 * entries + context.rank)
            mine = entries if context.rank != 1 else entries // 2
            indices = torch.stack(
                [torch.randint(0, sizes[d], (mine,), generator=generator) for d in range(dims)]
            )
            shape = (mine, *sizes[dims:])
            data = torch.randint(-9, 10, shape, generator=generator).to(DTYPES[dtype])
            tensor = torch.sparse_coo_tensor(indices, data, sizes)
            want = tensor.to_dense()
            dist.all_reduce(want, getattr(dist.ReduceOp, op))
            dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
            assert tensor.is_coalesced()
            assert torch.equal(tensor.to_dense(), want)
            digests += [tensor.indices(), tensor.values()]
    return digest(digests)


# --- errors ------------------------------------------------------------------------


def refused_on_gpus(context: Context) -> None:
    """Also where DDP's hook asks for it; the group works on."""
    tensor = torch.ones(10_000)
    net = DistributedDataParallel(nn.Linear(4, 4))
    net.register_comm_hook(fusedpg.ddp.BlockSparseState(), fusedpg.ddp.block_sparse_hook)
    for call in (
        lambda: fusedpg.sparse_all_reduce(tensor),
        lambda: fusedpg.sparse_all_reduce(
            tensor, threshold=0.5, residual=torch.zeros(10_000), async_op=True
        ),
        lambda: net(torch.ones(2, 4)).sum().backward(),
    ):
        text = "call all_reduce, or move it to the CPU"
        with pytest.raises((ValueError, RuntimeError), match=text):
            call()
    assert torch.equal(tensor, torch.ones(10_000))
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((10_000,), float(context.world_size)))


def refuses_coalescing(context: Context) -> None:
    """Of tensors on a GPU: it would wait for what is held back."""
    tensor = torch.ones(10_000)
    sgd = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0}
    flags = {"nesterov": False, "is_first_step": True}
    with (
        pytest.raises(ValueError, match="coalesced"),
        dist._coalescing_manager(device=tensor.device),
    ):
        fusedpg.fused_sgd_([tensor], [tensor.clone()], [], **sgd, **flags)
    # That has ended the region, which torch's manager does not.
    dist.all_reduce(tensor.clone())
    dist.distributed_c10d._world.pg_coalesce_state.clear()
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((10_000,), float(context.world_size)))


def disagreement(context: Context, what: str) -> None:
    data = torch.ones(100_000)
    calls = {
        "block": lambda r: fusedpg.sparse_all_reduce(data, block_size=64 << r),
        "size": lambda r: fusedpg.sparse_all_reduce(data[: 100_000 - r]),
        "operation": lambda r: dist.all_reduce(data) if r else fusedpg.sparse_all_reduce(data),
    }
    with pytest.raises(dist.DistBackendError, match=r"disagree|called something else"):
        calls[what](min(context.rank, 1))
