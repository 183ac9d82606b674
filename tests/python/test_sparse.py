"""Reductions that skip zeros: blocks of dense tensors, and torch.sparse_coo."""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist

import fusedpg
import harness
from checks import fused_ops, sparse
from checks.cases import digest
from checks.sparse import Case
from harness import Context, on_ranks

pytestmark = pytest.mark.fused_only

DENSITIES = (1.0, 0.8, 0.4, 0.2, 0.1, 0.08, 0.04, 0.02, 0.01, 0.0)


@pytest.fixture(params=["one host", *harness.HOSTS])
def ranks(request: pytest.FixtureRequest) -> harness.Workers:
    """Ranks of one machine, and of several, whose data take other ways."""
    return harness.pool(3) if request.param == "one host" else harness.pool_of_hosts(request.param)


def test_equals_dense(workers: harness.Workers) -> None:
    for density in DENSITIES:
        cases = [
            Case(numel, density=density, overlap=overlap, arena=arena, special=True, seed=numel)
            for numel in (100_003, 255)
            for overlap in ("random", "full", "none")
            for arena in (False, True)
        ]
        workers.run(sparse.equals_dense, *cases)


@hypothesis.given(
    numel=st.integers(0, 60_000) | st.sampled_from([70_001, 400_003]),
    block=st.integers(32, 5000) | st.sampled_from([4096, 65536]),
    density=st.sampled_from(DENSITIES),
    overlap=st.sampled_from(["random", "full", "none"]),
    dtype=st.sampled_from(list(sparse.DTYPES)),
    average=st.booleans(),
    arena=st.booleans(),
    offset=st.integers(0, 40),
    seed=st.integers(0, 1000),
)
@hypothesis.settings(max_examples=50)
def test_any_case(ranks: harness.Workers, average: bool, **case: Any) -> None:
    op = "AVG" if average and case["dtype"] in ("fp64", "fp32") else "SUM"
    ranks.run(sparse.equals_dense, Case(op=op, **case))


@pytest.mark.parametrize("density", [0.01, 0.1, 0.3])
def test_moved_bytes(ranks: harness.Workers, density: float) -> None:
    answers = ranks.run(sparse.moved_bytes, density)
    for key in ("bytes_sent", "bytes_received"):
        moved = sum(answer[key] for answer in answers)
        formula = sum(answer["formula"] for answer in answers)
        bitmaps = sum(answer["bitmaps"] for answer in answers)
        assert 0.98 * formula <= moved <= 1.02 * formula + bitmaps + 400 * len(answers) ** 2


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@on_ranks(3, *harness.HOSTS)
def test_keeps_what_it_does_not_send(context: Context, dtype: str) -> None:
    """Sums of all that went in and all that came out or is left are equal."""
    numel, block, threshold = 5003, 64, 0.05
    generator = torch.Generator().manual_seed(context.rank)
    residual = torch.zeros(numel, dtype=sparse.DTYPES[dtype])
    hosts: list[Any] = [None] * context.world_size
    dist.all_gather_object(hosts, os.environ.get("FUSEDPG_HOST_ID", ""))
    for _ in range(5):
        scale = torch.rand(-(-numel // block), generator=generator).pow(6)
        data = torch.randn(numel, generator=generator)
        data = (data * scale.repeat_interleave(block)[:numel]).to(sparse.DTYPES[dtype])
        total = data + residual
        sent = data.clone()
        # What this rank alone sends: seen in a group of its own.
        alone = residual.clone()
        fusedpg.sparse_all_reduce(
            sent,
            group=sparse.context_group(context),
            block_size=block,
            threshold=threshold,
            residual=alone,
        )
        fusedpg.sparse_all_reduce(data, block_size=block, threshold=threshold, residual=residual)
        assert torch.equal(residual, alone)
        assert torch.equal(sent + residual, total)
        chunks = residual.split(block)
        assert all(float(chunk.abs().max()) <= threshold for chunk in chunks)
        assert any(bool(chunk.any()) for chunk in chunks)
        everything = [torch.empty_like(sent) for _ in range(context.world_size)]
        dist.all_gather(everything, sent)
        # In rank order, host by host, and rounded once.
        sums: dict[str, torch.Tensor] = {}
        for host, one in zip(hosts, everything):
            sums[host] = sums[host] + one.float() if host in sums else one.float()
        want = sum(sums.values())
        assert torch.equal(data, want.to(data.dtype))


@hypothesis.given(**sparse.bitmap_cases())
@hypothesis.example(
    numel=1, block=32, density=1.0, dtype="int64", average=False, strided=True,
    async_op=False, looks=(), seed=0,
)  # fmt: skip
@hypothesis.settings(
    max_examples=40, deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)  # fmt: skip
def test_bitmap(ranks: harness.Workers, **case: Any) -> None:
    ranks.run(sparse.obeys_bitmap, case)


@on_ranks(1)
def test_bitmap_of_one_rank(context: Context) -> None:
    """Of one rank, too, what a bitmap leaves out counts as zeros."""
    del context
    data = torch.ones(100)
    bitmap = torch.tensor([True, False, True, False])
    fusedpg.sparse_all_reduce(data, block_size=32, bitmap=bitmap)
    assert data.tolist() == [1.0] * 32 + [0.0] * 32 + [1.0] * 32 + [0.0] * 4


@pytest.mark.slow
@on_ranks(2)
def test_bitmap_of_many_blocks(context: Context) -> None:
    """More blocks than fit a staging buffer: they are looked at in larger ones."""
    block, blocks = 32, 4_300_000
    draw = torch.Generator().manual_seed(context.rank)
    bitmaps = [
        torch.rand(blocks, generator=torch.Generator().manual_seed(rank)) < 0.001
        for rank in range(context.world_size)
    ]
    data = torch.randint(1, 9, (block * blocks,), generator=draw, dtype=torch.int32)
    want = data * bitmaps[context.rank].repeat_interleave(block)
    dist.all_reduce(want, group=context.oracle)
    fusedpg.sparse_all_reduce(data, block_size=block, bitmap=bitmaps[context.rank])
    assert torch.equal(data, want)


@pytest.mark.parametrize("mode", ["off", "auto", "on"])
def test_by_option(ranks: harness.Workers, mode: str) -> None:
    for paths in ranks.run(sparse.by_option, mode):
        skipped = paths.get("block_sparse", 0)
        assert sum(paths.values()) == 40
        assert skipped == {"off": 0, "auto": 19}.get(mode, skipped)
        assert mode != "on" or skipped >= 20


@on_ranks(3, *harness.HOSTS)
def test_unchanged_ddp(context: Context) -> str:
    """DDP on a group that skips is DDP on one that does not, bit for bit.

    Between hosts Gloo adds more than two ranks in another order.
    """
    close = 0.0 if context.one_host or context.world_size == 2 else 1e-5
    digests = []
    off = sparse.new_group()
    want = sparse.train_words(context, off)
    for mode in ("on", "auto"):
        group = sparse.new_group(block_skip=mode, block_size=32)
        losses, parameters = sparse.train_words(context, group)
        torch.testing.assert_close(losses, want[0], rtol=close, atol=close)
        torch.testing.assert_close(parameters, want[1], rtol=close, atol=close)
        assert fusedpg.stats(group)["all_reduce"]["paths"].get("block_sparse", 0) > 3
        dist.destroy_process_group(group)
        digests += parameters
    dist.destroy_process_group(off)
    return digest(digests)


def test_hook(workers: harness.Workers) -> None:
    assert len(set(workers.run(sparse.hook_without_threshold))) == 1
    assert len(set(workers.run(sparse.hook_with_threshold))) == 1


@on_ranks(2)
def test_residuals_follow_parameters(context: Context) -> None:
    """When DDP rebuilds its buckets, what was kept of a parameter goes with it."""
    from fusedpg.ddp import BlockSparseState

    class Bucket:
        def __init__(self, index: int, parameters: list[torch.Tensor]) -> None:
            self._index, self._parameters = index, parameters
            self._buffer = torch.zeros(sum(p.numel() for p in parameters))

        def index(self) -> int:
            return self._index

        def parameters(self) -> list[torch.Tensor]:
            return self._parameters

        def buffer(self) -> torch.Tensor:
            return self._buffer

    a, b, c = (torch.zeros(n) for n in (3, 4, 5))
    state = BlockSparseState(threshold=1.0)
    state.residual(Bucket(0, [a, b])).copy_(torch.arange(7.0))  # type: ignore[arg-type]
    state.residual(Bucket(1, [c])).copy_(torch.arange(7.0, 12.0))  # type: ignore[arg-type]
    first = state.residual(Bucket(0, [c, a]))  # type: ignore[arg-type]
    assert first.tolist() == [7, 8, 9, 10, 11, 0, 1, 2]
    second = state.residual(Bucket(1, [b]))  # type: ignore[arg-type]
    assert second.tolist() == [3, 4, 5, 6]
    assert state.residual(Bucket(0, [c, a])) is first  # type: ignore[arg-type]
    del context


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("name", sparse.STEPS)
def test_fused_steps(workers: harness.Workers, name: str, kind: str) -> None:
    workers.run(sparse.fused_steps, name, kind)


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("hosts", ["two", "three", "two of two"])
def test_fused_steps_across_hosts(hosts: str, name: str, kind: str) -> None:
    harness.pool_of_hosts(hosts).run(sparse.fused_steps, name, kind)


@on_ranks("three")
def test_fused_disagreement_across_hosts(context: Context) -> None:
    """Some ranks skip zeros and some do not, or they call different steps."""
    param, grad = torch.ones(100_000), torch.ones(100_000)
    length = fusedpg.shard_range(100_000, context.world_size, context.rank)[1]
    moments = [torch.zeros(length)], [torch.zeros(length)]
    arguments = ([param], [grad], *moments, [], [torch.zeros(())])
    hyper = fused_ops.HYPERS["adamw"]
    for agreed, block_skip in ((False, context.rank == 0), (True, True), (True, False)):
        before = param.clone()
        try:
            fusedpg.fused_adamw_(*arguments, **hyper, block_skip=block_skip)
        except dist.DistBackendError as error:
            assert not agreed and "ranks disagree" in str(error), error
            assert torch.equal(param, before)
        else:
            assert agreed and param.ne(before).all()
    before = param.clone()
    lamb = [part for part in arguments if part]  # without max_exp_avg_sqs
    with pytest.raises(dist.DistBackendError, match="ranks disagree"):
        if context.rank == 0:
            fusedpg.fused_adamw_(*arguments, **hyper)
        else:
            fusedpg.fused_lamb_(*lamb, **hyper)
    assert torch.equal(param, before)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [*((dtype, "SUM") for dtype in ("fp32", "bf16", "int64")),
     *((dtype, "AVG") for dtype in ("fp64", "int64", "int32"))],
)  # fmt: skip
@on_ranks(1, 2, 3, harness.slow(4), "two", "crossed")
def test_coordinates(context: Context, dtype: str, op: str) -> str:
    return sparse.coordinates(context, dtype, op)


@on_ranks(2, 3)
def test_mean_of_integer_coordinates(context: Context) -> None:
    """It is truncated, and exact where no floating-point number is."""
    world = context.world_size
    mine = [-1, 1 - context.rank, 2**60 + context.rank, -(2**60) - 3 * context.rank]
    tensor = torch.sparse_coo_tensor(torch.arange(4)[None], torch.tensor(mine), (5,))
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    ranks = world * (world - 1) // 2
    sums = [-world, world - ranks, world * 2**60 + ranks, -world * 2**60 - 3 * ranks]
    expected = [abs(total) // world * (1 if total > 0 else -1) for total in sums]
    assert tensor.to_dense().tolist() == [*expected, 0]


@on_ranks(1, 2, 3, harness.slow(4))
def test_coordinates_move_entries(context: Context) -> None:
    """What travels grows with the entries, not with the size of the tensor."""
    for entries in (10, 1000):
        indices = torch.arange(entries).mul(37)[None]
        tensor = torch.sparse_coo_tensor(indices, torch.ones(entries, 4), (10_000_000, 4))
        fusedpg.stats(reset=True)
        dist.all_reduce(tensor)
        found = fusedpg.stats()["all_reduce"]
        assert found["paths"] == {"coordinates": 1}
        assert found["bytes_sent"] == entries * (8 + 16) * (context.world_size - 1)


OTHERS = {
    "sizes": torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (11, 2)),
    "dtypes": torch.sparse_coo_tensor([[1]], torch.ones(1, 2, dtype=torch.int32), (10, 2)),
    "sparse dimensions": torch.sparse_coo_tensor([[1], [0]], torch.ones(1), (10, 2)),
}


@pytest.mark.parametrize("what", OTHERS)
@on_ranks(2)
def test_coordinates_that_differ(context: Context, what: str) -> None:
    tensor = torch.sparse_coo_tensor([[1]], torch.ones(1, 2), (10, 2))
    tensor = (tensor if context.rank == 0 else OTHERS[what]).coalesce()
    text = "sizes, dtypes or sparse dimensions differ"
    with pytest.raises(dist.DistBackendError, match=text):
        dist.all_reduce(tensor)
    dist.barrier()


@on_ranks(3, *harness.HOSTS)
def test_sparse_embedding(context: Context) -> str:
    """DDP with EmbeddingBag(sparse=True) gives what the dense gradient gives."""
    want = sparse.train_words(context, None)
    got = sparse.train_words(context, None, sparse=True)
    torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(want[0]))
    for mine, other in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(mine, other)
    return digest(got[1])


@on_ranks(2)
def test_wrong_arguments(context: Context) -> None:
    del context
    data = torch.zeros(100_000)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"block_size": 31}, "block_size"),
        ({"block_size": 65537}, "block_size"),
        ({"threshold": -1.0}, "negative"),
        ({"threshold": 0.1}, "residual"),
        ({"residual": torch.zeros(100_000)}, "residual"),
        ({"threshold": 0.1, "residual": torch.zeros(5)}, "residual"),
        ({"op": dist.ReduceOp.MAX}, "SUM and AVG"),
        ({"bitmap": torch.ones(390, dtype=torch.bool)}, "391 bools"),
        ({"bitmap": torch.ones(391, dtype=torch.uint8)}, "391 bools"),
        ({"bitmap": torch.ones(2 * 391, dtype=torch.bool)[::2]}, "contiguous"),
        ({"bitmap": torch.ones(391, dtype=torch.bool, device="meta")}, "where the tensor is"),
        (
            {
                "bitmap": torch.ones(391, dtype=torch.bool),
                "threshold": 0.1,
                "residual": torch.zeros(100_000),
            },
            "either a threshold or a bitmap",
        ),
    ]
    for options, text in wrong:
        with pytest.raises(ValueError, match=text):
            fusedpg.sparse_all_reduce(data, **options)
    dist.barrier()


@pytest.mark.parametrize("what", ["block", "size", "operation"])
def test_disagreement(pair: harness.Workers, what: str) -> None:
    pair.run(sparse.disagreement, what)


@pytest.mark.parametrize("what", ["block", "size"])
def test_disagreement_across_hosts(what: str) -> None:
    for _ in range(2):  # the group stays usable
        harness.pool_of_hosts("three").run(sparse.disagreement, what)
    harness.pool_of_hosts("three").run(sparse.equals_dense, Case(100_003))


@pytest.mark.parametrize(
    "options",
    [{"block_skip": "on"}, {"block_size": 64}, {"order": "flat"}, {"aggregate": "on"},
     {"aggregate_rates": "1,2"}, {"aggregate_message_bytes": 8192}],
    ids=str,
)  # fmt: skip
@on_ranks(3, *harness.HOSTS)
def test_options_are_compared(context: Context, options: dict[str, Any]) -> None:
    """Rank 0 has options that the others do not; no group comes of it, on no rank."""
    ((name, value),) = options.items()
    with pytest.raises(dist.DistBackendError, match="ranks have different settings") as raised:
        group = sparse.new_group(**(options if context.rank == 0 else {}))
        dist.all_reduce(torch.ones(100_000), group=group)
    assert f"{name}={value}" in str(raised.value)
    agreeing = sparse.new_group(**options)
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor, group=agreeing)
    assert torch.equal(tensor, torch.full_like(tensor, context.world_size))


@pytest.mark.parametrize(
    "options", [{"block_skip": "sometimes"}, {"block_size": 16}, {"block_size": 100_000}]
)
def test_wrong_options(options: dict[str, object]) -> None:
    import torch.distributed as dist

    store = dist.HashStore()
    with pytest.raises(ValueError, match=next(iter(options))):
        fusedpg.ProcessGroupFused(store, 0, 1, fusedpg.Options(**options))  # type: ignore[arg-type]
