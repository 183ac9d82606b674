"""One call of each collective, and what it must give."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from checks.cases import (
    COMPLEX,
    GLOO,
    Case,
    Placed,
    close,
    count,
    logical,
    reduce_op,
    reference,
    same,
    shape_of,
)
from harness import Context

Tensors = list[torch.Tensor]

# torch announces its own renamings, once per process and call.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def finish(work: Any, case: Case) -> None:
    """Waits for an asynchronous call; a synchronous one gives no handle."""
    if case.async_op:
        assert work is not None
        work.wait()
    else:
        assert work is None


def everyone(context: Context, case: Case) -> Tensors:
    """The inputs of all ranks."""
    return [logical(case, rank) for rank in range(context.world_size)]


def outputs(context: Context, case: Case, like: Tensors) -> list[Placed]:
    """Places for results: the layout of the case, contents that must go."""
    return [Placed(context, case, torch.zeros_like(tensor)) for tensor in like]


def unplaced(placed: list[Placed]) -> Tensors:
    for one in placed:
        one.guarded()
    return [one.tensor for one in placed]


def run_broadcast(context: Context, case: Case, group: Any) -> Tensors:
    placed = Placed(context, case, logical(case, context.rank))
    finish(dist.broadcast(placed.tensor, case.root, group, case.async_op), case)
    return unplaced([placed])


def expect_broadcast(context: Context, case: Case) -> Tensors:
    return [logical(case, case.root)]


def run_all_reduce(context: Context, case: Case, group: Any) -> Tensors:
    placed = Placed(context, case, logical(case, context.rank))
    op = reduce_op(case.redop)
    finish(dist.all_reduce(placed.tensor, op, group, case.async_op), case)
    return unplaced([placed])


def expect_all_reduce(context: Context, case: Case) -> Tensors:
    return [reference(case.redop, everyone(context, case))]


def run_reduce(context: Context, case: Case, group: Any) -> Tensors:
    placed = Placed(context, case, logical(case, context.rank))
    op = reduce_op(case.redop)
    finish(dist.reduce(placed.tensor, case.root, op, group, case.async_op), case)
    return unplaced([placed] if context.rank == case.root else [])


def expect_reduce(context: Context, case: Case) -> Tensors:
    return expect_all_reduce(context, case) if context.rank == case.root else []


def run_all_gather(context: Context, case: Case, group: Any) -> Tensors:
    placed = Placed(context, case, logical(case, context.rank))
    out = outputs(context, case, everyone(context, case))
    finish(dist.all_gather([one.tensor for one in out], placed.tensor, group, case.async_op), case)
    placed.untouched()
    return unplaced(out)


def uneven_sizes(context: Context, case: Case) -> list[int]:
    """A different size for each rank, one of them zero if the case is small."""
    return [max(count(case) // 2 + 7 * rank - 3, 0) for rank in range(context.world_size)]


def run_all_gather_uneven(context: Context, case: Case, group: Any) -> Tensors:
    like = expect_all_gather_uneven(context, case)
    placed = Placed(context, case, like[context.rank])
    out = outputs(context, case, like)
    finish(dist.all_gather([one.tensor for one in out], placed.tensor, group, case.async_op), case)
    placed.untouched()
    return unplaced(out)


def expect_all_gather_uneven(context: Context, case: Case) -> Tensors:
    sizes = uneven_sizes(context, case)
    return [logical(case, rank, (size,)) for rank, size in enumerate(sizes)]


def run_all_gather_into_tensor(context: Context, case: Case, group: Any) -> Tensors:
    placed = Placed(context, case, logical(case, context.rank))
    like = torch.cat(everyone(context, case))
    out = Placed(context, case, torch.zeros_like(like), layout="contiguous")
    finish(dist.all_gather_into_tensor(out.tensor, placed.tensor, group, case.async_op), case)
    placed.untouched()
    return unplaced([out])


def expect_all_gather_into_tensor(context: Context, case: Case) -> Tensors:
    return [torch.cat(everyone(context, case))]


def part(case: Case, source: int, target: int, shape: Any = None) -> torch.Tensor:
    """What `source` has for `target` in the all-to-all family."""
    seed = case.seed * 64 + target
    return logical(dataclasses.replace(case, seed=seed), source, shape)


def run_reduce_scatter(context: Context, case: Case, group: Any) -> Tensors:
    ranks = range(context.world_size)
    placed = [Placed(context, case, part(case, context.rank, rank)) for rank in ranks]
    out = outputs(context, case, [part(case, 0, context.rank)])
    inputs = [one.tensor for one in placed]
    op = reduce_op(case.redop)
    finish(dist.reduce_scatter(out[0].tensor, inputs, op, group, case.async_op), case)
    for one in placed:
        one.untouched()
    return unplaced(out)


def expect_reduce_scatter(context: Context, case: Case) -> Tensors:
    ranks = range(context.world_size)
    return [reference(case.redop, [part(case, rank, context.rank) for rank in ranks])]


def run_reduce_scatter_uneven(context: Context, case: Case, group: Any) -> Tensors:
    sizes = uneven_sizes(context, case)
    placed = [
        Placed(context, case, part(case, context.rank, rank, (size,)))
        for rank, size in enumerate(sizes)
    ]
    out = outputs(context, case, expect_reduce_scatter_uneven(context, case))
    inputs = [one.tensor for one in placed]
    op = reduce_op(case.redop)
    finish(dist.reduce_scatter(out[0].tensor, inputs, op, group, case.async_op), case)
    for one in placed:
        one.untouched()
    return unplaced(out)


def expect_reduce_scatter_uneven(context: Context, case: Case) -> Tensors:
    shape = (uneven_sizes(context, case)[context.rank],)
    ranks = range(context.world_size)
    return [reference(case.redop, [part(case, rank, context.rank, shape) for rank in ranks])]


def run_reduce_scatter_tensor(context: Context, case: Case, group: Any) -> Tensors:
    ranks = range(context.world_size)
    whole = torch.cat([part(case, context.rank, rank) for rank in ranks])
    placed = Placed(context, case, whole, layout="contiguous")
    out = outputs(context, case, [part(case, 0, context.rank)])
    op = reduce_op(case.redop)
    finish(
        dist.reduce_scatter_tensor(out[0].tensor, placed.tensor, op, group, case.async_op),
        case,
    )
    placed.untouched()
    return unplaced(out)


def run_gather(context: Context, case: Case, group: Any) -> Tensors:
    placed = Placed(context, case, logical(case, context.rank))
    root = context.rank == case.root
    out = outputs(context, case, everyone(context, case)) if root else []
    lists = [one.tensor for one in out] if root else None
    finish(dist.gather(placed.tensor, lists, case.root, group, case.async_op), case)
    placed.untouched()
    return unplaced(out)


def expect_gather(context: Context, case: Case) -> Tensors:
    return everyone(context, case) if context.rank == case.root else []


def run_scatter(context: Context, case: Case, group: Any) -> Tensors:
    root = context.rank == case.root
    placed = [Placed(context, case, one) for one in everyone(context, case)] if root else []
    lists = [one.tensor for one in placed] if root else None
    out = outputs(context, case, [logical(case, 0)])
    finish(dist.scatter(out[0].tensor, lists, case.root, group, case.async_op), case)
    for one in placed:
        one.untouched()
    return unplaced(out)


def expect_scatter(context: Context, case: Case) -> Tensors:
    return [logical(case, context.rank)]


def run_all_to_all(context: Context, case: Case, group: Any) -> Tensors:
    ranks = range(context.world_size)
    sizes = [(count(case) + rank,) for rank in ranks]
    placed = [
        Placed(context, case, part(case, context.rank, rank, sizes[context.rank])) for rank in ranks
    ]
    out = outputs(context, case, [part(case, rank, context.rank, sizes[rank]) for rank in ranks])
    finish(
        dist.all_to_all(
            [one.tensor for one in out], [one.tensor for one in placed], group, case.async_op
        ),
        case,
    )
    for one in placed:
        one.untouched()
    return unplaced(out)


def expect_all_to_all(context: Context, case: Case) -> Tensors:
    ranks = range(context.world_size)
    return [part(case, rank, context.rank, (count(case) + rank,)) for rank in ranks]


def run_all_to_all_single(context: Context, case: Case, group: Any) -> Tensors:
    ranks = range(context.world_size)
    whole = torch.cat([part(case, context.rank, rank) for rank in ranks])
    placed = Placed(context, case, whole, layout="contiguous")
    out = Placed(context, case, torch.zeros_like(whole), layout="contiguous")
    finish(
        dist.all_to_all_single(out.tensor, placed.tensor, group=group, async_op=case.async_op),
        case,
    )
    placed.untouched()
    return unplaced([out])


def expect_all_to_all_single(context: Context, case: Case) -> Tensors:
    ranks = range(context.world_size)
    return [torch.cat([part(case, rank, context.rank) for rank in ranks])]


def split(case: Case, source: int, target: int) -> int:
    """How many rows `source` sends to `target`; zero for some."""
    return (case.numel // 5 + 1) * ((source + 2 * target + case.seed) % 3)


def rows(case: Case, source: int, target: int) -> torch.Tensor:
    return part(case, source, target, (split(case, source, target), 5))


def run_all_to_all_uneven(context: Context, case: Case, group: Any) -> Tensors:
    ranks = range(context.world_size)
    whole = torch.cat([rows(case, context.rank, rank) for rank in ranks])
    placed = Placed(context, case, whole, layout="contiguous")
    like = expect_all_to_all_uneven(context, case)[0]
    out = Placed(context, case, torch.zeros_like(like), layout="contiguous")
    finish(
        dist.all_to_all_single(
            out.tensor,
            placed.tensor,
            [split(case, rank, context.rank) for rank in ranks],
            [split(case, context.rank, rank) for rank in ranks],
            group,
            case.async_op,
        ),
        case,
    )
    placed.untouched()
    return unplaced([out])


def expect_all_to_all_uneven(context: Context, case: Case) -> Tensors:
    ranks = range(context.world_size)
    return [torch.cat([rows(case, rank, context.rank) for rank in ranks])]


def several(context: Context, case: Case) -> list[Tensors]:
    """Three tensors per rank, for the coalesced forms."""
    cases = [
        dataclasses.replace(case, seed=case.seed + 7 * i, numel=case.numel // (i + 1), layout="x")
        for i in range(3)
    ]
    return [[logical(one, rank) for one in cases] for rank in range(context.world_size)]


def run_all_reduce_coalesced(context: Context, case: Case, group: Any) -> Tensors:
    placed = [
        Placed(context, case, one, layout="contiguous")
        for one in several(context, case)[context.rank]
    ]
    work = dist.all_reduce_coalesced(
        [one.tensor for one in placed], reduce_op(case.redop), group, case.async_op
    )
    if case.async_op:
        work.wait()
    return unplaced(placed)


def expect_all_reduce_coalesced(context: Context, case: Case) -> Tensors:
    return [reference(case.redop, list(one)) for one in zip(*several(context, case), strict=True)]


def run_coalescing_manager(context: Context, case: Case, group: Any) -> Tensors:
    placed = [
        Placed(context, case, one, layout="contiguous")
        for one in several(context, case)[context.rank]
    ]
    with dist._coalescing_manager(group, async_ops=case.async_op) as manager:
        for one in placed:
            dist.all_reduce(one.tensor, reduce_op(case.redop), group)
    if case.async_op:
        manager.wait()
    return unplaced(placed)


def run_coalesced_all_gather(context: Context, case: Case, group: Any) -> Tensors:
    contents = several(context, case)[context.rank]
    placed = [Placed(context, case, one, layout="contiguous") for one in contents]
    out = [
        Placed(context, case, torch.cat([torch.zeros_like(one)] * context.world_size), "contiguous")
        for one in contents
    ]
    with dist._coalescing_manager(group):
        for source, target in zip(placed, out, strict=True):
            dist.all_gather_into_tensor(target.tensor, source.tensor, group)
    return unplaced(out)


def expect_coalesced_all_gather(context: Context, case: Case) -> Tensors:
    return [torch.cat(one) for one in zip(*several(context, case), strict=True)]


def run_coalesced_reduce_scatter(context: Context, case: Case, group: Any) -> Tensors:
    sizes = [one.numel() for one in several(context, case)[0]]
    ranks = range(context.world_size)
    placed = [
        Placed(
            context,
            case,
            torch.cat([part(case, context.rank, rank, (size,)) for rank in ranks]),
            "contiguous",
        )
        for size in sizes
    ]
    out = [Placed(context, case, part(case, 0, 0, (size,)), "contiguous") for size in sizes]
    with dist._coalescing_manager(group):
        for source, target in zip(placed, out, strict=True):
            dist.reduce_scatter_tensor(target.tensor, source.tensor, reduce_op(case.redop), group)
    return unplaced(out)


def expect_coalesced_reduce_scatter(context: Context, case: Case) -> Tensors:
    sizes = [one.numel() for one in several(context, case)[0]]
    ranks = range(context.world_size)
    return [
        reference(case.redop, [part(case, rank, context.rank, (size,)) for rank in ranks])
        for size in sizes
    ]


@dataclasses.dataclass(frozen=True)
class Op:
    """A collective: how to call it, what it gives, and what it takes."""

    run: Callable[[Context, Case, Any], Tensors]
    expect: Callable[[Context, Case], Tensors]
    reduces: bool = False
    layouts: bool = True
    gloo: bool = True  # whether Gloo has it


OPS = {
    "broadcast": Op(run_broadcast, expect_broadcast),
    "all_reduce": Op(run_all_reduce, expect_all_reduce, reduces=True),
    "reduce": Op(run_reduce, expect_reduce, reduces=True),
    "all_gather": Op(run_all_gather, expect_all_gather := everyone),
    "all_gather_uneven": Op(
        run_all_gather_uneven, expect_all_gather_uneven, layouts=False, gloo=False
    ),
    "all_gather_into_tensor": Op(
        run_all_gather_into_tensor, expect_all_gather_into_tensor, layouts=False
    ),
    "reduce_scatter": Op(run_reduce_scatter, expect_reduce_scatter, reduces=True),
    "reduce_scatter_uneven": Op(
        run_reduce_scatter_uneven, expect_reduce_scatter_uneven, reduces=True, layouts=False
    ),
    "reduce_scatter_tensor": Op(
        run_reduce_scatter_tensor, expect_reduce_scatter, reduces=True, layouts=False
    ),
    "gather": Op(run_gather, expect_gather),
    "scatter": Op(run_scatter, expect_scatter),
    "all_to_all": Op(run_all_to_all, expect_all_to_all, layouts=False, gloo=False),
    "all_to_all_single": Op(run_all_to_all_single, expect_all_to_all_single, layouts=False),
    "all_to_all_uneven": Op(run_all_to_all_uneven, expect_all_to_all_uneven, layouts=False),
    "all_reduce_coalesced": Op(
        run_all_reduce_coalesced, expect_all_reduce_coalesced, reduces=True, layouts=False
    ),
    "coalescing_manager": Op(
        run_coalescing_manager, expect_all_reduce_coalesced, reduces=True, layouts=False
    ),
    "coalesced_all_gather": Op(
        run_coalesced_all_gather, expect_coalesced_all_gather, layouts=False
    ),
    "coalesced_reduce_scatter": Op(
        run_coalesced_reduce_scatter, expect_coalesced_reduce_scatter, reduces=True, layouts=False
    ),
}


def gloo_has(case: Case) -> bool:
    """Whether Gloo can run this very call, on plain tensors."""
    op = OPS[case.op]
    if not op.gloo or case.dtype not in GLOO or (op.reduces and case.dtype == torch.bool):
        return False
    if case.op == "gather" and case.dtype in COMPLEX:
        return False
    return case.redop not in ("PREMUL_SUM", "AVG") or not op.reduces


def compare(context: Context, case: Case, got: Tensors, want: Tensors) -> None:
    assert len(got) == len(want)
    for i, (mine, reference_) in enumerate(zip(got, want, strict=True)):
        if context.exact:
            assert same(mine, reference_), (
                f"rank {context.rank}: tensor {i} of {case} differs in "
                f"{int((mine != reference_).sum())} of {mine.numel()} elements"
            )
        else:
            close(mine, reference_)


def check(context: Context, case: Case) -> None:
    """Runs one case and compares it with the reference and with Gloo."""
    op = OPS[case.op]
    if not context.fused and not gloo_has(case):
        return
    # Gloo reduces the first bytes of a tensor with gaps; we are right or raise.
    gaps = case.layout == "strided" and count(case) > 1
    if gaps and not context.fused:
        return
    try:
        got = op.run(context, case, None)
    except (RuntimeError, ValueError) as error:
        if gaps and ("contiguous" in str(error) or "dense" in str(error)):
            return
        raise
    want = op.expect(context, case)
    compare(context, case, got, want)
    if context.oracle is not None and gloo_has(case):
        theirs = op.run(context, case.plain(), context.oracle)
        if theirs and theirs[0].shape == want[0].shape:
            for mine, other in zip(got, theirs, strict=True):
                close(mine, other)


def refused(context: Context, case: Case) -> None:
    """Runs a reduction that has no meaning: it must raise, and break nothing."""
    try:
        OPS[case.op].run(context, case, None)
    except (RuntimeError, ValueError, TypeError) as error:
        assert len(str(error)) > 10, "the error says nothing"
    else:
        raise AssertionError(f"{case} was accepted")
    check(context, dataclasses.replace(case, redop="SUM", dtype=torch.float32))


def integer_average(context: Context, dtype: torch.dtype) -> None:
    """AVG of integers: refused everywhere, or truncated like an integer division."""
    case = Case("all_reduce", dtype, 100, redop="AVG", seed=5)
    try:
        got = run_all_reduce(context, case, None)[0]
    except (RuntimeError, ValueError):
        return
    total = reference("SUM", everyone(context, case))
    assert torch.equal(got, torch.div(total, context.world_size, rounding_mode="trunc"))


def many_in_flight(context: Context, numel: int) -> None:
    """Forty different asynchronous calls, waited for in reverse."""
    cases = [
        Case("all_reduce", numel=numel + i, seed=i, redop="SUM" if i % 2 else "MAX")
        for i in range(40)
    ]
    tensors = [logical(case, context.rank) for case in cases]
    works = [
        dist.all_reduce(tensor, reduce_op(case.redop), async_op=True)
        for case, tensor in zip(cases, tensors, strict=True)
    ]
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
    for case, tensor in zip(cases, tensors, strict=True):
        compare(context, case, [tensor], expect_all_reduce(context, case))


def many_tensors(context: Context, count: int) -> None:
    """All of a long list are reduced, and a rank with a shorter list is told so."""
    world = context.world_size
    tensors = [torch.full((1 + i % 3,), float(context.rank + i)) for i in range(count)]
    dist.all_reduce_coalesced(tensors)
    for i, tensor in enumerate(tensors):
        expected = world * (world - 1) / 2 + world * i
        assert tensor.tolist() == [expected] * (1 + i % 3), i
    for length in (11, count) if context.fused else ():
        with pytest.raises(RuntimeError, match="number of tensors"):
            dist.all_reduce_coalesced(tensors[: length - (context.rank == 1)])
    dist.barrier()


__all__ = ["OPS", "Case", "check", "refused", "shape_of"]
