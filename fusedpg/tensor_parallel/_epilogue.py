"""The operations behind a row-parallel product: a sum, + bias, dropout, + residual.

The sum is an all_reduce, or with `Blocks` a reduce_scatter, and what follows it torch's functions:
a program of one operation was slower at 1 and 16 tokens, and about as fast at 256. Dropout is such
a program, since the group then compares the ranks' seeds.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fusedpg import _agreement, _fork
from fusedpg._registration import load_extension
from fusedpg.functional import _backend, group_info, shard_range
from fusedpg.fusion.api import FusedFunction
from fusedpg.fusion.compiled import Direct
from fusedpg.fusion.errors import IllegalTransformation
from fusedpg.fusion.philox import kept
from fusedpg.tensor_parallel import _programs as programs
from fusedpg.tensor_parallel._blocks import Blocks, begin_scatter_sum, reduce_scatter

# Programs that are kept; all go together.
_KEPT = 512
_CHUNKS = 4
_LEAST = 1 << 20  # bytes of a product that is summed in chunks


_lock = _fork.lock()
_plans: dict[object, Direct | None] = {}  # replaced, never emptied: it is read without the lock


def _plan(key: object, function: FusedFunction, world_size: int, **values: object) -> Direct | None:
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


class Epilogue(NamedTuple):
    """The operations behind the sum of all ranks' products.

    Args:
        bias: is added to the sum.
        residual: is added in the end; of this rank's rows.
        p: the probability of dropout between both.
        seed: of the dropout.
        overlap: as the layer's argument.
        blocks: which rows of the sum this rank gets; None: all.
    """

    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    p: float = 0.0
    seed: int = 0
    overlap: bool | None = None
    blocks: Blocks | None = None

    def values(self, product: torch.Tensor, rows: slice | None = None) -> dict[str, object]:
        """The arguments of the program with dropout; `rows`: those of the residual, if not all."""
        residual = self.residual
        if residual is not None and rows is not None:
            residual = residual[rows]
        names = ("x", "bias", "residual", "p", "seed")
        return dict(zip(names, (product, self.bias, residual, self.p, self.seed), strict=True))

    def firsts(self, rank: int, features: int) -> Sequence[int]:
        """The index in the sum of the first element of each of a rank's blocks."""
        return (0,) if self.blocks is None else self.blocks.firsts(rank, features)


class Place:
    """A group and this rank's place in it."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = dist.distributed_c10d._get_default_group() if group is None else group
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("this rank is not in the group")
        self.backend: Any = None  # ProcessGroupFused for CPU tensors
        self.straight: Any = None  # the same, if nothing is around it that checks calls
        self._eager: set[object] = set()  # programs that a rank has no function for
        try:
            backend = _backend(self.group)
        except ValueError:
            return
        if "cpu" in {device.type for device in self.group._device_types}:
            self.backend = backend
            around = self.group._get_backend(torch.device("cpu"))
            self.straight = backend if getattr(around, "wrapped_pg", None) is None else None

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
        (lacking,) = _agreement.largest([torch.get_num_threads() - cores], self.group)
        return lacking < 0

    def beside(self, x: torch.Tensor, overlap: bool | None) -> bool:
        """Whether own rows are multiplied while those of others arrive; all ranks ask alike."""
        if overlap is not None or self.size == 1:
            return bool(overlap) and self.size > 1
        return x.device.type != "cpu" or self.backend is None or self.spare

    def chunks(self, x: torch.Tensor, weight: torch.Tensor, overlap: bool | None) -> int:
        """In how many parts of the rows a product is summed: alike on all ranks."""
        if overlap is False or self.size == 1 or self.backend is None:
            return 1
        rows = x.numel() // max(x.shape[-1], 1)
        if rows < 2:
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
        self, shape: tuple[int, ...], dtype: torch.dtype, epilogue: Epilogue
    ) -> tuple[object, Direct | None]:
        """The program with dropout, and its key; None for what does not run as generated code.

        Args:
            shape: of the products.
            dtype: likewise.
        """
        bias, residual = epilogue.bias, epilogue.residual
        scatters = epilogue.blocks is not None
        key = (
            self.size,
            shape,
            dtype,
            None if bias is None else bias.dtype,
            None if residual is None else residual.dtype,
            scatters,
        )
        if key in self._eager:
            return key, None
        plans = _plans
        if key in plans:
            return key, plans[key]
        values: dict[str, object] = {"x": torch.empty(shape, dtype=dtype, device="meta")}
        values["bias"] = None if bias is None else bias.to("meta")
        values |= {"p": 0.5, "seed": 0}
        function = programs.part_at_once if scatters else programs.whole_at_once
        if residual is not None:
            given = shard_range(math.prod(shape), self.size, 0)[1:] if scatters else shape
            values["residual"] = torch.empty(given, dtype=residual.dtype, device="meta")
            function = programs.part_and_residual_at_once if scatters else function
        elif not scatters:
            values["residual"] = None
        return key, _plan(key, function, self.size, **values)

    def sum_products(
        self, x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue
    ) -> torch.Tensor:
        """The sum of all ranks' F.linear(x, weight), and what follows it."""
        chunks = self.chunks(x, weight, epilogue.overlap)
        if chunks > 1:
            overlapped = self._overlapped(x, weight, epilogue, chunks)
            if overlapped is not None:
                return overlapped
        return self.finish(F.linear(x, weight), epilogue)

    def finish(self, product: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
        """The sum of all ranks' products, which are ours to write to, and what follows it.

        Without dropout and `blocks` they may have any shape that ends with the features.
        """
        blocks, p = epilogue.blocks, epilogue.p
        if p and product.numel() and self._compiles(product):
            result = self._at_once(product, epilogue)
            if result is not None:
                return result
        if p and blocks is None:
            values = epilogue.values(product).values()
            eager: torch.Tensor = programs.whole(*values, group=self.group)
            return eager
        # Other backends may round each addition of 16-bit types.
        ours = self.backend is not None and product.device.type == "cpu"
        plain = epilogue.bias is None and epilogue.residual is None and not p and blocks is None
        wide = product if ours or plain or product.dtype.itemsize > 2 else product.float()
        if blocks is None:
            dist.all_reduce(wide, group=self.group)
            total = wide
        else:
            total, work = begin_scatter_sum(blocks.by_rank(wide), self.group)
            if work is not None:
                work.wait()
        total = total if total.dtype is product.dtype else total.to(product.dtype)
        return self._rest(total, epilogue)

    def _rest(self, total: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
        """Applies the operations behind the sum, in its memory where types allow that."""
        total = added(total, epilogue.bias)
        if epilogue.p:
            firsts = epilogue.firsts(self.rank, total.shape[1])
            total = dropped(total, epilogue.p, epilogue.seed, firsts)
        return added(total, epilogue.residual)

    def _at_once(self, product: torch.Tensor, epilogue: Epilogue) -> torch.Tensor | None:
        """`finish` with dropout as one operation; None where a rank cannot, and all know it."""
        blocks = epilogue.blocks
        key, direct = self._direct(product.shape, product.dtype, epilogue)
        if direct is None:
            return None
        # In the product's place: other memory of its size would be mapped anew in each call.
        result = product if blocks is None else blocks.part(product)
        values = epilogue.values(product)
        runs, spacing = (0, 0) if blocks is None else (blocks.runs, blocks.rows * product.shape[1])
        if direct.begin(self.backend, values, [result], runs=runs, spacing=spacing).wait():
            return result
        self._eager.add(key)
        return None

    def _overlapped(
        self, x: torch.Tensor, weight: torch.Tensor, epilogue: Epilogue, chunks: int
    ) -> torch.Tensor | None:
        """Rows are summed while the next are multiplied; None where that cannot be."""
        blocks, features = epilogue.blocks, weight.shape[0]
        pieces = list((blocks or Blocks(1, 1, x.shape[0])).pieces(chunks))
        programs_of: dict[int, tuple[object, Direct | None]] = {}  # by the rows of a piece
        if epilogue.p:
            if not self._compiles(x):
                return None
            for rows in {piece.blocks.whole_rows for piece in pieces}:
                programs_of[rows] = self._direct((rows, features), x.dtype, epilogue)
            if any(direct is None for _, direct in programs_of.values()):
                return None
        result = x.new_empty(x.shape[0] if blocks is None else blocks.part_rows, features)
        begun: list[Any] = []
        products = []  # which are read until the end
        for piece in pieces:
            target = result[piece.part]
            if blocks is None:
                product = torch.mm(x[piece.part], weight.t(), out=target)
            else:
                product = torch.mm(blocks.cut(x, piece), weight.t())
                products.append(product)
            direct = programs_of[len(product)][1] if epilogue.p else None
            if direct is not None:
                sizes = {"first": piece.first * features}
                if blocks is not None:
                    sizes |= {"runs": piece.blocks.runs, "spacing": blocks.rows * features}
                values = epilogue.values(product, piece.part)
                begun.append(direct.begin(self.backend, values, [target], async_op=True, **sizes))
            elif blocks is None:
                begun.append(dist.all_reduce(target, group=self.group, async_op=True))
            else:
                product = products[-1] = piece.blocks.by_rank(product)
                begun.append(reduce_scatter(target, product, group=self.group, async_op=True))
        done = [work.wait() for work in begun]
        if not epilogue.p:
            return self._rest(result, epilogue)
        if all(done):
            return result
        # Parts that are done are no products any more.
        self._eager.update(key for key, _ in programs_of.values())
        return None


def added(total: torch.Tensor, term: torch.Tensor | None) -> torch.Tensor:
    """The sum of both, in the total's memory where types allow that."""
    if term is None:
        return total
    return total.add_(term) if term.dtype is total.dtype else total + term


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
