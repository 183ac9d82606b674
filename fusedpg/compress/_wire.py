"""Payloads, which are lists of flat tensors, from rank to rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fusedpg import _agreement
from fusedpg._collectives import sums
from fusedpg.functional import _is_ours

Payload = list[Tensor]
Add = Callable[[Payload, dist.ProcessGroup], Payload]
"""The sums of all ranks' payloads."""
# torch 2.13 has a new name for it, and a warning for the old one.
gathered_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Parts begin at multiples of this many bytes.
_ALIGNED = 16


def pack(payload: Sequence[Tensor]) -> Tensor:
    """One tensor of bytes."""
    if len(payload) == 1:
        return payload[0].contiguous().view(torch.uint8)
    padding = torch.zeros(_ALIGNED, dtype=torch.uint8, device=payload[0].device)
    parts = []
    for tensor in payload:
        parts.append(tensor.contiguous().view(torch.uint8))
        rest = -parts[-1].numel() % _ALIGNED
        if rest:
            parts.append(padding[:rest])
    return torch.cat(parts)


def unpack(packed: Tensor, kinds: Sequence[tuple[torch.dtype, int]]) -> Payload:
    """The tensors that were packed, of these types and sizes: views, where that can be."""
    payload = []
    begin = 0
    for dtype, numel in kinds:
        count = numel * dtype.itemsize
        part = packed[begin : begin + count]
        if part.storage_offset() % dtype.itemsize or part.data_ptr() % _ALIGNED:
            part = part.clone()
        payload.append(part.view(dtype))
        begin += -(-count // _ALIGNED) * _ALIGNED
    return payload


def _kinds(payload: Sequence[Tensor]) -> list[tuple[torch.dtype, int]]:
    return [(tensor.dtype, tensor.numel()) for tensor in payload]


# Types by a number that does not depend on torch's version.
_DTYPES = {
    zlib.crc32(str(dtype).encode()): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


def pack_described(payload: Sequence[Tensor]) -> Tensor:
    """The same with types and sizes in front, for ranks that do not know them."""
    numbers = [len(payload)]
    for dtype, numel in _kinds(payload):
        numbers += [zlib.crc32(str(dtype).encode()), numel]
    device = payload[0].device if payload else torch.device("cpu")
    return pack([torch.tensor(numbers, dtype=torch.int64, device=device), *payload])


def unpack_described(packed: Tensor) -> Payload:
    whole = packed[: packed.numel() // 8 * 8].view(torch.int64)
    count = int(whole[0])
    numbers = whole[1 : 1 + 2 * count].tolist()
    kinds = [(_DTYPES[code], numel) for code, numel in zip(numbers[::2], numbers[1::2])]
    return unpack(packed, [(torch.int64, 1 + 2 * count), *kinds])[1:]


def _counts(packed: Tensor, group: dist.ProcessGroup) -> list[int]:
    """How many bytes each rank has."""
    own = torch.tensor([packed.numel()], device=packed.device)
    found = own.new_empty(dist.get_world_size(group))
    gathered_into(found, own, group=group)
    return found.tolist()


def check_alike(payload: Payload, name: str, group: dist.ProcessGroup) -> None:
    """Raises, on all ranks, if their payloads have other types or sizes.

    Raises:
        TypeError: with this rank's.
    """
    kinds = _kinds(payload)
    if not _agreement.same(kinds, group, payload[0].device):
        raise TypeError(
            f"{name}.compress() gave tensors of other types or sizes on other ranks than on rank "
            f"{dist.get_rank(group)}, where they are {kinds}: their sums would mean nothing"
        )


def all_reduce(payload: Payload, group: dist.ProcessGroup) -> Payload:
    """The sums of all ranks' payloads, in one operation for each type."""
    if len(payload) == 1:
        dist.all_reduce(payload[0], group=group)
        return payload
    return sums(payload, group)


def all_gather(payload: Payload, alike: bool, group: dist.ProcessGroup) -> list[Payload]:
    """The payloads of all ranks; ``alike``: all have these types and sizes."""
    size = dist.get_world_size(group)
    packed = pack(payload) if alike else pack_described(payload)
    counts = [packed.numel()] * size if alike else _counts(packed, group)
    if len(set(counts)) == 1:
        whole = packed.new_empty(size * counts[0])
        gathered_into(whole, packed, group=group)
        parts = list(whole.split(counts[0])) if counts[0] else [whole] * size
    elif _is_ours(group):
        parts = [packed.new_empty(count) for count in counts]
        dist.all_gather(parts, packed, group=group)
    else:
        most = max(counts)
        padded = packed.new_zeros(most)
        padded[: packed.numel()] = packed
        whole = packed.new_empty(size * most)
        gathered_into(whole, padded, group=group)
        parts = list(whole.split(most))
    return _unpacked(parts, payload if alike else None)


def _unpacked(parts: Sequence[Tensor], like: Payload | None) -> list[Payload]:
    if like is None:
        return [unpack_described(part) for part in parts]
    kinds = _kinds(like)
    return [unpack(part, kinds) for part in parts]


def broadcasts(payload: Payload, alike: bool, group: dist.ProcessGroup) -> list[Payload]:
    # A copy: the result may be written where a payload lies.
    packed = pack(payload).clone() if alike else pack_described(payload)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    counts = [packed.numel()] * size if alike else _counts(packed, group)
    parts = [packed if n == rank else packed.new_empty(count) for n, count in enumerate(counts)]
    for source, part in enumerate(parts):
        dist.broadcast(part, group=group, group_src=source)
    return _unpacked(parts, payload if alike else None)


def all_to_all(payloads: Sequence[Payload], alike: bool, group: dist.ProcessGroup) -> list[Payload]:
    """Payload r goes to rank r; ``alike``: all send a rank the same types and sizes."""
    packed = [pack(payload) if alike else pack_described(payload) for payload in payloads]
    mine = payloads[dist.get_rank(group)]
    sent = [part.numel() for part in packed]
    if alike:
        counts = [sent[dist.get_rank(group)]] * len(payloads)
    else:
        own = torch.tensor(sent, device=packed[0].device)
        theirs = torch.empty_like(own)
        dist.all_to_all_single(theirs, own, group=group)
        counts = theirs.tolist()
    whole = packed[0].new_empty(sum(counts))
    dist.all_to_all_single(whole, torch.cat(packed), counts, sent, group=group)
    return _unpacked(whole.split(counts), mine if alike else None)
