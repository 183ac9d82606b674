"""Subject: functions of one rank with reductions over rows, against torch's own functions.

Sizes are often equal and operands broadcast in every way, so that a mistaken dimension has a number
to give.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

import fusedpg
from checks.compiled import compiles, counted
from fuzz.core import Choices, Pair, Tape, TapeChoices, done, draw_tape
from harness import Context

WHERE = ("1",)
EXAMPLES = 9
UNARY = [
    "{x} * 0.5",
    "-{x}",
    "{x}.abs()",
    "torch.sqrt({x}.abs())",
    "{x}.clamp(-1, 1)",
    "torch.where({x} > 0, {x}, 0.25)",
    "F.relu({x})",
    "torch.square({x})",
    "{x}.float().to({x}.dtype)",
]
SLOW = ["torch.exp(-{x}.abs())", "torch.tanh({x})"]  # to compile
BINARY = [
    "{x} + {y}",
    "{x} - {y}",
    "{x} * {y}",
    "torch.maximum({x}, {y})",
    "torch.minimum({x}, {y})",
    "torch.where({x} > {y}, {x}, 0.5 * {y})",
    "{x} / ({y} * {y} + 1)",
]
REDUCED = [
    "{x}.sum({dims}, {keep})",
    "{x}.mean({dims}, {keep})",
    "torch.amax({x}, {dims}, {keep})",
    "torch.amin({x}, {dims}, {keep})",
    "torch.sqrt(({x} * {x}).sum({dims}, {keep}))",
]
NORMS = [
    "F.layer_norm({x}, ({n},), None, None, 1e-3)",
    "F.rms_norm({x}, ({n},), None, 1e-3)",
    "{x} - torch.amax({x}, -1, True)",
]
SIZES = [[2, 3], [3], [4, 4, 5], [1, 3], [5, 1, 5], [2, 7, 33], [1, 2]]
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class Drawn:
    """A function's text, and its arguments."""

    def __init__(self, chosen: TapeChoices) -> None:
        self._chosen = chosen
        self._generator = torch.Generator().manual_seed(chosen.getrandbits(24))
        self.dtype = chosen.choice([torch.float64] * 5 + list(BOUNDS)[1:])
        self.arguments: dict[str, torch.Tensor] = {}
        self._values: list[tuple[str, tuple[int, ...]]] = []
        self._lines: list[str] = []
        sizes = chosen.choice(SIZES)
        shape = [chosen.choice(sizes) for _ in range(chosen.choice([1, 2, 3, 3, 3, 4]))]
        if chosen.random() < 0.3:
            shape[-1] = chosen.choice([1, 2, 31, 64, 97, 300, 4096, 4099])
        self._argument(tuple(shape))
        self._argument(tuple(shape) if chosen.random() < 0.5 else self._smaller(tuple(shape)))
        while not self._lines:
            for _ in range(chosen.randint(2, 9)):
                self._step()
        names = [name for name, _ in self._values if name.startswith("v")][-4:]
        results = chosen.sample(names, min(len(names), chosen.randint(1, 4)))
        results = results if names[-1] in results else [names[-1], *results[1:]]
        body = [*self._lines, f"return {', '.join(results)},"]
        self.text = f"def program({', '.join(self.arguments)}):\n    " + "\n    ".join(body)

    def _smaller(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """That broadcasts to a shape."""
        rest = shape[self._chosen.randint(0, len(shape) - 1) :]
        return tuple(1 if self._chosen.random() < 0.35 else size for size in rest)

    def _argument(self, shape: tuple[int, ...]) -> None:
        x = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        if self._chosen.random() < 0.05 and x.numel():
            special = self._chosen.choice([torch.inf, -torch.inf, torch.nan, -0.0])
            x.view(-1)[self._chosen.randrange(x.numel())] = special
        if self._chosen.random() < 0.15 and x.dim():
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        name = f"a{len(self.arguments)}"
        self.arguments[name] = x.to(self.dtype)
        self._values.append((name, shape))

    def _step(self) -> None:
        chosen = self._chosen
        x, shape = chosen.choice(self._values[-chosen.choice([1, 1, 5]) :])
        kind = chosen.choice(
            ["unary", "binary", "binary", "reduced", "reduced", "argument", "norm"]
        )
        if kind == "unary":
            text = chosen.choice(SLOW if chosen.random() < 0.04 else UNARY).format(x=x)
        elif kind == "binary":
            if shape and len(self.arguments) < 8 and chosen.random() < 0.5:
                self._argument(self._smaller(shape))
                y, other = self._values.pop()
            else:
                y, other = chosen.choice(self._values)
            try:
                shape = tuple(torch.broadcast_shapes(shape, other))
            except RuntimeError:
                return
            if len(shape) > 5 or torch.Size(shape).numel() > 40_000:
                return
            text = chosen.choice(BINARY).format(x=x, y=y)
        elif not shape:
            return
        elif kind == "reduced":
            count = 1 if chosen.random() < 0.6 else chosen.randint(1, len(shape))
            keep = chosen.random() < 0.4
            dims = tuple(range(len(shape) - count, len(shape)))
            if chosen.random() < 0.1:
                dims = tuple(sorted(chosen.sample(range(len(shape)), count)))
            text = chosen.choice(REDUCED).format(x=x, dims=dims, keep=keep)
            shape = tuple(
                1 if d in dims else size for d, size in enumerate(shape) if keep or d not in dims
            )
        else:
            text = chosen.choice(NORMS).format(x=x, n=shape[-1])
        name = f"v{len(self._lines)}"
        self._lines.append(f"{name} = {text}")
        self._values.append((name, shape))


def draw(choose: Choices, where: str) -> Tape:
    return draw_tape(choose, 40, 120)


def run(program: Tape, context: Context) -> Iterator[Pair]:
    chosen = program.choices()
    drawn = Drawn(chosen)
    scope: dict[str, Any] = {"torch": torch, "F": F}
    exec(compile(drawn.text, f"{__file__}.drawn.py", "exec"), scope)
    fused = fusedpg.fuse(scope["program"])
    expected = scope["program"](**drawn.arguments)
    bound = BOUNDS[drawn.dtype]
    found = [s for s in fused.schedules(**drawn.arguments) if s.program.groups]
    for schedule in chosen.sample(found, min(2, len(found))):
        note = f"{drawn.dtype}: {drawn.text}\n{schedule}\n{schedule.program}"
        with compiles(context), counted() as ran:
            try:
                got = fused.scheduled(*schedule.transformations)(**drawn.arguments)
            except Exception as error:
                raise AssertionError(f"{error}: {note}") from error
        yield done(f"{len(ran)} groups")
        for mine, want in zip(got, expected, strict=True):
            assert mine.dtype == want.dtype, note
            try:
                torch.testing.assert_close(mine, want, rtol=bound, atol=bound, equal_nan=True)
            except AssertionError as error:
                raise AssertionError(f"{error}: {note}") from error
