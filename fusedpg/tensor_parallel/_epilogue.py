"""What follows a row-parallel product: a sum, + bias, dropout, + residual as one operation.

The sum is an all_reduce, or with `Blocks` a reduce_scatter.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fusedpg import _fork
from fusedpg._registration import load_extension
from fusedpg.functional import _backend, group_info, shard_range
from fusedpg.fusion.api import FusedFunction
from fusedpg.fusion.compiled import Direct
from fusedpg.fusion.errors import IllegalTransformation
from fusedpg.fusion.philox import kept
from fusedpg.tensor_parallel import _programs as programs
from fusedpg.tensor_parallel._blocks import Blocks, reduce_scatter, scatter_sum
from fusedpg.tensor_parallel._normed import Norm

# Programs that are kept; all go together.
_KEPT = 512
_CHUNKS = 4
_LEAST = 1 << 20  # bytes of a product that is summed in chunks


_lock = _fork.lock()
_plans: dict[Any, Direct | None] = {}  # replaced, never emptied: it is read without the lock


def _plan(key: Any, function: FusedFunction, world_size: int, **values: Any) -> Direct | None:
    """The compiled program of these shapes and types; None where there is none."""
    global _plans
    with _lock:
        if key not in _plans:
            _plans = {} if len(_plans) >= _KEPT else _plans
            try:
                schedule = function.schedule(**values, world_size=world_size)
                _plans[key] = Direct.of(schedule.program)
            except IllegalTransformation:  # slices that are not of whole rows
                _plans[key] = None
        return _plans[key]


class Place:
    """A group and this rank's place in it."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = dist.distributed_c10d._get_default_group() if group is None else group
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("this rank is not in the group")
        self.backend: Any = None  # ProcessGroupFused for CPU tensors
        self._eager: set[Any] = set()  # programs that a rank has no function for
        try:
            backend = _backend(self.group)
        except ValueError:
            return
        if "cpu" in {device.type for device in self.group._device_types}:
            self.backend = backend

    @functools.cached_property
    def spare(self) -> bool:
        """Whether every rank has a core beside the one that it multiplies on; all ranks ask.

        Between hosts none is needed: there a sum is mostly waiting for the link.
        """
        here = int(group_info(self.group)["local_world_size"])
        if here < self.size:
            return True
        cores = len(os.sched_getaffinity(0)) // max(here, 1)
        # Ranks may have other numbers of threads, too.
        least = torch.tensor([float(cores - torch.get_num_threads())])
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.group)
        return bool(least.item() > 0)

    def beside(self, x: torch.Tensor, overlap: bool | None) -> bool:
        """Whether own rows are multiplied while those of others arrive; all ranks ask alike."""
        if overlap is not None or self.size == 1:
            return bool(overlap) and self.size > 1
        return x.device.type != "cpu" or self.backend is None or self.spare

    def chunks(self, rows: int, weight: torch.Tensor, overlap: bool | None) -> int:
        """In how many parts of the rows a product is summed: alike on all ranks."""
        if overlap is False or self.size == 1 or rows < 2 or self.backend is None:
            return 1
        if overlap is None and (
            rows * weight.shape[0] * weight.itemsize < _LEAST or not self.spare
        ):
            return 1
        return min(_CHUNKS, rows)

    def _compiles(self, x: torch.Tensor) -> bool:
        """Whether programs run as generated code: alike on all ranks."""
        usual = self.backend is not None and x.device.type == "cpu"
        return usual and bool(load_extension()._fusion_settings()[0])

    def _direct(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        drops: bool,
        scatters: bool = False,
        norm: Norm | None = None,
    ) -> tuple[Any, Direct | None]:
        key = (
            self.size,
            shape,
            dtype,
            None if bias is None else bias.dtype,
            None if residual is None else residual.dtype,
            drops,
            scatters,
            None if norm is None else norm.weight is not None,
        )
        if key in self._eager:
            return key, None
        plans = _plans
        if key in plans:
            return key, plans[key]
        values: dict[str, Any] = {"x": torch.empty(shape, dtype=dtype, device="meta")}
        values["bias"] = None if bias is None else bias.to("meta")
        values |= {"p": 0.5, "seed": 0, "drops": drops}
        function = programs.part_at_once if scatters else programs.whole_at_once
        both = programs.part_and_residual_at_once
        if norm is not None:
            function, both = programs.part_and_norm, programs.part_residual_and_norm
            weight = None if norm.weight is None else norm.weight.to("meta")
            values |= {"weight": weight, "eps": norm.eps}
        if residual is not None:
            given = shard_range(math.prod(shape), self.size, 0)[1:] if scatters else shape
            values["residual"] = torch.empty(given, dtype=residual.dtype, device="meta")
            function = both if scatters else function
        elif not scatters:
            values["residual"] = None
        return key, _plan(key, function, self.size, **values)

    def finish(
        self,
        product: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        p: float,
        seed: int,
    ) -> torch.Tensor:
        """The sum of all ranks' products (rows x features, ours to write to), and the rest."""
        if bias is None and residual is None and not p:
            dist.all_reduce(product, group=self.group)
            return product
        values: dict[str, Any] = {"x": product, "bias": bias, "residual": residual}
        values |= {"p": p, "seed": seed}
        if self._compiles(product):
            key, direct = self._direct(product.shape, product.dtype, bias, residual, p > 0)
            if direct is not None:
                # In its place: other memory of this size would be mapped anew in each call.
                if direct.begin(self.backend, values, [product]).wait():
                    return product
                self._eager.add(key)
        eager: torch.Tensor = programs.whole(**values, drops=p > 0, group=self.group)
        return eager

    def with_norm(
        self,
        norm: Norm,
        values: dict[str, Any],
        results: list[torch.Tensor],
        blocks: Blocks,
    ) -> bool:
        """Whether one operation has computed the output and the norm, into these results."""
        product, residual, p = values["x"], values["residual"], values["p"]
        if not self._compiles(product):
            return False
        call = (product.shape, product.dtype, values["bias"], residual, p > 0)
        key, direct = self._direct(*call, True, norm)
        if direct is None:
            return False
        values |= {"weight": norm.weight, "eps": norm.eps}
        spacing = blocks.rows * product.shape[1]
        begun = direct.begin(self.backend, values, results, runs=blocks.runs, spacing=spacing)
        if not begun.wait():
            self._eager.add(key)
            return False
        norm.result = results[1]
        return True

    def overlapped(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        p: float,
        seed: int,
        chunks: int,
    ) -> torch.Tensor:
        """finish(F.linear(x, weight), ...): rows are summed while the next are multiplied."""
        rows, features = x.shape[0], weight.shape[0]
        size = -(-rows // chunks)
        places = [slice(at, min(at + size, rows)) for at in range(0, rows, size)]
        plain = bias is None and residual is None and not p
        shapes = {(place.stop - place.start, features) for place in places}
        found = {
            shape: self._direct(shape, x.dtype, bias, residual, p > 0)
            for shape in shapes
            if not plain
        }
        if not plain and not (
            self._compiles(x) and all(direct is not None for _, direct in found.values())
        ):
            return self.finish(F.linear(x, weight), bias, residual, p, seed)
        result = x.new_empty(rows, features)
        begun: list[Any] = []
        for place in places:
            out = torch.mm(x[place], weight.t(), out=result[place])
            if plain:
                begun.append(dist.all_reduce(out, group=self.group, async_op=True))
                continue
            values = {"x": out, "bias": bias, "p": p, "seed": seed}
            values["residual"] = None if residual is None else residual[place]
            direct = found[(place.stop - place.start, features)][1]
            assert direct is not None
            begun.append(
                direct.begin(
                    self.backend, values, [out], first=place.start * features, async_op=True
                )
            )
        done = [one.wait() for one in begun]
        if plain or all(done):
            return result
        self._eager.update(key for key, _ in found.values())
        # Parts that are done are no products any more.
        return self.finish(F.linear(x, weight), bias, residual, p, seed)


def finish_part(
    place: Place,
    product: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    p: float,
    seed: int,
    blocks: Blocks,
    norm: Norm | None = None,
) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' products, and what follows, on these alone.

    Where the operation can compute the norm as well it leaves that there.
    """
    if norm is not None:
        results = [blocks.part(product), blocks.part(product)]
        given = {"x": product, "bias": bias, "residual": residual, "p": p, "seed": seed}
        if place.with_norm(norm, given, results, blocks):
            return results[0]
    plain = bias is None and residual is None and not p
    if not plain and product.numel() and place._compiles(product):
        key, direct = place._direct(product.shape, product.dtype, bias, residual, p > 0, True)
        if direct is not None:
            values: dict[str, Any] = {"x": product, "bias": bias, "residual": residual}
            values |= {"p": p, "seed": seed}
            part = blocks.part(product)
            spacing = blocks.rows * product.shape[1]
            begun = direct.begin(place.backend, values, [part], runs=blocks.runs, spacing=spacing)
            if begun.wait():
                return part
            place._eager.add(key)
    # The same operation by operation: 16-bit types are summed in float32, as our engine does it.
    ours = place.backend is not None and product.device.type == "cpu"
    wide = product if ours or product.dtype.itemsize > 2 else product.float()
    total = scatter_sum(blocks.by_rank(wide), place.group).to(product.dtype)
    if bias is not None:
        total = total + bias
    total = dropped(total, p, seed, blocks.firsts(place.rank, product.shape[1]))
    return total if residual is None else residual + total


def overlapped_part(
    place: Place,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    p: float,
    seed: int,
    blocks: Blocks,
    chunks: int,
) -> torch.Tensor:
    """finish_part(F.linear(x, weight), ...): rows are summed while the next are multiplied."""
    features, rest = weight.shape[0], (bias, residual, p, seed)
    plain = bias is None and residual is None and not p
    pieces = list(blocks.pieces(chunks))
    shapes = {(piece.blocks.whole_rows, features) for piece in pieces}
    found = {
        shape: place._direct(shape, x.dtype, bias, residual, p > 0, True)
        for shape in shapes
        if not plain
    }
    direct = not plain and place._compiles(x)
    if not plain and not (direct and all(one is not None for _, one in found.values())):
        return finish_part(place, F.linear(x, weight), *rest, blocks)
    part = x.new_empty(blocks.part_rows, features)
    begun: list[Any] = []
    products = []  # which are read until the end
    for piece in pieces:
        product = torch.mm(blocks.cut(x, piece), weight.t())
        mine = part[piece.part]
        if plain:
            products.append(piece.blocks.by_rank(product))
            begun.append(reduce_scatter(mine, products[-1], group=place.group, async_op=True))
            continue
        products.append(product)
        values = {"x": product, "bias": bias, "p": p, "seed": seed}
        values["residual"] = None if residual is None else residual[piece.part]
        one = found[(product.shape[0], features)][1]
        assert one is not None
        sizes = {"runs": piece.blocks.runs, "spacing": blocks.rows * features}
        first = piece.first * features
        begun.append(one.begin(place.backend, values, [mine], first=first, async_op=True, **sizes))
    done = [one.wait() for one in begun]
    if plain or all(done):
        return part
    place._eager.update(key for key, _ in found.values())
    return finish_part(place, F.linear(x, weight), *rest, blocks)


def dropped(x: torch.Tensor, p: float, seed: int, firsts: Sequence[int] = (0,)) -> torch.Tensor:
    """Dropout on this rank: the mask that the sums have for the same seed.

    Args:
        firsts: of equal runs of elements, the index of each one's first in the whole output.
    """
    if not p or not x.numel():
        return x
    count = x.numel() // len(firsts)
    if x.device.type == "cpu":
        like = torch.empty(count, dtype=x.dtype, device="meta")
        direct = _plan((count, x.dtype), programs.dropped_at_once, 1, x=like, p=0.5, seed=0)
        if direct is not None and direct.compiled:
            result = torch.empty_like(x, memory_format=torch.contiguous_format)
            wide = x.float() if x.dtype.itemsize == 2 else x
            runs = wide.reshape(len(firsts), count), result.view(len(firsts), count)
            for first, given, run in zip(firsts, *runs, strict=True):
                direct.here({"x": given, "p": p, "seed": seed}, run, first=first)
            return result
    keep = torch.cat([kept(p, seed, first, count, x.device) for first in firsts]).reshape(x.shape)
    return torch.where(keep, x * (1 / (1 - p)) if p < 1 else x, torch.zeros_like(x))


__all__ = ["Place", "dropped", "finish_part", "overlapped_part"]
