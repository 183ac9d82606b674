"""Values of programs on their way from one pipeline stage to another.

A value travels behind a header that says what it is. The receiving side compares that with what its
own program expects and answers with it: where they differ both sides raise, and both have seen the
message, so that the next one is matched right.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist

from fusedpg.functional import _backend, group_info, shard_range
from fusedpg.fusion.ir import SHARD, Node, Program, carried

# A user's own messages on the group have other tags.
_FIRST_TAG = 1 << 28
_IN_FLIGHT = 1 << 10
_HEADER, _VALUE, _ANSWER = range(3)
_HEADER_BYTES = 512
_lock = threading.Lock()
# How many messages have been begun, by direction, peer and tag.
_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, int]] = weakref.WeakKeyDictionary()


class Transfer:
    """A part of a message that is under way."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()


Steps = Generator[Transfer, None, Any]


def numbered(program: Program, stages: dist.ProcessGroup) -> dict[Node, int]:
    """The numbers of a call's messages among those of their tag, taken when the call begins.

    It may send later than a call that began after it, and the other side is to know which is which.
    """
    keys = {
        node: (
            node.op == "send",
            _peer(node, stages, "dst" if node.op == "send" else "src"),
            node.attribute("tag"),
        )
        for node in program.messages
    }
    numbers = {}
    with _lock:
        counts = _counts.setdefault(stages, {})
        for node, key in keys.items():
            numbers[node] = counts[key] = counts.get(key, 0) + 1
    return numbers


class _Message:
    """What both ends of a message have in common.

    `gradient`: whether a gradient of the value is to come back. `number`: from `numbered`.
    """

    def __init__(
        self,
        program: Program,
        node: Node,
        stages: dist.ProcessGroup,
        rank: int,
        gradient: bool,
        number: int,
        device: torch.device,
    ) -> None:
        self._node, self._stages, self._device = node, stages, device
        self._sends = node.op == "send"
        self._peer = _peer(node, stages, "dst" if self._sends else "src")
        # Each has tags of its own, as calls may end in another order than they began.
        self._tag = (node.attribute("tag") * _IN_FLIGHT + number % _IN_FLIGHT) * 4 + _FIRST_TAG
        value = carried(node)
        slices = value.layout == SHARD and program.world_size > 1
        self._length = value.numel
        if slices:
            self._length = shard_range(value.numel, program.world_size, rank)[1]
        what = "a value whose gradient is sent back" if gradient else "a value"
        facts = {
            "kind": "a gradient" if dict(node.attributes).get("gradient") else what,
            "type": str(value.dtype).removeprefix("torch."),
            "shape": str(list(value.shape)),
            "sent as": "slices" if slices else "a whole",
            "ranks of a stage": str(program.world_size),
            "rank in its stage": str(rank),
            "message of its tag": str(number),
        }
        self._facts = "\n".join(f"{key}: {fact}" for key, fact in facts.items())
        if len(self._facts) > _HEADER_BYTES:
            raise ValueError(f"too many dimensions for a message; {node.described()}")

    def _send(self, part: int, data: torch.Tensor) -> Any:
        return dist.isend(data, group=self._stages, group_dst=self._peer, tag=self._tag + part)

    def _receive(self, part: int, data: torch.Tensor) -> Any:
        return dist.irecv(data, group=self._stages, group_src=self._peer, tag=self._tag + part)

    def _text(self) -> torch.Tensor:
        data = bytearray(self._facts.encode().ljust(_HEADER_BYTES))
        return torch.frombuffer(data, dtype=torch.uint8).to(self._device)

    def _room(self, length: int) -> torch.Tensor:
        return torch.zeros(length, dtype=torch.uint8, device=self._device)

    def _difference(self, header: torch.Tensor) -> str:
        """How the other side's program differs from this one; empty where it does not."""
        theirs = bytes(header.cpu().numpy()).decode(errors="replace").rstrip()
        if theirs == self._facts:
            return ""
        mine, others = (
            dict(line.partition(": ")[::2] for line in text.split("\n"))
            for text in (self._facts, theirs)
        )
        different = [
            f"{key} is {fact} here and {others.get(key, 'not known')} there"
            for key, fact in mine.items()
            if others.get(key) != fact
        ]
        return "; ".join(different) or "the other side is not a fused program"

    def _mismatch(self, difference: str) -> dist.DistBackendError:
        return dist.DistBackendError(
            f"the programs of two stages differ: {difference}; stage {self._peer} of `stages` is "
            f"the other side of {self._node.described()}"
        )


class Sending(_Message):
    """A value that is on its way from now on; it must not change until `finish` is done."""

    def __init__(
        self,
        program: Program,
        node: Node,
        stages: dist.ProcessGroup,
        rank: int,
        gradient: bool,
        number: int,
        value: torch.Tensor,
    ) -> None:
        super().__init__(program, node, stages, rank, gradient, number, value.device)
        self._data = value.detach().contiguous().reshape(-1).view(torch.uint8)
        self._header, self._answer = self._text(), self._room(_HEADER_BYTES)
        self._works = [self._send(_HEADER, self._header), self._send(_VALUE, self._data)]
        self._answered = self._receive(_ANSWER, self._answer)

    def finish(self) -> Steps:
        """Until it has been received.

        Raises:
            DistBackendError: where the other side expects something else.
        """
        yield Transfer(self._answered)
        difference = self._difference(self._answer)
        if difference:
            for work in self._works:
                with contextlib.suppress(Exception):  # that sizes differ
                    work.wait()
            raise self._mismatch(difference)
        for work in self._works:
            yield Transfer(work)


class Receiving(_Message):
    """A value that may arrive from now on."""

    def __init__(
        self,
        program: Program,
        node: Node,
        stages: dist.ProcessGroup,
        rank: int,
        gradient: bool,
        number: int,
        device: torch.device,
    ) -> None:
        super().__init__(program, node, stages, rank, gradient, number, device)
        dtype = self._node.dtype
        self._value = torch.empty(self._length, dtype=dtype, device=self._device)
        self._data = self._value.view(torch.uint8)
        self._header = self._room(_HEADER_BYTES)
        self._announced = self._receive(_HEADER, self._header)
        # Gloo ends the process where a message is larger than its receive: there first the header.
        early = _sizes_may_differ(self._stages)
        self._arriving = self._receive(_VALUE, self._data) if early else None

    def finish(self) -> Steps:
        """The value, when it is here; raises as the other side does."""
        yield Transfer(self._announced)
        difference = self._difference(self._header)
        answer = self._text()
        answered = self._send(_ANSWER, answer)
        if difference:
            with contextlib.suppress(Exception):  # that sizes differ
                self._discard()
            answered.wait()
            raise self._mismatch(difference)
        yield Transfer(self._arriving or self._receive(_VALUE, self._data))
        yield Transfer(answered)
        return self._value if self._node.layout == SHARD else self._value.reshape(self._node.shape)

    def _discard(self) -> None:
        if self._arriving is not None:
            self._arriving.wait()
            return
        facts = dict(
            line.partition(": ")[::2]
            for line in bytes(self._header.cpu().numpy()).decode().rstrip().split("\n")
        )
        count = functools.reduce(lambda n, d: n * int(d), _numbers(facts["shape"]), 1)
        if facts["sent as"] == "slices":
            ranks, rank = int(facts["ranks of a stage"]), int(facts["rank in its stage"])
            count = shard_range(count, ranks, rank)[1]
        size = count * getattr(torch, facts["type"]).itemsize
        self._receive(_VALUE, self._room(size)).wait()


def _numbers(text: str) -> list[str]:
    return [number for number in text.strip("[]").split(", ") if number]


def _sizes_may_differ(stages: dist.ProcessGroup) -> bool:
    """Whether a receive of another size than its message raises, and does no other harm."""
    try:
        backend = _backend(stages)
    except ValueError:  # another backend
        return False
    # Between hosts messages are Gloo's unless UCX has been asked for.
    asked = backend.options.transport or os.environ.get("FUSEDPG_TRANSPORT")
    return asked == "ucx" or group_info(stages)["engine"] == "shm"


def _peer(node: Node, stages: dist.ProcessGroup, key: str) -> int:
    rank, size = dist.get_rank(stages), dist.get_world_size(stages)
    if rank < 0:
        raise ValueError("this rank is not in the group `stages`")
    place = node.attribute(key)
    peer = {"next": rank + 1, "previous": rank - 1}.get(place, place)
    if not 0 <= peer < size or peer == rank:
        raise ValueError(
            f"stage {rank} of {size} has no other stage {key}={place!r}; {node.described()}"
        )
    return int(peer)
