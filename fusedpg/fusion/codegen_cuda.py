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
    CALLS,
    MATH,
    POWERS,
    Source,
    Unsupported,
    computed_type,
    stored_type,
)
from fusedpg.fusion.codegen_collective import CollectiveWriter, of_rows
from fusedpg.fusion.codegen_loop import Sink, indented
from fusedpg.fusion.ir import Group, Node, Program

ENTRY = "fusedpg_program_1"
# A kernel takes 4 KB of parameters on every GPU.
_MOST_PARAMETERS = 512


class _CudaWriter(CollectiveWriter):
    calls = CALLS | {
        "abs": "absolute({0})",
        "sqrt": "root({0})",
        "rsqrt": "1 / root({0})",
    }
    powers = POWERS | {0.5: "root({0})"}
    _suffix = "cuh"

    def _begin_loop(self) -> None:
        super()._begin_loop()
        self._parameter_of: dict[Node, str] = {}

    def _cut(self) -> None:
        if of_rows(self._nodes):
            raise Unsupported("a number for each row of a slice")

    # --- sources: `_before` is once a thread, `_loads` of the element i ---------------------------

    def _pointer(self, node: Node, number: int) -> None:
        self._parameter_of[node] = f"{list(self._operands)[number].name}_in"

    def _load_number(self, node: Node) -> None:
        text = f"load({self._parameter_of[node]})"
        self._before.append(f"const {computed_type(node.dtype)} {self._names[node]} = {text};")

    def _load_elements(self, node: Node) -> None:
        self._loads[node] = f"{self._parameter_of[node]}[i]"

    def _load_repeated(self, node: Node, function: str, period: int) -> None:
        index = f"{function}(begin + i, period{len(self._periods)})"
        self._loads[node] = f"{self._parameter_of[node]}[{index}]"
        self._periods.append(period)

    def _sum(self) -> str:
        self._loads[self._scatter] = "sum[i]"
        return self._averaged(f"load({self._names[self._scatter]}raw + k)")

    def _take_number(self, node: Node, number: int) -> None:
        pass  # a parameter has its name

    def _random(self, node: Node, number: int, first: int) -> str:
        name = self._names[node]
        self._before.append(f"const u32 {name}_least = u32({name}_from);")
        return f"philox(seed{number}, begin + i)"

    def _number(self, node: Node) -> str:
        text = super()._number(node)
        return text.replace("NAN", "nan()").replace("INFINITY", "infinity()")

    def _deliver(self, number: int, node: Node, value: Node) -> None:
        if value is not node and node.dtype == torch.bool:
            raise Unsupported("a mask that all ranks get")
        sink = Sink(f"store({node.name}_out + i, {self._names[value]});")
        self._sinks.setdefault(value, []).append(sink)

    # --- the kernel ------------------------------------------------------------------------------

    def _passes(self, order: list[Node]) -> list[str]:
        computed = []
        for node in order:
            kind, text = computed_type(node.dtype), ""
            if node.op in MATH:
                assert node.dtype is not None
                call = f"{self._function(node)}({self._names[node.operands[0]]})"
                text = self._rounded(call, node.dtype)
            else:
                text = self._expression(node)
            computed.append(f"const {kind} {self._names[node]} = {text};{self._where(node)}")
        arrays, loads, lines = [], [], []
        for node, text in self._loads.items():
            name = self._names[node]
            kind = self._wide() if node is self._scatter else stored_type(node)
            arrays.append(f"{kind} {name}raw[kItems];")
            loads.append(f"{name}raw[k] = {text};")
            if node is not self._scatter:
                value = f"load({name}raw + k)"
                lines.append(f"const {computed_type(node.dtype)} {name} = {value};")
        lines += computed
        lines += [sink.store for sinks in self._sinks.values() for sink in sinks]
        each = [
            "#pragma unroll",
            "for (u32 k = 0; k < kItems; ++k) {",
            "  const u64 i = tile + k * kThreads + threadIdx.x;",
            "  if (i < count) {",
        ]
        return [
            *arrays,
            *each,
            *indented(indented(loads)),
            *("  }", "}"),
            *each,
            *indented(indented(lines)),
            *("  }", "}"),
        ]

    @staticmethod
    def _function(node: Node) -> str:
        return CollectiveWriter._function(node).split("<")[0]

    def _parameters(self) -> list[str]:
        reduction = self._scatter.attribute("op")
        names = self._names
        return [
            "const bool* skip",
            f"const {self._wide()}* sum /* over the ranks: {reduction} */",
            *(f"const {stored_type(node)}* {node.name}_in" for node in self._operands),
            *(f"{stored_type(node)}* {node.name}_out" for node, _ in self._outputs()),
            *(f"double {names[node]}" for node in self._numbers),
            *(f"double {names[x]}_{part}" for x in self._dropouts for part in ("from", "scale")),
            *(f"u64 seed{number}" for number in range(len(self._seeds))),
            *(f"u64 period{number}" for number in range(len(self._periods))),
            "u64 begin",
            "u64 count",
        ]

    def _function_body(self, body: list[str], empty: Sequence[str] = ()) -> list[str]:
        return body

    def _file(self, bodies: list[list[str]]) -> str:
        parameters = self._parameters()
        if len(parameters) > _MOST_PARAMETERS:
            raise Unsupported("a kernel of so many parameters")
        kernel = [
            f'extern "C" __global__ void __launch_bounds__(kThreads) {ENTRY}(',
            ",\n".join(f"    {parameter}" for parameter in parameters) + ") {",
            "  if (*skip) {",
            "    return;",
            "  }",
            *indented(self._before),
            "  for (u64 tile = u64(blockIdx.x) * kTile; tile < count; "
            "tile += u64(gridDim.x) * kTile) {",
            *indented(indented(bodies[0])),
            "  }",
            "}",
        ]
        return "\n".join([*self._comment(), "", self._headers(), *kernel, ""])


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
