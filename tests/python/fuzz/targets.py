"""Subject: calls of `into` on tensors that overlap, move, change their kind and come back.

All numbers are small and whole, so that sums are exact and everything is compared bit by bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor

import fusedpg
from checks.compiled import compiles, environment
from checks.refused import refused
from fusedpg import fusion
from fuzz.core import Choices, Pair, Tape, TapeChoices, done, draw_tape
from harness import Context

WHERE = ("2", "1", "3")
EXAMPLES = 2


def momentum(g: fusion.Partial, w: fusion.Replicate, m: fusion.Shard, lr: float, flip: bool) -> Any:
    m = 2 * m + fusion.all_reduce(g)
    return w - (m if flip else lr * m), m


def one(g: fusion.Partial, w: fusion.Replicate, lr: float, seed: int) -> Any:
    return w - lr * fusion.all_reduce(g, "max") + 0 * seed


def three(g: fusion.Partial, w: fusion.Replicate, v: fusion.Replicate, lr: float) -> Any:
    total = fusion.all_reduce(g)
    return w + total, v - lr * w * total, total * 2


def norm(g: fusion.Partial, w: fusion.Replicate, b: fusion.Replicate) -> Any:
    total = fusion.all_reduce(g) + b
    return total * w + w.amax(), w + 1


Reference = Callable[..., list[torch.Tensor]]


def references(size: int, rank: int) -> dict[Any, Reference]:
    def cut(x: torch.Tensor) -> torch.Tensor:
        begin, length = fusedpg.shard_range(x.numel(), size, rank)
        return x.reshape(-1)[begin : begin + length]

    def of_momentum(gs: Any, w: Any, ms: Any, lr: float, flip: bool) -> list[torch.Tensor]:
        m = 2 * torch.cat(ms) + sum(gs)
        return [w - (m if flip else lr * m), cut(m)]

    def of_one(gs: Any, w: Any, lr: float, seed: int) -> list[torch.Tensor]:
        return [w - lr * torch.stack(gs).amax(0)]

    def of_three(gs: Any, w: Any, v: Any, lr: float) -> list[torch.Tensor]:
        return [w + sum(gs), v - lr * w * sum(gs), sum(gs) * 2]

    def of_norm(gs: Any, w: Any, b: Any) -> list[torch.Tensor]:
        return [(sum(gs) + b) * w + w.amax(), w + 1]

    return {momentum: of_momentum, one: of_one, three: of_three, norm: of_norm}


PROGRAMS: dict[Any, tuple[str, str]] = {  # layouts of tensors and of results
    momentum: ("PRS", "RS"),
    one: ("PR", "R"),
    three: ("PRR", "RRR"),
    norm: ("PR1", "RR"),
}


class Memory:
    """Of all ranks, as each of them knows it; the tensors of a call are views of it."""

    def __init__(self, context: Context, drawn: TapeChoices) -> None:
        self.drawn, self.size, self.rank = drawn, context.world_size, context.rank
        self.numel = drawn.choice([1, 3, 16, 130, 3000, 40_000])
        self.length = 8 * self.numel + 1
        self.dtype = torch.float32
        self.fresh()

    def fresh(self) -> None:
        """Other memory of another type, which may lie where the former did."""
        self.dtype = self.drawn.choice([torch.float32, torch.float32, torch.float64])
        self.mine: Any = None
        self.mine = torch.zeros(self.length, dtype=self.dtype)

    def places(self, layouts: str) -> list[Any]:
        """Offsets and strides, alike on all ranks."""
        free = self.drawn.sample(range(6), len(layouts))
        calm = self.drawn.random() < 0.7
        found = []
        for layout, slot in zip(layouts, free):
            shift, stride = 0, 1
            if not calm:
                slot = self.drawn.choice([0, 1, 2, slot])
                shift = self.drawn.choice([0] * 4 + [1, self.numel // 2])
                stride = self.drawn.choice([1] * 6 + [2])
            found.append((layout, slot * self.numel + shift, stride))
        return found

    def view(self, memory: torch.Tensor, place: Any, rank: int) -> torch.Tensor:
        layout, at, stride = place
        length = self.numel
        if layout == "S":
            length = fusedpg.shard_range(self.numel, self.size, rank)[1]
        if layout == "1":
            length = 1
        return memory.as_strided((length,), (stride,), at)


def draw(choose: Choices, where: str) -> Tape:
    return draw_tape(choose, 1500, 3000)


def run(program: Tape, context: Context) -> Iterator[Pair]:
    drawn = program.choices()
    memory = Memory(context, drawn)
    fused = {
        function: [
            fusedpg.fuse(function),
            fusedpg.fuse(function).scheduled(
                fusion.Split(), fusion.Reorder(), fusion.FuseCollective()
            ),
        ]
        for function in PROGRAMS
    }
    group: Any = None
    with compiles(context):
        shapes: list[Any] = []
        count = 0
        while drawn.left > 0:
            count += 1
            yield done(f"call {count}")
            if not shapes or drawn.random() < 0.12:
                function = drawn.choice(list(PROGRAMS))
                given, results = PROGRAMS[function]
                places = memory.places(given)
                # Results where arguments are, or elsewhere.
                targets = []
                for layout in results:
                    like = [place for place in places if place[0] == layout]
                    if like and drawn.random() < 0.8:
                        targets.append(drawn.choice(like))
                    else:
                        targets += memory.places(layout)
                shapes.append((function, drawn.randrange(2), places, targets))
            shape = drawn.choice(shapes[-2:])
            if drawn.random() < 0.1:
                memory.fresh()
            if drawn.random() < 0.05:
                group = drawn.choice([None, "new"])
                group = group and dist.new_group(backend="fused")
            _call(context, memory, fused, shape, count, group)


def _call(
    context: Context,
    memory: Memory,
    fused: Any,
    shape: Any,
    count: int,
    group: Any,
) -> None:
    drawn, size, rank = memory.drawn, memory.size, memory.rank
    function, which, places, targets = shape
    contents = []
    for _ in range(size):  # each rank's own; what has to be alike is
        generator = torch.Generator().manual_seed(drawn.randrange(1 << 30))
        contents.append(torch.randint(-9, 9, (memory.length,), generator=generator).double())
    # Replicate and Shard arguments are of one logical tensor: write them from the first's memory.
    alike = contents[0]
    for other in range(1, size):
        own = contents[other]
        contents[other] = torch.where(_partial(memory, places), own, alike)
    numbers: dict[str, Any] = {"lr": drawn.choice([1, 2, 0.5, 3.0])}
    if function is momentum:
        numbers["flip"] = drawn.random() < 0.3
    if function is one:
        numbers["seed"] = drawn.choice([1, 5, 1 << 40])
    if function is norm:
        numbers = {}
    reference = references(size, rank)[function]
    views = [
        [memory.view(content, place, other) for place in places]
        for other, content in enumerate(contents)
    ]
    arguments: list[Any] = []
    for number, place in enumerate(places):
        if place[0] in "PS":
            arguments.append([view[number].clone() for view in views])
        else:
            arguments.append(views[rank][number].clone())
    want = reference(*arguments, **numbers)
    memory.mine.copy_(contents[rank])
    mine = [memory.view(memory.mine, place, rank) for place in places]
    into = [
        mine[places.index(t)]
        if t in places and drawn.random() < 0.8
        else memory.view(memory.mine, t, rank)
        for t in targets
    ]
    expected = contents[rank].clone()
    for target, value in zip(targets, want):
        memory.view(expected, target, rank).copy_(value)
    how = drawn.choice(["into", "into", "into", "into", "async", "eager", "inference", "grad"])
    env: Any = environment(FUSEDPG_FUSION="eager") if how == "eager" else contextlib.nullcontext()
    call = fused[function][which]
    note = f"call {count} {how}: {function.__name__} {which} {places} -> {targets}"
    note += f" {numbers} of {memory.numel} {memory.dtype}"
    distinct = all(a is not b for n, a in enumerate(into) for b in into[:n])
    if not distinct or any(_overlap(memory, targets, r) for r in range(memory.size)):
        return  # refused
    try:
        with env, torch.inference_mode() if how == "inference" else torch.no_grad():
            if how == "async":
                call.into(into, *mine, **numbers, group=group, async_op=True).wait()
            else:
                call.into(into, *mine, **numbers, group=group)
    except Exception as error:
        raise AssertionError(note) from error
    got = memory.mine.double()
    assert torch.equal(got, expected), (
        f"{note}: {(got != expected).nonzero().reshape(-1)[:10]} {got[got != expected][:10]} "
        f"{expected[got != expected][:10]}"
    )


def _overlap(memory: Memory, targets: list[Any], rank: int) -> bool:
    """Whether two results of a rank would lie in the same memory."""
    written = torch.zeros(memory.length)
    for target in targets:
        memory.view(written, target, rank).add_(1)
    return bool((written > 1).any())


def _partial(memory: Memory, places: list[Any]) -> torch.Tensor:
    """Which memory only contributions lie in, so that ranks may differ there."""
    only = torch.zeros(memory.length)
    for place in places:
        if place[0] == "P":
            memory.view(only, place, 0).fill_(1)
    for place in places:
        for rank in range(memory.size):
            if place[0] != "P":
                memory.view(only, place, rank).fill_(0)
    return only.bool()


def minus(g: fusion.Partial, w: fusion.Replicate) -> Any:
    return w - fusion.all_reduce(g)


def share(w: fusion.Replicate) -> Any:
    return w / w.sum(-1, True)


def kinds(context: Context) -> None:
    """Tensors whose elements are on their way, negated by an attribute, or not in memory at all."""
    size, group = context.world_size, dist.group.WORLD
    mesh = DeviceMesh.from_group(group, "cpu")
    gather: Any = getattr(functional, "all_gather_single_autograd", None)
    gather = gather or functional.all_gather_tensor_autograd
    g, w = torch.ones(8), torch.arange(1.0, 9.0)
    ways = [(), (fusion.Split(), fusion.Reorder(), fusion.FuseCollective())]
    with compiles(context):
        for step in (fusedpg.fuse(minus).scheduled(*way) for way in ways):
            given = functional.all_reduce(w / size, "sum", group)
            assert isinstance(given, functional.AsyncCollectiveTensor)
            assert torch.equal(step(g, given), w - size)
            assert torch.equal(step(functional.all_reduce(g / size, "sum", group), w), w - size)
            for negative in (torch._neg_view(w), (w * 1j).conj().imag):
                assert negative.is_neg() and torch.equal(step(g, negative), -w - size)
                assert torch.equal(step(-negative, w), w - size * w)
            target = torch._neg_view(torch.zeros(8))
            for _ in range(3):
                assert step.into(target, g, w) is target and torch.equal(target, w - size)
            part = g.chunk(2)[0].clone().requires_grad_()
            whole = gather(part, 0, group)
            step(whole, torch.ones_like(whole)).sum().backward()
            assert part.grad is not None and part.grad.tolist() == [-float(size)] * 4
            for strange in (distribute_tensor(w, mesh, [Replicate()]), w.to_sparse()):
                with refused("`w` is a ", TypeError):
                    step(g, strange)
                with refused("target 0 is a ", TypeError):
                    step.into(strange, g, w)
        rows = fusedpg.fuse(share).scheduled(fusion.FuseCompute())
        ones = functional.all_reduce(torch.ones(2, 4) / size, "sum", group)
        assert torch.equal(rows(ones), torch.full((2, 4), 0.25))
