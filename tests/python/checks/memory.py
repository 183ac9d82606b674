"""Collectives on views: strided, overlapping, in place, expanded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist

from checks import several
from harness import Context

Tensors = list[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Window:
    """`count` views of one memory, each `step` elements after the last."""

    start: int
    step: int
    stride: int = 1

    def of(self, memory: torch.Tensor, count: int, numel: int) -> Tensors:
        def view(i: int) -> torch.Tensor:
            begin = self.start + i * self.step
            return memory[begin : begin + (numel - 1) * self.stride + 1 : self.stride]

        return [view(i) for i in range(count)]


def layouts(size: int, n: int) -> dict[str, tuple[Window, Window]]:
    """Outputs and inputs; n is a multiple of 6."""
    behind = 2 * size * n
    return {
        "strided": (Window(1, 2 * n, 2), Window(behind, 2 * n, 2)),
        "interleaved": (Window(0, 1, size), Window(behind, 1, size)),
        "outputs overlap": (Window(3, n // 2), Window(behind, n)),
        "inputs overlap": (Window(0, n), Window(behind, n // 2)),
        "input in outputs": (Window(0, n), Window(n // 2, n)),
        "backwards": (Window(n // 2, n), Window(0, n)),
        "in place": (Window(0, n), Window(0, n)),
        "in place, strided": (Window(0, 2 * n, 2), Window(0, 2 * n, 2)),
    }


def memory_of(rank: int, size: int, n: int) -> torch.Tensor:
    return torch.arange(6.0 * size * n, dtype=torch.float64) + 1000.0 * n * rank


Model = Callable[[list[Tensors], int, int], Tensors]
"""What a rank's outputs hold: of every rank's inputs, its rank, the root."""


@dataclasses.dataclass(frozen=True)
class Op:
    call: Callable[[Tensors, Tensors, int], object]
    model: Model
    outputs: int = 1  # 0: one a rank
    inputs: int = 1
    whole: str = ""  # outputs or inputs are one tensor for all ranks
    rooted: str = ""


def me() -> int:
    return dist.get_rank()


OPS: dict[str, Op] = {
    "broadcast": Op(
        lambda o, i, r: dist.broadcast(i[0] if me() == r else o[0], r),
        lambda i, p, r: [] if p == r else [i[r][0]],
    ),
    "all_gather": Op(
        lambda o, i, r: dist.all_gather(o, i[0]), lambda i, p, r: [x[0] for x in i], 0
    ),
    "all_gather_into_tensor": Op(
        lambda o, i, r: dist.all_gather_into_tensor(o[0], i[0]),
        lambda i, p, r: [torch.cat([x[0] for x in i])],
        whole="outputs",
    ),
    "gather": Op(
        lambda o, i, r: dist.gather(i[0], o if me() == r else None, r),
        lambda i, p, r: [x[0] for x in i] if p == r else [],
        0,
    ),
    "scatter": Op(
        lambda o, i, r: dist.scatter(o[0], i if me() == r else None, r),
        lambda i, p, r: [i[r][p]],
        inputs=0,
    ),
    "reduce_scatter": Op(
        lambda o, i, r: dist.reduce_scatter(o[0], i),
        lambda i, p, r: [sum(x[p] for x in i)],  # type: ignore[list-item]
        inputs=0,
    ),
    "reduce_scatter_tensor": Op(
        lambda o, i, r: dist.reduce_scatter_tensor(o[0], i[0]),
        lambda i, p, r: [sum(x[0].chunk(len(i))[p] for x in i)],  # type: ignore[list-item]
        whole="inputs",
    ),
    "all_to_all": Op(
        lambda o, i, r: dist.all_to_all(o, i), lambda i, p, r: [x[p] for x in i], 0, 0
    ),
    "all_to_all_single": Op(
        lambda o, i, r: dist.all_to_all_single(o[0], i[0]),
        lambda i, p, r: [torch.cat([x[0].chunk(len(i))[p] for x in i])],
        whole="both",
    ),
    # In place: the outputs' layout alone counts.
    "all_reduce": Op(
        lambda o, i, r: dist.all_reduce(o[0]),
        lambda i, p, r: [sum(x[0] for x in i)],  # type: ignore[list-item]
    ),
    "reduce": Op(
        lambda o, i, r: dist.reduce(o[0], r),
        lambda i, p, r: [sum(x[0] for x in i)] if p == r else [],  # type: ignore[list-item]
    ),
    "all_reduce_coalesced": Op(
        lambda o, i, r: dist.all_reduce_coalesced(o),
        lambda i, p, r: [sum(x[k] for x in i) for k in range(len(i))],  # type: ignore[misc]
        0,
        0,
    ),
}
IN_PLACE = ("all_reduce", "reduce", "all_reduce_coalesced")


def views(context: Context, name: str, layout: str, n: int, memory: torch.Tensor, rank: int):
    """Outputs and inputs of a rank."""
    op, size = OPS[name], context.world_size
    out, into = layouts(size, n)[layout]

    def of(window: Window, many: int, whole: bool) -> Tensors:
        if whole:
            return window.of(memory, 1, size * n)
        if many == 1 and layout == "in place" and name != "broadcast":
            # The part of a list that is this rank's.
            return window.of(memory, size, n)[rank : rank + 1]
        return window.of(memory, size if many == 0 else 1, n)

    outputs = of(out, op.outputs, op.whole in ("outputs", "both"))
    inputs = of(into, op.inputs, op.whole in ("inputs", "both"))
    return outputs, outputs if name in IN_PLACE else inputs


def check(context: Context, name: str, layout: str, n: int) -> None:
    """All memory is afterwards as if inputs were read first, outputs written in order."""
    op, size, root = OPS[name], context.world_size, context.world_size - 1
    inputs = []
    for rank in range(size):
        memory = memory_of(rank, size, n)
        found = views(context, name, layout, n, memory, rank)[1]
        inputs.append([t.clone() for t in found])
    want = memory_of(context.rank, size, n)
    targets, _ = views(context, name, layout, n, want, context.rank)
    for target, result in zip(targets, op.model(inputs, context.rank, root), strict=False):
        target.copy_(result)
    for arena in (False, True) if context.fused else (False,):
        got = context.empty(want.numel(), dtype=want.dtype, arena=arena)
        got.copy_(memory_of(context.rank, size, n))
        out, into = views(context, name, layout, n, got, context.rank)
        op.call(out, into, root)
        differ = int((got != want).sum())
        assert differ == 0, (
            f"{name}, {layout}, n={n}, arena={arena}: {differ} of {got.numel()} elements differ"
        )


def expanded(context: Context) -> None:
    """Elements that share memory have one value, and get one."""
    total = sum(range(1, context.world_size + 1))
    memory = torch.full((3,), float(context.rank + 1))
    tensor = memory[1:2].expand(4)
    dist.all_reduce(tensor)
    assert memory.tolist() == [context.rank + 1, total, context.rank + 1]
    # A broadcast row, and windows that overlap.
    memory = torch.arange(6.0) * (context.rank + 1)
    dist.all_reduce(memory.as_strided((3, 2), (1, 1)))
    assert torch.equal(memory[:4], torch.arange(4.0) * total)
    assert torch.equal(memory[4:], torch.arange(4.0, 6.0) * (context.rank + 1))
    row = torch.full((1, 3), float(context.rank + 1))
    dist.all_reduce_coalesced([row.expand(20000, 3), torch.zeros(2)])
    assert row.tolist() == [[total] * 3]
    memory = torch.full((1,), float(context.rank + 1))
    dist.reduce(memory.expand(4), 0)
    assert memory.item() == (total if context.rank == 0 else context.rank + 1)
    gathered = [torch.zeros(4) for _ in range(context.world_size)]
    dist.all_gather(gathered, torch.full((1,), float(context.rank)).expand(4))
    assert [t.tolist() for t in gathered] == [[float(p)] * 4 for p in range(context.world_size)]
    # Conjugates and negatives are views, too. torch's dispatcher makes copies of them, but a
    # backend may be called without it.
    for view in (torch.tensor([1 + 2j, 3j]).conj(), torch._neg_view(torch.ones(2))):
        numbers = [torch.zeros_like(view) for _ in range(context.world_size)]
        several.backend(None).allgather([numbers], [view]).wait()
        assert all(torch.equal(t, view) for t in numbers)
    # Strides that interleave share nothing.
    memory = torch.zeros(8)
    dist.all_gather(
        [memory.as_strided((3, 2), (2, 3)) for _ in range(context.world_size)],
        torch.arange(6.0).view(3, 2),
    )
    assert torch.equal(memory.as_strided((3, 2), (2, 3)), torch.arange(6.0).view(3, 2))


def shared_elements_refused(context: Context) -> None:
    """Different values for one element: an error on all ranks, and the group lives."""
    size = context.world_size

    def gather(out: torch.Tensor) -> None:
        dist.all_gather([out] * size, torch.arange(4.0))

    for bad in (torch.zeros(1).expand(4), torch.zeros(3).as_strided((2, 2), (1, 1)).view(2, 2)):
        try:
            gather(bad)
        except ValueError as error:
            assert "share memory" in str(error)
        else:
            raise AssertionError("accepted")
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [size] * 3


def scalar_split(context: Context) -> None:
    """A scalar cannot be split; nothing happens."""
    for out, into in (
        (torch.tensor(-1.0), torch.tensor(3.0)),
        (torch.tensor(-1.0), torch.ones(context.world_size)),
        (torch.full((context.world_size,), -1.0), torch.tensor(3.0)),
    ):
        try:
            dist.all_to_all_single(out, into)
        except ValueError as error:
            assert "scalar" in str(error)
        else:
            raise AssertionError("accepted")
        assert bool((out == -1).all())
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [context.world_size] * 3
