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


Fold = Callable[[Callable[[int], torch.Tensor]], torch.Tensor]
"""The sum of what each rank contributes, by its number."""
Recipe = Callable[[Context, Case, Fold], Tensors]
"""Tensors that a rank has for a collective, or gets of it."""
Call = Callable[[Tensors, Tensors, int, dict[str, Any]], Any]
"""A call by outputs, inputs, the root and keywords."""


def first(given: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """In place of a sum, where its shape alone matters."""
    return given(0)


def own(context: Context, case: Case, fold: Fold) -> Tensors:
    return [logical(case, context.rank)]


def everyone(context: Context, case: Case, fold: Fold) -> Tensors:
    return [logical(case, rank) for rank in range(context.world_size)]


def of_root(context: Context, case: Case, fold: Fold) -> Tensors:
    return [logical(case, case.root)]


def for_all(context: Context, case: Case, fold: Fold) -> Tensors:
    """What the root alone has."""
    return everyone(context, case, fold) if context.rank == case.root else []


def total(context: Context, case: Case, fold: Fold) -> Tensors:
    return [fold(lambda rank: logical(case, rank))]


def uneven_sizes(context: Context, case: Case) -> list[int]:
    """A different size for each rank, one of them zero if the case is small."""
    return [max(count(case) // 2 + 7 * rank - 3, 0) for rank in range(context.world_size)]


def everyone_uneven(context: Context, case: Case, fold: Fold) -> Tensors:
    sizes = uneven_sizes(context, case)
    return [logical(case, rank, (size,)) for rank, size in enumerate(sizes)]


def own_uneven(context: Context, case: Case, fold: Fold) -> Tensors:
    return [everyone_uneven(context, case, fold)[context.rank]]


def split(case: Case, source: int, target: int) -> int:
    """How many rows `source` sends to `target`; zero for some."""
    return (case.numel // 5 + 1) * ((source + 2 * target + case.seed) % 3)


def splits(context: Context, case: Case) -> dict[str, list[int]]:
    ranks = range(context.world_size)
    return {
        "output_split_sizes": [split(case, rank, context.rank) for rank in ranks],
        "input_split_sizes": [split(case, context.rank, rank) for rank in ranks],
    }


# The shape of what a source has for a target, where it is not the case's.
SHAPES: dict[str, Callable[[Context, Case, int, int], tuple[int, ...]]] = {
    "by target": lambda context, case, source, target: (uneven_sizes(context, case)[target],),
    "by source": lambda context, case, source, target: (count(case) + source,),
    "rows": lambda context, case, source, target: (split(case, source, target), 5),
}


def part(case: Case, source: int, target: int, shape: Any = None) -> torch.Tensor:
    """What `source` has for `target` in the all-to-all family."""
    seed = case.seed * 64 + target
    return logical(dataclasses.replace(case, seed=seed), source, shape)


def between(context: Context, case: Case, source: int, target: int, shape: str) -> torch.Tensor:
    made = SHAPES[shape](context, case, source, target) if shape else None
    return part(case, source, target, made)


def sent(shape: str = "") -> Recipe:
    """A tensor for each rank."""
    return lambda context, case, fold: [
        between(context, case, context.rank, rank, shape) for rank in range(context.world_size)
    ]


def received(shape: str = "") -> Recipe:
    """A tensor from each rank."""
    return lambda context, case, fold: [
        between(context, case, rank, context.rank, shape) for rank in range(context.world_size)
    ]


def summed(shape: str = "") -> Recipe:
    """The sum of what all ranks have for this one."""
    return lambda context, case, fold: [
        fold(lambda rank: between(context, case, rank, context.rank, shape))
    ]


def joined(recipe: Recipe) -> Recipe:
    """The same as one tensor."""
    return lambda context, case, fold: [torch.cat(recipe(context, case, fold))]


def several(case: Case, rank: int) -> Tensors:
    """Three tensors of a rank, for the coalesced forms."""
    cases = [
        dataclasses.replace(case, seed=case.seed + 7 * i, numel=case.numel // (i + 1), layout="x")
        for i in range(3)
    ]
    return [logical(one, rank) for one in cases]


def own_several(context: Context, case: Case, fold: Fold) -> Tensors:
    return several(case, context.rank)


def total_of_several(context: Context, case: Case, fold: Fold) -> Tensors:
    return [fold(lambda rank, i=i: several(case, rank)[i]) for i in range(3)]  # type: ignore[misc]


def several_joined(context: Context, case: Case, fold: Fold) -> Tensors:
    every = [several(case, rank) for rank in range(context.world_size)]
    return [torch.cat(one) for one in zip(*every, strict=True)]


def several_sent(context: Context, case: Case, fold: Fold) -> Tensors:
    """As much for each rank as one of `several` has."""
    ranks = range(context.world_size)
    return [
        torch.cat([part(case, context.rank, rank, one.shape) for rank in ranks])
        for one in several(case, 0)
    ]


def several_summed(context: Context, case: Case, fold: Fold) -> Tensors:
    return [
        fold(lambda rank, one=one: part(case, rank, context.rank, one.shape))  # type: ignore[misc]
        for one in several(case, 0)
    ]


def coalesced(call: Callable[..., Any]) -> Call:
    """A call for each of several tensors, which torch hands over together."""

    def run(out: Tensors, given: Tensors, root: int, how: dict[str, Any]) -> Any:
        each = {key: value for key, value in how.items() if key != "async_op"}
        with dist._coalescing_manager(how["group"], async_ops=how["async_op"]) as manager:
            for one, other in zip(out, given, strict=True):
                call(one, other, **each)
        return manager if how["async_op"] else None

    return run


@dataclasses.dataclass(frozen=True)
class Op:
    """A collective: how to call it, what it takes and what it gives."""

    call: Call
    takes: Recipe
    gives: Recipe
    reduces: bool = False
    layouts: bool = True
    gloo: bool = True  # whether Gloo has it
    in_place: bool = False
    to_root: bool = False  # nobody else gets anything
    more: Callable[[Context, Case], dict[str, Any]] = lambda context, case: {}

    def expect(self, context: Context, case: Case) -> Tensors:
        """What this rank gets."""
        ranks = range(context.world_size)

        def fold(given: Callable[[int], torch.Tensor]) -> torch.Tensor:
            return reference(case.redop, [given(rank) for rank in ranks])

        return self._given(context, case, fold)

    def _given(self, context: Context, case: Case, fold: Fold) -> Tensors:
        here = not self.to_root or context.rank == case.root
        return self.gives(context, case, fold) if here else []

    def run(self, context: Context, case: Case, group: Any) -> Tensors:
        """What this rank has got, in the layout and memory of the case; contents must go."""
        layout = None if self.layouts else "contiguous"

        def placed(tensors: Tensors) -> list[Placed]:
            return [Placed(context, case, tensor, layout) for tensor in tensors]

        inputs = placed(self.takes(context, case, first))
        like = self._given(context, case, first)
        outputs = inputs if self.in_place else placed([torch.zeros_like(one) for one in like])
        how = {"group": group, "async_op": case.async_op, **self.more(context, case)}
        if self.reduces:
            how["op"] = reduce_op(case.redop)
        out, given = ([one.tensor for one in some] for some in (outputs, inputs))
        finish(self.call(out, given, case.root, how), case)
        for one in () if self.in_place else inputs:
            one.untouched()
        for one in outputs[: len(like)]:
            one.guarded()
        return out[: len(like)]


OPS = {
    "broadcast": Op(
        lambda out, given, root, how: dist.broadcast(out[0], root, **how),
        *(own, of_root),
        in_place=True,
    ),
    "all_reduce": Op(
        lambda out, given, root, how: dist.all_reduce(out[0], **how),
        *(own, total),
        reduces=True,
        in_place=True,
    ),
    "reduce": Op(
        lambda out, given, root, how: dist.reduce(out[0], root, **how),
        *(own, total),
        reduces=True,
        in_place=True,
        to_root=True,
    ),
    "all_gather": Op(
        lambda out, given, root, how: dist.all_gather(out, given[0], **how), own, everyone
    ),
    "all_gather_uneven": Op(
        lambda out, given, root, how: dist.all_gather(out, given[0], **how),
        *(own_uneven, everyone_uneven),
        layouts=False,
        gloo=False,
    ),
    "all_gather_into_tensor": Op(
        lambda out, given, root, how: dist.all_gather_into_tensor(out[0], given[0], **how),
        *(own, joined(everyone)),
        layouts=False,
    ),
    "reduce_scatter": Op(
        lambda out, given, root, how: dist.reduce_scatter(out[0], given, **how),
        *(sent(), summed()),
        reduces=True,
    ),
    "reduce_scatter_uneven": Op(
        lambda out, given, root, how: dist.reduce_scatter(out[0], given, **how),
        *(sent("by target"), summed("by target")),
        reduces=True,
        layouts=False,
    ),
    "reduce_scatter_tensor": Op(
        lambda out, given, root, how: dist.reduce_scatter_tensor(out[0], given[0], **how),
        *(joined(sent()), summed()),
        reduces=True,
        layouts=False,
    ),
    "gather": Op(
        lambda out, given, root, how: dist.gather(given[0], out or None, root, **how),
        *(own, everyone),
        to_root=True,
    ),
    "scatter": Op(
        lambda out, given, root, how: dist.scatter(out[0], given or None, root, **how), for_all, own
    ),
    "all_to_all": Op(
        lambda out, given, root, how: dist.all_to_all(out, given, **how),
        *(sent("by source"), received("by source")),
        layouts=False,
        gloo=False,
    ),
    "all_to_all_single": Op(
        lambda out, given, root, how: dist.all_to_all_single(out[0], given[0], **how),
        *(joined(sent()), joined(received())),
        layouts=False,
    ),
    "all_to_all_uneven": Op(
        lambda out, given, root, how: dist.all_to_all_single(out[0], given[0], **how),
        *(joined(sent("rows")), joined(received("rows"))),
        layouts=False,
        more=splits,
    ),
    "all_reduce_coalesced": Op(
        lambda out, given, root, how: dist.all_reduce_coalesced(out, **how),
        *(own_several, total_of_several),
        reduces=True,
        layouts=False,
        in_place=True,
    ),
    "coalescing_manager": Op(
        coalesced(lambda out, given, **how: dist.all_reduce(out, **how)),
        *(own_several, total_of_several),
        reduces=True,
        layouts=False,
        in_place=True,
    ),
    "coalesced_all_gather": Op(
        coalesced(dist.all_gather_into_tensor), own_several, several_joined, layouts=False
    ),
    "coalesced_reduce_scatter": Op(
        coalesced(dist.reduce_scatter_tensor),
        *(several_sent, several_summed),
        reduces=True,
        layouts=False,
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
        got = OPS["all_reduce"].run(context, case, None)[0]
    except (RuntimeError, ValueError):
        return
    added = OPS["all_reduce"].expect(context, dataclasses.replace(case, redop="SUM"))[0]
    assert torch.equal(got, torch.div(added, context.world_size, rounding_mode="trunc"))


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
        compare(context, case, [tensor], OPS["all_reduce"].expect(context, case))


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
