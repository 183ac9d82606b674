"""Carries out a group that needs no other rank with generated code, on this rank's threads."""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import os
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

from fusedpg._registration import load_extension
from fusedpg.functional import shard_range
from fusedpg.fusion import compile, compiled
from fusedpg.fusion.agreed import agree, agreed
from fusedpg.fusion.codegen import Unsupported, code
from fusedpg.fusion.codegen_rows import BROADCAST, CHUNK, SLICE, RowSource, generate_rows
from fusedpg.fusion.direct import Args, Output, array
from fusedpg.fusion.ir import SHARD, Node, Program
from fusedpg.fusion.scalars import scalars

_log = logging.getLogger("fusedpg")
_lock = threading.Lock()
_LEAST = 1 << 15  # elements that are worth a thread
_pool: ThreadPoolExecutor | None = None

Slicer = Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]
_Function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)


def _threads() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(os.cpu_count() or 1, "fusedpg-rows")
        return _pool


def _forget_threads() -> None:
    """A child of fork has none of them."""
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_threads)


class LocalKernel:
    """The generated code of a group of kind "compute"."""

    def __init__(self, nodes: tuple[Node, ...], program: Program) -> None:
        self._name = program.name
        self._world_size = program.world_size
        self.reason = ""
        self.source: RowSource | None = None
        self._call: Any = None  # the compiled function
        self._code = ""
        try:
            self.source = generate_rows(nodes, program)
            self._code = code(self.source.text)
        except Unsupported as unsupported:
            self.reason = f"{unsupported} is not generated"
            _log.info("%s computes operation by operation: %s", program.name, self.reason)

    def run(
        self,
        values: dict[Node, Any],
        slicer: Slicer,
        group: dist.ProcessGroup | None,
        rank: int,
    ) -> Generator[Any, None, bool]:
        """Whether it has been done; then the values that others use are there.

        The first run on a group is a collective: where one rank cannot, none does, or values that
        are alike on all ranks would not be.
        """
        source = self.source
        if source is None:
            return False
        wanted = bool(load_extension()._fusion_settings()[0])
        if not all(_on_cpu(values, node) for node, _, _ in source.operands):
            return False
        if self._world_size > 1:
            there = group if group is not None else dist.distributed_c10d._get_default_group()
            # By whether code is wanted: who does not want it has to be asked, too.
            key = "rows", wanted, self._code
            if agreed(there, key) is None:
                able = float(wanted and self._found(source))
                flag = torch.tensor([able], dtype=torch.float32, device="cpu")
                yield dist.all_reduce(flag, dist.ReduceOp.MIN, group=group, async_op=True)
                agree(there, key, bool(flag.item()))
                if not flag.item():
                    _log.info("%s: a rank has no compiled function", self._name)
            if not agreed(there, key) or not self._found(source):
                return False
        elif not wanted or not self._found(source):
            return False
        self._compute(source, values, slicer, rank)
        return True

    def _found(self, source: RowSource) -> bool:
        if self._call is None:
            address = compile.function(source.text, self._name)
            self._call = _Function(address) if address else False
        return bool(self._call)

    def _compute(
        self, source: RowSource, values: dict[Node, Any], slicer: Slicer, rank: int
    ) -> None:
        operands = []
        for node, how, shape in source.operands:
            if how == SLICE:
                value = slicer(values[node.operands[0]], shape)
            else:
                value = values[node]
                value = value.expand(shape) if how == BROADCAST else value
            count = math.prod(shape)
            if how == SLICE or node.layout == SHARD:
                count = shard_range(count, self._world_size, rank)[1]
            if value.dtype is not node.dtype or value.numel() != count:
                raise compiled.unfit(node, value)
            operands.append(value.contiguous())
        first, total = 0, math.prod(source.shape)
        if source.sliced:
            first, total = shard_range(total, self._world_size, rank)
        length = source.rows.length if source.rows is not None else CHUNK
        results = [
            torch.empty((total,) if source.sliced else node.shape, dtype=node.dtype, device="cpu")
            for node in source.outputs
        ]
        numbers, seeds = scalars(source, values.__getitem__)
        given = array(ctypes.c_void_p, [operand.data_ptr() for operand in operands])
        doubles = array(ctypes.c_double, numbers)
        others = array(ctypes.c_uint64, [*seeds, length, total, first, *source.periods])
        places = [array(ctypes.c_void_p, [result.data_ptr()]) for result in results]
        buffers = 64 + source.buffers * (8 * (length + 64) + 64)

        def part(begin: int, count: int) -> None:
            scratch = torch.empty(buffers, dtype=torch.uint8, device="cpu")
            own = array(ctypes.c_void_p, [scratch.data_ptr() + -scratch.data_ptr() % 64])
            outputs = array(Output, [Output(place, 1, 1, 0) for place in (*places, own)])
            args = Args(None, 0, given, outputs, doubles, others)
            self._call(ctypes.addressof(args), begin, count)

        rows = -(-total // length)
        parts = min(torch.get_num_threads(), rows, max(total // _LEAST, 1))
        if parts > 1:
            cuts = [rows * k // parts for k in range(parts + 1)]
            waiting = [
                _threads().submit(part, begin, end - begin)
                for begin, end in itertools.pairwise(cuts[1:])
            ]
            part(0, cuts[1])
            for future in waiting:  # which raises what the part has raised
                future.result()
        elif rows:
            part(0, rows)
        values.update(zip(source.outputs, results))


def _on_cpu(values: Mapping[Node, Any], node: Node) -> bool:
    """Of a slice that is not made yet: where its tensor is."""
    value = values[node] if node in values else values[node.operands[0]]
    return bool(value.device.type == "cpu")


def local_kernel(group: Any, nodes: tuple[Node, ...], program: Program) -> LocalKernel:
    """Of a group of kind "compute"; generated once, and kept by the program."""
    found: LocalKernel | None = program.made.get(group)
    if found is None:
        with _lock:
            found = program.made.setdefault(group, LocalKernel(nodes, program))
    return found


def sources(program: Program) -> str:
    """The sources of a program's groups of kind "compute", or why there are none."""
    parts = []
    for group, nodes in program.units:
        if group is not None and group.kind == "compute":
            found = local_kernel(group, nodes, program)
            parts.append(found.source.text if found.source else f"// {found.reason}\n")
    return "\n".join(parts)


def generated(program: Program, device: str = "cpu") -> str:
    """All that is generated for a program on a kind of device, or why there is nothing."""
    local = sources(program) if device == "cpu" else ""
    if local and not any(group.kind == "collective" for group in program.groups):
        return local
    return compiled.generated(program, device) + local


__all__ = ["LocalKernel", "generated", "local_kernel", "sources"]
