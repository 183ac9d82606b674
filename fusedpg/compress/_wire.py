"""Payloads, which are lists of flat tensors, from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedpg._registration import BACKEND

Payload = list[Tensor]
# torch 2.13 has a new name for it, and a warning for the old one.
gathered_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Parts begin at multiples of this many bytes.
_ALIGNED = 16


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _room(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


def pack(payload: Sequence[Tensor]) -> Tensor:
    """One tensor of bytes."""
    if len(payload) == 1:
        return payload[0].contiguous().view(torch.uint8)
    packed = torch.empty(
        sum(_room(_bytes(t)) for t in payload), dtype=torch.uint8, device=payload[0].device
    )
    begin = 0
    for tensor in payload:
        count = _bytes(tensor)
        packed[begin : begin + count] = tensor.contiguous().view(torch.uint8)
        packed[begin + count : begin + _room(count)] = 0
        begin += _room(count)
    return packed


def unpack(packed: Tensor, like: Sequence[Tensor], numels: Sequence[int]) -> Payload:
    """The tensors that were packed, of the types of others: views, where that can be."""
    payload = []
    begin = 0
    for tensor, numel in zip(like, numels):
        count = numel * tensor.element_size()
        part = packed[begin : begin + count]
        if part.storage_offset() % tensor.element_size() or part.data_ptr() % _ALIGNED:
            part = part.clone()
        payload.append(part.view(tensor.dtype))
        begin += _room(count)
    return payload


def _packed_bytes(like: Sequence[Tensor], numels: Sequence[int]) -> int:
    counts = [numel * tensor.element_size() for tensor, numel in zip(like, numels)]
    return counts[0] if len(counts) == 1 else sum(map(_room, counts))


def _sizes(payload: Payload, group: Any) -> list[list[int]]:
    """How many elements the ranks' tensors have."""
    own = torch.tensor([tensor.numel() for tensor in payload], device=payload[0].device)
    found = own.new_empty(dist.get_world_size(group) * own.numel())
    gathered_into(found, own, group=group)
    return found.view(-1, own.numel()).tolist()


def _numels(payload: Payload, alike: bool, group: Any) -> list[list[int]]:
    if alike:
        own = [tensor.numel() for tensor in payload]
        return [own] * dist.get_world_size(group)
    return _sizes(payload, group)


def all_gather(payload: Payload, alike: bool, group: Any) -> list[Payload]:
    """The payloads of all ranks; ``alike``: all have these sizes."""
    numels = _numels(payload, alike, group)
    packed = pack(payload)
    counts = [_packed_bytes(payload, sizes) for sizes in numels]
    if len(set(counts)) == 1:
        whole = packed.new_empty(len(counts) * counts[0])
        gathered_into(whole, packed, group=group)
        parts = list(whole.split(counts[0])) if counts[0] else [whole] * len(counts)
    elif dist.get_backend(group) == BACKEND:
        parts = [packed.new_empty(count) for count in counts]
        dist.all_gather(parts, packed, group=group)
    else:
        most = max(counts)
        padded = packed.new_zeros(most)
        padded[: packed.numel()] = packed
        whole = packed.new_empty(len(counts) * most)
        gathered_into(whole, padded, group=group)
        parts = list(whole.split(most))
    return [unpack(part, payload, sizes) for part, sizes in zip(parts, numels)]


def broadcasts(payload: Payload, alike: bool, group: Any) -> list[Payload]:
    numels = _numels(payload, alike, group)
    rank = dist.get_rank(group)
    found = []
    for source, sizes in enumerate(numels):
        # A copy: the result may be written where a payload lies.
        part = pack(payload).clone() if source == rank else None
        if part is None:
            count = _packed_bytes(payload, sizes)
            part = torch.empty(count, dtype=torch.uint8, device=payload[0].device)
        dist.broadcast(part, group=group, group_src=source)
        found.append(unpack(part, payload, sizes))
    return found


def all_to_all(payloads: Sequence[Payload], alike: bool, group: Any) -> list[Payload]:
    """Payload r goes to rank r; ``alike``: all send a rank as much."""
    device = payloads[0][0].device
    counted = [[tensor.numel() for tensor in payload] for payload in payloads]
    if alike:
        numels = [counted[dist.get_rank(group)]] * len(payloads)
    else:
        own = torch.tensor(counted, device=device)
        theirs = torch.empty_like(own)
        dist.all_to_all_single(theirs, own, group=group)
        numels = theirs.tolist()
    packed = [pack(payload) for payload in payloads]
    like = payloads[0]
    counts = [_packed_bytes(like, sizes) for sizes in numels]
    whole = torch.empty(sum(counts), dtype=torch.uint8, device=device)
    sent = [part.numel() for part in packed]
    dist.all_to_all_single(whole, torch.cat(packed), counts, sent, group=group)
    return [unpack(part, like, sizes) for part, sizes in zip(whole.split(counts), numels)]
