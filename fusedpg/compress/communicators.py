"""How compressed gradients go from rank to rank, by the names that GRACE gave them."""

from __future__ import annotations

import abc
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed import ProcessGroup as Group

from fusedpg.compress import _block_float
from fusedpg.compress import _wire as wire
from fusedpg.compress._base import Compressor, Payload
from fusedpg.compress._numbers import Whole
from fusedpg.compress._piece import Piece
from fusedpg.compress.memories import Memory


class Communicator(abc.ABC):
    """One's own: subclass, write ``exchange``, and pass an instance."""

    @abc.abstractmethod
    def exchange(
        self, compressor: Compressor, memory: Memory, grad: Tensor, piece: Piece, group: Group
    ) -> None:
        """Replaces a flat gradient by what the gradients of the group's ranks give together.

        A collective; calls are in the same order on all ranks. ``memory.encode(compressor, grad,
        piece)`` is the payload and a context, and ``compressor.combine(grad, payloads,
        memory.scale, context)`` the result, whatever has become of the payloads on the way.
        """


class Allreduce(Communicator):
    """Payloads are added on the way: for linear compressors."""

    def exchange(
        self, compressor: Compressor, memory: Memory, grad: Tensor, piece: Piece, group: Group
    ) -> None:
        payload, at = memory.encode(compressor, grad, piece)
        compressor.all_reduce(grad, payload, memory.scale, at, group)


class Quantized(Allreduce):
    """The same, and what is added are integers: :func:`fusedpg.quantized_all_reduce`.

    ``block`` elements of a payload share an exponent. Payloads of float64 and of integers are added
    as they are.
    """

    block = Whole(at_least=1, at_most=2**31 - 1)

    def __init__(self, block: int = 256) -> None:
        self.block = block

    def exchange(
        self, compressor: Compressor, memory: Memory, grad: Tensor, piece: Piece, group: Group
    ) -> None:
        payload, at = memory.encode(compressor, grad, piece)
        compressor.all_reduce(grad, payload, memory.scale, at, group, self._add)

    def _add(self, payload: Payload, group: Group) -> Payload:
        return _block_float.sums(payload, self.block, group)


class Allgather(Communicator):
    """Every rank gets every payload."""

    _gathered = staticmethod(wire.all_gather)

    def exchange(
        self, compressor: Compressor, memory: Memory, grad: Tensor, piece: Piece, group: Group
    ) -> None:
        payload, at = memory.encode(compressor, grad, piece)
        payloads = self._gathered(payload, compressor.alike, group)
        compressor.combine(grad, payloads, memory.scale, at)


class Broadcast(Allgather):
    """The same by as many broadcasts as there are ranks, one after the other."""

    _gathered = staticmethod(wire.broadcasts)


def _shards(piece: Piece) -> list[tuple[int, int]]:
    each = -(-piece.numel // piece.world_size)
    edges = [min(rank * each, piece.numel) for rank in range(piece.world_size + 1)]
    return list(pairwise(edges))


class AllToAll(Communicator):
    """Every rank is sent its shard by all others, and its result goes to all as it is."""

    def exchange(
        self, compressor: Compressor, memory: Memory, grad: Tensor, piece: Piece, group: Group
    ) -> None:
        shards = _shards(piece)
        begin, end = shards[piece.rank]
        self._reduce(compressor, memory, grad, piece, group)
        each = shards[0][1]
        sent = torch.zeros(each, dtype=grad.dtype, device=grad.device)
        sent[: end - begin] = grad[begin:end]
        whole = torch.empty(each * piece.world_size, dtype=grad.dtype, device=grad.device)
        wire.gathered_into(whole, sent, group=group)
        grad.copy_(whole[: piece.numel])

    def _reduce(
        self, compressor: Compressor, memory: Memory, grad: Tensor, piece: Piece, group: Group
    ) -> None:
        """Combines this rank's shard."""
        shards = _shards(piece)
        encoded = []
        for begin, end in shards:
            part = piece.part(begin, end, piece.rank, piece.world_size)
            encoded.append(memory.encode(compressor, grad[begin:end], part))
        payloads = wire.all_to_all([payload for payload, _ in encoded], compressor.alike, group)
        begin, end = shards[piece.rank]
        _, context = encoded[piece.rank]
        compressor.combine(grad[begin:end], payloads, memory.scale, context)


class ParameterServer(AllToAll):
    """Every rank is the server of a shard: what it has added up is compressed for the way back.

    The server keeps what that loses (MergeComp, Wang et al. 2023), where the workers' memory keeps
    anything.
    """

    def exchange(
        self, compressor: Compressor, memory: Memory, grad: Tensor, piece: Piece, group: Group
    ) -> None:
        self._reduce(compressor, memory, grad, piece, group)
        shards = _shards(piece)
        begin, end = shards[piece.rank]
        # One rank's answer, drawn by other numbers than its own gradients were.
        part = piece.part(begin, end, piece.rank, piece.world_size, "@server", group)
        sums = memory.for_sums()
        payload, at = sums.encode(compressor, grad[begin:end], part)
        for rank, answer in enumerate(wire.all_gather(payload, False, group)):
            begin, end = shards[rank]
            if end > begin:
                theirs = piece.part(begin, end, rank, piece.world_size, "@server")
                context = compressor.context_of(theirs, at)
                compressor.combine(grad[begin:end], [answer], sums.scale, context)


BY_NAME: dict[str, type[Communicator]] = {
    "allreduce": Allreduce,
    "quantized": Quantized,
    "allgather": Allgather,
    "broadcast": Broadcast,
    "alltoall": AllToAll,
    "ps": ParameterServer,
}
