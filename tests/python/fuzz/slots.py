"""Tensors in all layouts and kinds of memory, with the memory around them under guard."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from checks.cases import COMPLEX, same, values
from fuzz.programs import LEFT_OUT

GUARD = 77
PAD = 40  # elements before and after a view
LARGE = 100_000  # larger tensors are dense, to be quick


def contents(
    seed: int, index: int, label: object, shape: Sequence[int], dtype: torch.dtype, data: str
) -> torch.Tensor:
    """What a member puts into a tensor; any member can compute it."""
    key = f"{seed}/{index}/{label}"
    rng = random.Random(key)
    numel = torch.Size(shape).numel()
    if "exact" in data or data == "zeros":
        wide = torch.int64 if dtype not in COMPLEX else torch.complex64
        flat = values(rng.getrandbits(40), numel, wide if dtype not in COMPLEX else torch.int64)
        # From -4 to 4, or 0 to 4: sums and products of four ranks are exact in every type.
        flat = flat % 5 if not (dtype.is_signed or dtype in COMPLEX) else flat % 9 - 4
        flat = (flat + 1j * flat.flip(0)).to(dtype) if dtype in COMPLEX else flat.to(dtype)
    else:
        flat = values(rng.getrandbits(40), numel, dtype)
    if data == "special" and numel:
        generator = torch.Generator().manual_seed(rng.getrandbits(40))
        for value in (torch.nan, torch.inf, -torch.inf):
            flat[torch.randint(0, numel, (1 + numel // 50,), generator=generator)] = value
    if "zeros" in data and numel:
        piece = rng.choice([32, 100, 300, 2000])
        for begin in range(0, numel, piece):
            if rng.random() < 0.7:
                flat[begin : begin + piece] = 0
    result = flat.reshape(tuple(shape))
    if _expanded(key) and result.dim() and result.shape[0] > 1:
        result = result[:1].expand(result.shape)
    return result


def _expanded(key: str) -> bool:
    """Whether an input is an expanded one: then its contents repeat."""
    return "expanded" not in LEFT_OUT and random.Random(f"expanded {key}").random() < 0.05


def _strides(rng: random.Random, shape: Sequence[int], layout: str) -> list[int]:
    order = list(range(len(shape)))
    if layout == "permuted":
        rng.shuffle(order)
    strides, step = [0] * len(shape), 2 if layout == "strided" else 1
    for place, dim in enumerate(reversed(order)):
        strides[dim] = step
        step *= max(shape[dim], 1)
        if layout == "pitched" and place == 0:
            step += 3
    return strides


class Slot:
    """One tensor of a call, and all memory around it."""

    def __init__(
        self,
        contents: torch.Tensor,
        rng: random.Random,
        *,
        arena: object = None,
        group: object = None,
        only_input: bool = False,
        dense: bool = False,
    ) -> None:
        shape, dtype = tuple(contents.shape), contents.dtype
        layouts = ["plain", "plain", "offset"]
        if contents.numel() <= LARGE and not dense and contents.dim():
            layouts += ["strided", "permuted", "pitched"]
        layout = rng.choice(layouts)
        strides = _strides(rng, shape, layout)
        expanded = only_input and contents.numel() and 0 in contents.stride()
        if expanded:
            layout, strides = "expanded", [0, *strides[1:]]
        pad = 0 if layout == "plain" else PAD
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        length = 2 * pad + (span if contents.numel() else 0)
        in_arena = arena is not None and rng.random() < 0.5
        if in_arena:
            self.memory = arena(length, dtype=dtype, group=group)  # type: ignore[operator]
        else:
            self.memory = torch.empty(length, dtype=dtype)
        self.memory.view(torch.uint8).fill_(1 if dtype == torch.bool else GUARD)
        self._place = (shape, tuple(strides), pad)
        self.layout = f"{layout}{'@arena' if in_arena else ''}"
        self.tensor = self._view(self.memory)
        # One element may be written by several: not by copy_ of the whole.
        self._view(self.memory).copy_(contents) if not expanded else self._once(contents)
        self._before = self.memory.clone()

    def _view(self, memory: torch.Tensor) -> torch.Tensor:
        shape, strides, pad = self._place
        if torch.Size(shape).numel() == 0:
            return memory[pad:pad].reshape(shape) if pad else memory.reshape(shape)
        return memory.as_strided(shape, strides, pad)

    def offset(self) -> int:
        """Where the view's first element lies in the memory."""
        return self._place[2]

    def _once(self, contents: torch.Tensor) -> None:
        shape, strides, pad = self._place
        self.memory.as_strided((1, *shape[1:]), strides, pad).copy_(contents[:1])

    def wrong(self, expected: torch.Tensor | None) -> str | None:
        """What is wrong with the memory now; None expects that nothing has changed."""
        memory = self._before.clone()
        if expected is not None:
            self._view(memory).copy_(expected)
        if same(self.memory, memory):
            return None
        found = self._view(self.memory)
        want = self._view(memory)
        if same(dense(found), dense(want)):
            return f"memory beside a {self.layout} tensor of shape {tuple(found.shape)} was written"
        bad = ~((found == want) | ((found != found) & (want != want)))
        places = bad.flatten().nonzero().flatten()
        first = int(places[0]) if len(places) else -1
        return (
            f"{self.layout} tensor of shape {tuple(found.shape)} {found.dtype}: {len(places)} of "
            f"{found.numel()} elements differ, first at {first}: found "
            f"{found.flatten()[first] if first >= 0 else '-0?'}, expected "
            f"{want.flatten()[first] if first >= 0 else '+0?'}"
        )


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose strides are plain ones, those of a single element as well."""
    return tensor.clone(memory_format=torch.contiguous_format)
