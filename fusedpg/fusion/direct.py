"""A program that is one fused collective, called without what a call of `fuse` looks up first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusedpg._registration import load_extension
from fusedpg.fusion import compile
from fusedpg.fusion.codegen import Source
from fusedpg.fusion.compiled import begin, kernel, unfit
from fusedpg.fusion.ir import Node, Program
from fusedpg.fusion.scalars import scalars


class Begun:
    """An operation of a group that has begun."""

    def __init__(self, work: Any, done: torch.Tensor) -> None:
        self._work = work
        self._done = done

    def wait(self) -> bool:
        """Whether it has been done: not where a rank has no compiled function."""
        if self._work is not None:
            self._work.wait()
        return bool(self._done.item())


class Direct:
    """The one fused collective of a program, which takes its inputs and gives its results.

    What does not change from call to call is looked up once. Values are given by their names.
    """

    def __init__(self, name: str, source: Source) -> None:
        self._function = compile.function(source.text, name)
        self._source = source
        self._contribution = source.scatter.operands[0].name
        # Weights of a norm are taken in a wider type.
        self._operands = [(_input(node).name, node.dtype) for node, _ in source.operands]

    @staticmethod
    def of(program: Program) -> Direct | None:
        """None where the program is more than that, or is not generated: alike on all ranks."""
        groups = [(group, nodes) for group, nodes in program.units if group is not None]
        others = [node for group, nodes in program.units if group is None for node in nodes]
        if len(groups) != 1 or any(node.op not in ("input", "constant", "cast") for node in others):
            return None
        group, nodes = groups[0]
        source = kernel(group, nodes, program).source if group.kind == "collective" else None
        if source is None or not source.scatter.numel or source.materialised:
            return None
        outputs = tuple(node for node, _ in source.outputs)
        given = [source.scatter.operands[0], *(_input(node) for node, _ in source.operands)]
        given += [*source.numbers, *source.seeds]
        given += [node.operands[1] for node in source.dropouts]
        if outputs != program.outputs:
            return None
        if any(node.op != "input" for node in given):
            return None
        return Direct(program.name, source)

    @property
    def compiled(self) -> bool:
        """Whether this rank has a function; the group's operation finds that out for all."""
        return bool(self._function)

    def _given(self, values: Mapping[str, Any]) -> tuple[list[float], list[int]]:
        return scalars(self._source, lambda node: values[node.name])

    def _read(self, values: Mapping[str, Any]) -> list[torch.Tensor]:
        return [values[name].to(dtype).contiguous() for name, dtype in self._operands]

    def begin(
        self,
        backend: Any,
        values: Mapping[str, Any],
        results: Sequence[torch.Tensor],
        *,
        first: int = 0,
        runs: int = 0,
        spacing: int = 0,
        async_op: bool = False,
    ) -> Begun:
        """Writes the results, as an operation of the group.

        Args:
            first: the index, to dropout, of the first element: for rows of a larger tensor.
            runs: where each rank gets its part: the contribution is so many runs of equal blocks,
                one block for each rank in every run, and the part is this rank's blocks. 0: it is
                shard_range.
            spacing: of the first elements of neighbouring blocks, their distance in that tensor.
        """
        numbers, seeds = self._given(values)
        done = torch.zeros(1, dtype=torch.uint8, device="cpu")
        work = begin(
            backend,
            self._function,
            self._source,
            values[self._contribution].contiguous(),
            self._read(values),
            results,
            numbers,
            seeds,
            done,
            async_op,
            first,
            runs,
            spacing,
        )
        return Begun(work, done)

    def here(self, values: Mapping[str, Any], result: torch.Tensor, *, first: int = 0) -> None:
        """The computation alone, on whole tensors: the contribution is taken for the sum.

        It is given in the type that sums have, which is float for 16-bit types. `first` is as in
        `begin`.
        """
        numbers, seeds = self._given(values)
        total = values[self._contribution].contiguous()
        operands = self._read(values)
        scatter, (of_result, _) = self._source.scatter, self._source.outputs[0]
        assert scatter.dtype is not None
        wide = torch.float32 if scatter.dtype.itemsize == 2 else scatter.dtype
        pairs = [(scatter, total, wide), (of_result, result, of_result.dtype)]
        pairs += [(n, x, n.dtype) for (n, _), x in zip(self._source.operands, operands)]
        for node, tensor, dtype in pairs:
            fits = tensor.dtype is dtype and tensor.numel() == node.numel
            if not fits or tensor.device.type != "cpu" or not tensor.is_contiguous():
                raise unfit(node, tensor)
        load_extension()._call_generated(
            self._function,
            total,
            operands,
            [result],
            numbers,
            [*seeds, *self._source.periods],
            first,
            result.numel(),
        )


def _input(node: Node) -> Node:
    """What a value is, or is cast from."""
    return node.operands[0] if node.op == "cast" else node


__all__ = ["Begun", "Direct"]
