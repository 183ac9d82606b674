"""Values of programs on their way from one pipeline stage to another.

A value travels behind a header that says what it is. The receiving side compares that with what its
own program expects and answers with it: where they differ both sides raise, and both have seen the
message, so that the next one is matched right. A side that raises in the middle of a call, for this
or another reason, says so in the headers that it has not sent and in the answers that it has not
given, so that nobody waits for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fusedpg import _fork
from fusedpg.functional import group_info, shard_range
from fusedpg.fusion.ir import SHARD, Node, Program, carried

# A user's own messages on the group have other tags.
_FIRST_TAG = 1 << 28
_IN_FLIGHT = 1 << 10
_HEADER, _VALUE, _ANSWER = range(3)
_HEADER_BYTES = 512
_NUMBER_BYTES = 48  # of a header, for the number
_GIVEN_UP = "given up: "
_lock = _fork.lock()
# How many messages have been begun, by direction, peer and tag.
_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, int]] = (
    weakref.WeakKeyDictionary()
)


class Transfer:
    """A part of a message that is under way."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()


Steps = Generator[Transfer, None, Any]


@dataclasses.dataclass(frozen=True)
class End:
    """One side of a message."""

    sends: bool
    stage: int | str  # the other side: a rank of `stages`, "next" or "previous"
    tag: int
    described: str = dataclasses.field(compare=False)

    @staticmethod
    def of(node: Node) -> End:
        sends = node.op == "send"
        stage = node.attribute("dst" if sends else "src")
        return End(sends, stage, node.attribute("tag"), node.described())

    def peer(self, stages: dist.ProcessGroup) -> int:
        rank, size = dist.get_rank(stages), dist.get_world_size(stages)
        if rank < 0:
            raise ValueError("this rank is not in the group `stages`")
        step = {"next": 1, "previous": -1}
        peer = self.stage if isinstance(self.stage, int) else rank + step[self.stage]
        if not 0 <= peer < size or peer == rank:
            key = "dst" if self.sends else "src"
            raise ValueError(
                f"stage {rank} of {size} has no other stage {key}={self.stage!r}; {self.described}"
            )
        return peer


def numbered(ends: Sequence[End], stages: dist.ProcessGroup) -> list[int]:
    """The numbers of a call's messages among those of their tag, taken when the call begins.

    It may send later than a call that began after it, and the other side is to know which is which.
    """
    keys = [(end.sends, end.peer(stages), end.tag) for end in ends]
    numbers = []
    with _lock:
        counts = _counts.setdefault(stages, {})
        for key in keys:
            counts[key] = counts.get(key, 0) + 1
            numbers.append(counts[key])
    return numbers


def give_up(
    ends: Sequence[End], stages: dist.ProcessGroup, device: torch.device, error: Exception
) -> None:
    """Tells the other sides that a call has raised before it knew what it sends or receives."""
    known = []
    for end in dict.fromkeys(ends):
        with contextlib.suppress(ValueError):  # there is no such stage
            end.peer(stages)
            known.append(end)
    for end, number in zip(known, numbered(known, stages)):
        message = (Sending if end.sends else Receiving)(end, stages, device)
        with contextlib.suppress(Exception):  # the group may have failed
            message.start(number)
            message.give_up(_reason(error))


def _reason(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


class Messages:
    """Those of one run: begun in the order of the program, and ended or given up."""

    def __init__(
        self,
        program: Program,
        stages: dist.ProcessGroup,
        rank: int,
        device: torch.device,
        with_gradients: Collection[Node],
    ) -> None:
        self._open: dict[Node, Sending | Receiving] = {}
        ends = {node: End.of(node) for node in program.messages}
        try:
            for node, end in ends.items():
                kind = Sending if end.sends else Receiving
                value = _Value(program, node, rank, node in with_gradients)
                self._open[node] = kind(end, stages, device, value)
            numbers = numbered(list(ends.values()), stages)
        except Exception as error:
            give_up(list(ends.values()), stages, device, error)
            raise
        for node, number in zip(ends, numbers):
            self._open[node].start(number)

    def send(self, node: Node, value: torch.Tensor) -> None:
        sending = self._open[node]
        assert isinstance(sending, Sending)
        sending.begin(value)

    def receive(self, node: Node) -> Steps:
        receiving = self._open[node]
        assert isinstance(receiving, Receiving)
        value = yield from receiving.finish()
        del self._open[node]  # the value is held no longer than its users need it
        return value

    def finish(self) -> Steps:
        """Until all that has been sent has been received."""
        for message in self._open.values():
            if isinstance(message, Sending):
                yield from message.finish()

    def give_up(self, error: Exception) -> None:
        """Tells the other sides, which may wait, of what will not be sent or received.

        It waits for nobody: who has not come yet is told then.
        """
        for message in self._open.values():
            with contextlib.suppress(Exception):  # the group may have failed
                message.give_up(_reason(error))


class _Value:
    """What a program sends or receives by a message."""

    def __init__(self, program: Program, node: Node, rank: int, gradient: bool) -> None:
        """`gradient`: whether a gradient of the value is to come back."""
        value = carried(node)
        self.dtype = value.dtype
        slices = value.layout == SHARD and program.world_size > 1
        self.length = value.numel
        if slices:
            self.length = shard_range(value.numel, program.world_size, rank)[1]
        self.shape = (self.length,) if node.layout == SHARD else node.shape
        what = "a value whose gradient is sent back" if gradient else "a value"
        facts = {
            "kind": "a gradient" if dict(node.attributes).get("gradient") else what,
            "type": str(value.dtype).removeprefix("torch."),
            "shape": str(list(value.shape)),
            "sent as": "slices" if slices else "a whole",
            "ranks of a stage": str(program.world_size),
            "rank in its stage": str(rank),
        }
        self.facts = "\n".join(f"{key}: {fact}" for key, fact in facts.items())
        if len(self.facts) > _HEADER_BYTES - _NUMBER_BYTES:
            raise ValueError(f"too many dimensions for a message; {node.described()}")


class _Message:
    """What both ends of a message have in common: a header, an answer and the value.

    Each is sent and received whatever happens, or the next message with the same tags would be
    taken for this one. Only where a size that was not expected does harm is a value left out, or
    dropped later.
    """

    def __init__(
        self,
        end: End,
        stages: dist.ProcessGroup,
        device: torch.device,
        value: _Value | None = None,
    ) -> None:
        """`value`: None for a message that is given up."""
        self._end, self._stages, self._device, self._about = end, stages, device, value
        self._peer = end.peer(stages)
        # Gloo ends the process where a message is larger than its receive: there first the header.
        self._early = _sizes_may_differ(stages)
        self._told = False  # the other side knows how it ends
        self._facts = "" if value is None else value.facts

    def start(self, number: int) -> None:
        """`number`: from `numbered`."""
        self._facts += f"\nmessage of its tag: {number}"
        # Each has tags of its own, as calls may end in another order than they began.
        self._tag = (self._end.tag * _IN_FLIGHT + number % _IN_FLIGHT) * 4
        self._tag += _FIRST_TAG
        self._key = self._end.sends, self._peer, self._tag
        with _lock:
            # What was given up with the same tags stays until this message has ended.
            self._before = _left.get(self._stages, {}).pop(self._key, None)

    def _send(self, part: int, data: torch.Tensor) -> Any:
        return dist.isend(data, group=self._stages, group_dst=self._peer, tag=self._tag + part)

    def _receive(self, part: int, data: torch.Tensor) -> Any:
        return dist.irecv(data, group=self._stages, group_src=self._peer, tag=self._tag + part)

    def _text(self, text: str) -> torch.Tensor:
        data = bytearray(text.encode()[:_HEADER_BYTES].ljust(_HEADER_BYTES))
        return torch.frombuffer(data, dtype=torch.uint8).to(self._device)

    def _room(self, length: int) -> torch.Tensor:
        return torch.zeros(length, dtype=torch.uint8, device=self._device)

    def _leave(self, *held: object, unseen: tuple[object, torch.Tensor] | None = None) -> None:
        """Keeps what is under way and will not be waited for."""
        left = _Left(held, unseen, None if self._early else self._before)
        with _lock:
            _left.setdefault(self._stages, {})[self._key] = left

    def _raise_given_up(self, header: torch.Tensor) -> None:
        reason = _given_up(header)
        if reason is not None:
            raise dist.DistBackendError(
                f"{reason} (raised in stage {self._peer} of `stages`, which is the other side of "
                f"{self._end.described})"
            )

    def _difference(self, header: torch.Tensor) -> str:
        """How the other side's program differs from this one; empty where it does not."""
        theirs = _decoded(header)
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
            f"the other side of {self._end.described}"
        )


class Sending(_Message):
    """A value that is on its way from `begin` on; it must not change until `finish` is done."""

    def start(self, number: int) -> None:
        super().start(number)
        self._works: list[Any] = []
        self._answer = self._room(_HEADER_BYTES)

    def begin(self, value: torch.Tensor) -> None:
        data = value.detach().contiguous().reshape(-1)
        # One element or none is contiguous whatever its stride, which is 0 in what was expanded.
        self._begin(self._facts, data.as_strided(data.shape, (1,)).view(torch.uint8))

    def _begin(self, header: str, data: torch.Tensor | None) -> None:
        self._header, self._data = self._text(header), data
        self._works = [self._send(_HEADER, self._header)]
        if data is not None:
            self._works.append(self._send(_VALUE, data))
        self._answered = self._receive(_ANSWER, self._answer)

    def finish(self) -> Steps:
        """Until it has been received.

        Raises:
            DistBackendError: where the other side expects something else, or has given up.
        """
        yield Transfer(self._answered)
        self._told = True
        if _given_up(self._answer) is not None:
            self._leave(*self._works, self._header, self._data)
            self._raise_given_up(self._answer)
        difference = self._difference(self._answer)
        if difference:
            for work in self._works:
                with contextlib.suppress(Exception):  # that sizes differ
                    work.wait()
            raise self._mismatch(difference)
        for work in self._works:
            yield Transfer(work)

    def give_up(self, reason: str) -> None:
        if self._told:
            return
        if not self._works:
            # Where the other side waits for a value already, it gets one of another size.
            self._begin(_GIVEN_UP + reason, self._room(0) if self._early else None)
        self._leave(*self._works, self._header, self._data, self._answered, self._answer)


class Receiving(_Message):
    """A value that may arrive from `start` on."""

    def start(self, number: int) -> None:
        super().start(number)
        about = self._about
        shape, dtype = ((0,), torch.uint8) if about is None else (about.shape, about.dtype)
        self._value = torch.empty(shape, dtype=dtype, device=self._device)
        self._data = self._value.view(-1).view(torch.uint8)
        self._header = self._room(_HEADER_BYTES)
        self._announced = self._receive(_HEADER, self._header)
        self._arriving = self._receive(_VALUE, self._data) if self._early else None

    def finish(self) -> Steps:
        """The value, when it is here; raises as the other side does."""
        yield Transfer(self._announced)
        self._told = True
        answer = self._text(self._facts)
        answered = self._send(_ANSWER, answer)
        if self._before is not None:
            self._before.drop(self._drop)
        difference = self._difference(self._header)
        if difference:
            with contextlib.suppress(Exception):  # that sizes differ
                if self._arriving is not None:
                    self._arriving.wait()
                else:
                    self._drop(self._header)
            answered.wait()
            self._raise_given_up(self._header)
            raise self._mismatch(difference)
        yield Transfer(self._arriving or self._receive(_VALUE, self._data))
        yield Transfer(answered)
        return self._value

    def give_up(self, reason: str) -> None:
        if self._told:
            return
        answer = self._text(_GIVEN_UP + reason)
        held = self._send(_ANSWER, answer), answer, self._arriving, self._data
        self._leave(*held, unseen=None if self._early else (self._announced, self._header))

    def _drop(self, header: torch.Tensor) -> None:
        """Receives the value behind a header that is not this program's."""
        size = _bytes_behind(header)
        if size is not None:
            self._receive(_VALUE, self._room(size)).wait()


class _Left:
    """What is under way of a message that this side has given up: the other may still take it.

    unseen: of a value that nobody has received, its header and the receive of that.
    """

    def __init__(
        self,
        held: object,
        unseen: tuple[Any, torch.Tensor] | None,
        before: _Left | None,
    ) -> None:
        self._held, self._unseen, self._before = held, unseen, before

    def drop(self, take: Callable[[torch.Tensor], None]) -> None:
        """Takes values out of the way of the next one, whose header is here: so theirs are."""
        if self._before is not None:
            self._before.drop(take)
        if self._unseen is not None:
            announced, header = self._unseen
            announced.wait()
            take(header)


# By group, and by operation, peer and tag. Messages do not hold their group.
_left: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[object, _Left]] = (
    weakref.WeakKeyDictionary()
)


def _decoded(header: torch.Tensor) -> str:
    return bytes(header.cpu().numpy()).decode(errors="replace").rstrip()


def _given_up(header: torch.Tensor) -> str | None:
    """Why the other side has, if it has."""
    text = _decoded(header)
    return text.removeprefix(_GIVEN_UP) if text.startswith(_GIVEN_UP) else None


def _bytes_behind(header: torch.Tensor) -> int | None:
    """The size of the value that follows a header; None where none does."""
    if _given_up(header) is not None:
        return None
    facts = dict(line.partition(": ")[::2] for line in _decoded(header).split("\n"))
    count = functools.reduce(lambda n, d: n * int(d), _numbers(facts["shape"]), 1)
    if facts["sent as"] == "slices":
        ranks, rank = int(facts["ranks of a stage"]), int(facts["rank in its stage"])
        count = shard_range(count, ranks, rank)[1]
    return int(count * getattr(torch, facts["type"]).itemsize)


def _numbers(text: str) -> list[str]:
    return [number for number in text.strip("[]").split(", ") if number]


def _sizes_may_differ(stages: dist.ProcessGroup) -> bool:
    """Whether a receive of another size than its message raises, and does no other harm."""
    try:
        group_info(stages)
    except ValueError:  # another backend
        return False
    return True
