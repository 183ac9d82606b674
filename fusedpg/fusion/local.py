"""Carries out a group that needs no other rank with generated code, on this rank's threads."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from fusedpg import _fork
from fusedpg._registration import load_extension
from fusedpg.functional import shard_range
from fusedpg.fusion import compile, compiled
from fusedpg.fusion.chunks import ChunkedCollective
from fusedpg.fusion.codegen import Unsupported, code
from fusedpg.fusion.codegen_rows import CHUNK, SLICE, RowSource, generate_rows
from fusedpg.fusion.compiled import kernel, unfit
from fusedpg.fusion.ir import SHARD, Node, Program

_log = logging.getLogger("fusedpg")
_lock = _fork.lock()
_LEAST = 1 << 15  # elements that are worth a thread
_pool: ThreadPoolExecutor | None = None


def _threads() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(os.cpu_count() or 1, "fusedpg-rows")
        return _pool


def _forget_threads() -> None:
    """A child of fork has none of them."""
    global _pool
    _pool = None


os.register_at_fork(after_in_child=_forget_threads)


class LocalKernel:
    """The generated code of a group of kind "compute"."""

    def __init__(self, nodes: tuple[Node, ...], program: Program) -> None:
        self._name = program.name
        self._world_size = program.world_size
        self.reason = ""
        self.source: RowSource | None = None
        self._address: int | None = None  # of the compiled function; 0: there is none
        self._extents: dict[int, _Extent] = {}
        self.code = ""
        try:
            self.source = generate_rows(nodes, program)
            self.code = code(self.source.text)
        except Unsupported as unsupported:
            self.reason = f"{unsupported} is not generated"
            _log.info("%s computes operation by operation: %s", program.name, self.reason)

    def function(self) -> int:
        """The address of the compiled function; 0 where this rank has none."""
        if self._address is None:
            assert self.source is not None
            self._address = compile.function(self.source.text, self._name)
        return self._address

    def compute(
        self,
        operands: Sequence[torch.Tensor],
        numbers: list[float],
        seeds: list[int],
        rank: int,
    ) -> list[torch.Tensor]:
        """The results of the source's operands, which are contiguous."""
        source = self.source
        assert source is not None
        extent = self._extents.get(rank)
        if extent is None:
            extent = self._extents[rank] = _Extent(source, self._world_size, rank)
        for (node, _, _), value, count in zip(source.operands, operands, extent.counts):
            if value.dtype is not node.dtype or value.numel() != count:
                raise unfit(node, value)
        total, rows = extent.total, extent.rows
        results = [
            torch.empty((total,) if source.sliced else node.shape, dtype=node.dtype, device="cpu")
            for node in source.outputs
        ]
        call = functools.partial(
            load_extension()._call_generated,
            self._address,
            None,
            operands,
            results,
            numbers,
            [*seeds, extent.length, total, extent.first, *source.periods],
            scratch=extent.scratch,
        )
        parts = min(torch.get_num_threads(), rows, max(total // _LEAST, 1))
        if parts > 1:
            cuts = [rows * k // parts for k in range(parts + 1)]
            waiting = [
                _threads().submit(call, begin, end - begin)
                for begin, end in itertools.pairwise(cuts[1:])
            ]
            call(0, cuts[1])
            for future in waiting:  # which raises what the part has raised
                future.result()
        elif rows:
            call(0, rows)
        return results


class _Extent:
    """What a rank computes of a source, in numbers."""

    def __init__(self, source: RowSource, world_size: int, rank: int) -> None:
        self.first, self.total = 0, math.prod(source.shape)
        if source.sliced:
            self.first, self.total = shard_range(self.total, world_size, rank)
        self.length = source.rows.length if source.rows is not None else CHUNK
        self.rows = -(-self.total // self.length)
        self.scratch = 64 + source.buffers * (8 * (self.length + 64) + 64)
        self.counts = []
        for node, how, shape in source.operands:
            count = math.prod(shape)
            sliced = how == SLICE or node.layout == SHARD
            self.counts.append(shard_range(count, world_size, rank)[1] if sliced else count)


def local_kernel(group: object, nodes: tuple[Node, ...], program: Program) -> LocalKernel:
    """Of a group of kind "compute"; generated once, and kept by the program."""
    return program.once(group, functools.partial(LocalKernel, nodes, program))


def sources(program: Program) -> list[str]:
    """The texts of a program's groups of kind "compute", or why there are none."""
    units = ((group, nodes) for group, nodes in program.units if group is not None)
    found = [local_kernel(*unit, program) for unit in units if unit[0].kind == "compute"]
    return [x.source.text if x.source else f"// {x.reason}\n" for x in found]


def generated(program: Program, device: str = "cpu") -> str:
    """All that is generated for a program on a kind of device, or why there is nothing."""
    collectives, others = compiled.sources(program, device), []
    for group, _ in program.units:
        chunked = ChunkedCollective.of(group, program)
        if chunked is not None:
            whole = kernel(chunked.collective, chunked.nodes, program)  # GPUs have no chunks
            found = chunked.of_rows(chunked.spans[0][1]) if device == "cpu" else whole
            others.append(found.text(device))
    others += sources(program) if device == "cpu" else []
    if others and not collectives:
        return "\n".join(others)
    text = "\n".join(collectives) or "// no fused collective: nothing is generated\n"
    return text + "\n".join(others)
