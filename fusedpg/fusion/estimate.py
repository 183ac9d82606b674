"""What a run of a program takes on a rank, by a model of tensors in one host's memory.

It is there to compare schedules of one program, the same on all ranks: it knows nothing but the
program. Its constants are of two ranks on two cores (benchmarks/schedules.py measures them).
"""

from __future__ import annotations

from fusedpg.fusion.chunks import ChunkedCollective
from fusedpg.fusion.codegen import MATH
from fusedpg.fusion.compiled import kernel
from fusedpg.fusion.ir import COLLECTIVES, LOCAL_REDUCTIONS, REDUCTIONS, Group, Node, Program
from fusedpg.fusion.local import local_kernel

# Seconds that Python and torch take for a call of each.
_OPERATION = 7e-6
_COLLECTIVE = 30e-6
_KERNEL = 25e-6  # a fused collective, or a reduction that is one without computation
_LOCAL = 10e-6  # a generated function of this rank's tensors
# Seconds for a byte that is read or written, and for one of a new tensor, whose pages are empty.
_BYTE = 0.1e-9
_NEW_BYTE = 0.15e-9
# Seconds for an element, besides its bytes: of what is computed from integers, by series, or else.
_MASK = 40e-9
_KERNEL_MASK = 2e-9
_SERIES = 2e-9
_SIMPLE = 0.1e-9


def seconds(program: Program) -> float:
    """The time of a run."""
    total = 0.0
    for group, nodes in program.units:
        overlaps = group is not None and group.kind == "overlap"
        chunked = ChunkedCollective.of(group, program) if overlaps else None
        if group is not None and chunked is not None:
            # As if nothing were beside anything else: cores may be busy with what others compute.
            total += sum(_alone(product, program.world_size) for product in chunked.products)
            total += (group.chunks - 1) * _KERNEL
            group, nodes = chunked.collective, chunked.nodes
        if group is None:
            total += sum(_alone(node, program.world_size) for node in nodes)
        elif group.kind == "collective" and kernel(group, nodes, program).source is not None:
            total += _KERNEL + _passed(group, nodes, program)
        elif group.kind == "compute" and local_kernel(group, nodes, program).source is not None:
            total += _LOCAL + _passed(group, nodes, program)
        else:
            total += sum(_alone(node, program.world_size) for node in nodes)
            total += (group.chunks - 1) * _COLLECTIVE
    return total


def _held(node: Node, size: int) -> int:
    """Elements of a value on a rank."""
    return -(-node.numel // size) if node.layout.parted else node.numel


def _bytes(node: Node, size: int) -> int:
    return 0 if node.dtype is None else _held(node, size) * node.dtype.itemsize


def _alone(node: Node, size: int) -> float:
    """The time of an operation of torch's or the group's."""
    if node.scalar or node.op in ("input", "constant"):
        return 0.0
    if node.op == "slice" and node.shape == node.operands[0].shape:
        return _OPERATION / 2  # a view
    given = sum(_bytes(operand, size) for operand in node.operands)
    made = _bytes(node, size)
    time = (given + made) * _BYTE + made * _NEW_BYTE
    if node.op in COLLECTIVES:
        # Copies to and from other ranks' sight, beside the reading of what these have left there.
        whole = node.numel * (node.dtype.itemsize if node.dtype is not None else 0)
        passes = {"all_reduce": 3, "reduce_scatter": 2, "all_gather": 1, "broadcast": 1}
        call = _KERNEL if node.op in ("all_reduce", "reduce_scatter") else _COLLECTIVE
        return call + time + passes[node.op] * whole * _BYTE
    return _OPERATION + time + _held(node, size) * _element(node, _MASK)


def _element(node: Node, mask: float) -> float:
    """The time of computing an element, however it is read and written."""
    if node.op == "dropout":
        return mask
    if node.op in MATH or node.op == "pow":
        return _SERIES
    reduces = node.op in REDUCTIONS or node.op in LOCAL_REDUCTIONS
    return _SIMPLE if node.pointwise or reduces else 0.0


def _passed(group: Group, nodes: tuple[Node, ...], program: Program) -> float:
    """The time of one pass over memory that computes these."""
    size, inside = program.world_size, group.nodes
    # In an order that is the same on all ranks, as sums of floats are then.
    read = dict.fromkeys(x for node in nodes for x in node.operands if x not in inside)
    time = 0.0
    for node in nodes:
        if node.op == "reduce_scatter":
            # It is copied to where all ranks see it, and read there by the one that adds.
            time += 2 * _bytes(node.operands[0], size) * _BYTE
        elif node.op == "all_gather":
            time += _bytes(node, size) * (2 * _BYTE + _NEW_BYTE)
            continue
        elif node.op == "all_reduce":
            time += _COLLECTIVE / 2  # ranks meet once more
            continue
        else:
            time += _held(node, size) * _element(node, _KERNEL_MASK)
        leaves = node in program.outputs or not inside.issuperset(program.users[node])
        if leaves and node.layout.kind != "Partial":
            time += _bytes(node, size) * (_BYTE + _NEW_BYTE)
    sliced = {node.operands[0] for node in nodes if node.op == "slice"}
    for value in read:
        whole = _bytes(value, size)
        time += _BYTE * (whole // size if value in sliced else whole)
    return time
