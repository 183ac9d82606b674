"""CUDA source of a fused collective's computation: one kernel over elements of the owned slice.

What the kernel gets, in which order, and each operation's expression are those of `codegen`; here
is how a GPU's threads load, compute and store. All parameters are of eight bytes:

    skip        a flag on the device: where it is set, nothing is written
    sum         the reduction over the ranks, of the first element
    operands    in the order of `Source.operands`, as FULL, PART and AS_IS say
    results     in the order of `Source.outputs`: where the first element goes
    numbers     doubles: scalars, then two of each dropout
    seeds       then the periods
    begin       the index of the first element in the whole tensor
    count       elements
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusedpg.fusion.codegen import (
    _CALLS,
    _MATH,
    _POWERS,
    Source,
    Unsupported,
    _computed,
    _stored,
    _Writer,
    header,
)
from fusedpg.fusion.ir import Group, Node, Program

ENTRY = "fusedpg_program_1"
# A kernel takes 4 KB of parameters on every GPU.
_MOST_PARAMETERS = 512


class _CudaWriter(_Writer):
    calls = _CALLS | {
        "abs": "absolute({0})",
        "sqrt": "root({0})",
        "rsqrt": "1 / root({0})",
    }
    powers = _POWERS | {0.5: "root({0})"}

    # --- what is loaded: `_before` is once a thread, `_loads` of the element i -------------------

    def _load_one(self, node: Node, place: int) -> None:
        text = f"load({self._parameter(place)})"
        self._before.append(f"const {_computed(node.dtype)} {self._names[node]} = {text};")

    def _load_pattern(self, node: Node, place: int, function: str) -> None:
        index = f"{function}(begin + i, period{len(self._periods)})"
        self._loads[node] = f"{self._parameter(place)}[{index}]"

    def _load_slice(self, node: Node, place: int) -> None:
        self._loads[node] = f"{self._parameter(place)}[i]"

    def _sum(self, node: Node) -> str:
        return "sum[i]"

    def _take_number(self, node: Node, number: int) -> None:
        pass  # a parameter has its name

    def _random(self, node: Node, number: int, first: int) -> str:
        name = self._names[node]
        self._before.append(f"const u32 {name}_least = u32({name}_from);")
        return f"philox(seed{number}, begin + i)"

    def _number(self, node: Node) -> str:
        text = super()._number(node)
        return text.replace("NAN", "nan()").replace("INFINITY", "infinity()")

    def _parameter(self, place: int) -> str:
        return f"{list(self._operands)[place].name}_in"

    # --- the kernel ------------------------------------------------------------------------------

    def _body(
        self, order: list[Node], sinks: list[tuple[int, Node, Node]], sums: Sequence[Node] = ()
    ) -> list[str]:
        arrays, loads, lines = [], [], []
        for node, text in self._loads.items():
            name = self._names[node]
            kind = self._wide() if node is self._scatter else _stored(node)
            arrays.append(f"{kind} {name}raw[kItems];")
            loads.append(f"{name}raw[k] = {text};")
            value = f"load({name}raw + k)"
            if node is self._scatter:
                value = self._averaged(value)
            lines.append(f"const {_computed(node.dtype)} {name} = {value};")
        for node in order:
            kind, text = _computed(node.dtype), ""
            if node.op in _MATH:
                assert node.dtype is not None
                call = f"{self._function(node)}({self._names[node.operands[0]]})"
                text = self._rounded(call, node.dtype)
            else:
                text = self._expression(node)
            where = f"  // {node.source}" if node.source else ""
            lines.append(f"const {kind} {self._names[node]} = {text};{where}")
        for _, node, result in sinks:
            if result is not node and node.dtype == torch.bool:
                raise Unsupported("a mask that all ranks get")
            lines.append(f"store({node.name}_out + i, {self._names[result]});")
        each = [
            "#pragma unroll",
            "for (u32 k = 0; k < kItems; ++k) {",
            "  const u64 i = tile + k * kThreads + threadIdx.x;",
            "  if (i < count) {",
        ]
        return [
            *arrays,
            *each,
            *("    " + line for line in loads),
            *("  }", "}"),
            *each,
            *("    " + line for line in lines),
            *("  }", "}"),
        ]

    @staticmethod
    def _function(node: Node) -> str:
        return _Writer._function(node).split("<")[0]

    def _parameters(self) -> list[str]:
        reduction = self._scatter.attribute("op")
        names = self._names
        return [
            "const bool* skip",
            f"const {self._wide()}* sum /* over the ranks: {reduction} */",
            *(f"const {_stored(node)}* {node.name}_in" for node in self._operands),
            *(f"{_stored(node)}* {node.name}_out" for node, _ in self._outputs()),
            *(f"double {names[node]}" for node in self._numbers),
            *(f"double {names[x]}_{part}" for x in self._dropouts for part in ("from", "scale")),
            *(f"u64 seed{number}" for number in range(len(self._seeds))),
            *(f"u64 period{number}" for number in range(len(self._periods))),
            "u64 begin",
            "u64 count",
        ]

    def _text_of_file(self, body: list[str], math_needed: bool) -> str:
        parameters = self._parameters()
        if len(parameters) > _MOST_PARAMETERS:
            raise Unsupported("a kernel of so many parameters")
        kernel = [
            f'extern "C" __global__ void __launch_bounds__(kThreads) {ENTRY}(',
            ",\n".join(f"    {parameter}" for parameter in parameters) + ") {",
            "  if (*skip) {",
            "    return;",
            "  }",
            *("  " + line for line in self._before),
            "  for (u64 tile = u64(blockIdx.x) * kTile; tile < count; "
            "tile += u64(gridDim.x) * kTile) {",
            *("    " + line for line in body),
            "  }",
            "}",
        ]
        head = header("program.cuh") + (header("math.cuh") if math_needed else "")
        return "\n".join([*self._comment(), "", head, *kernel, ""])


def generate_cuda(group: Group, nodes: tuple[Node, ...], program: Program) -> Source:
    """The source of a group, for CUDA.

    Raises:
        Unsupported: for what is not generated.
    """
    return _CudaWriter(group, nodes, program).source()


def parameters(source: Source) -> int:
    """How many parameters the kernel has."""
    values = len(source.operands) + len(source.outputs)
    numbers = len(source.numbers) + 2 * len(source.dropouts)
    return 2 + values + numbers + len(source.seeds) + len(source.periods) + 2


__all__ = ["ENTRY", "generate_cuda", "parameters"]
