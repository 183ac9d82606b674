"""Values of programs on their way from one pipeline stage to another.

A value travels behind a header that says what it is. The receiving side compares that with what its
own program expects and answers with it: where they differ both sides raise, and both have seen the
message, so that the next one is matched right. A side that raises in the middle of a call, for this
or another reason, says so in the headers that it has not sent and in the answers that it has not
given, so that nobody waits for it.

A value may travel in parts, each sent as soon as it is computed: one header, the parts in their
order, and behind the last one an end. A side that raises between two parts sends zeros for those
that are left, and the reason as the end, which is read before the last part is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from fusedpg import _fork
from fusedpg.functional import group_info, shard_range
from fusedpg.fusion.ir import SHARD, Group, Node, Program, carried

# A user's own messages on the group have other tags.
_FIRST_TAG = 1 << 28
_IN_FLIGHT = 1 << 10
_HEADER, _VALUE, _ANSWER, _END = range(4)
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
        forward: Mapping[End, int] = MappingProxyType({}),
    ) -> None:
        """`forward`: of a backward, the numbers of the messages whose gradients it exchanges."""
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
        self.crossing = stages, dict(zip(ends.values(), numbers))
        for (node, end), number in zip(ends.items(), numbers):
            # A gradient goes the other way.
            of = forward.get(dataclasses.replace(end, sends=not end.sends))
            self._open[node].start(number, of)

    def sending(self, node: Node) -> Sending:
        message = self._open[node]
        assert isinstance(message, Sending)
        return message

    def receiving(self, node: Node) -> Receiving:
        message = self._open[node]
        assert isinstance(message, Receiving)
        return message

    def receive(self, node: Node) -> Steps:
        value = yield from self.receiving(node).finish()
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
        assert value.dtype is not None
        self.dtype = value.dtype
        slices = value.layout == SHARD and program.world_size > 1
        overlap = program.overlap_of(node)
        chunks = 1 if overlap is None else overlap.chunks
        ranks = program.world_size if slices else 1
        self.lengths = _lengths(value.shape, chunks, ranks, rank if slices else 0)
        self.shape = (sum(self.lengths),) if node.layout == SHARD else node.shape
        what = "a value whose gradient is sent back" if gradient else "a value"
        facts = {
            "kind": "a gradient" if dict(node.attributes).get("gradient") else what,
            "type": str(value.dtype).removeprefix("torch."),
            "shape": str(list(value.shape)),
            "sent as": "slices" if slices else "a whole",
            "ranks of a stage": str(program.world_size),
            "rank in its stage": str(rank),
            "parts": str(chunks),
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

    def start(self, number: int, forward: int | None = None) -> None:
        """`number`: from `numbered`; `forward`: that of the value whose gradient this is."""
        self._facts += f"\nmessage of its tag: {number}"
        if forward is not None:
            # It has room: "a gradient" is shorter than what the value's own header says.
            self._facts += f"\ngradient of message: {forward}"
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

    def _leave(self, *held: object, unseen: tuple[object, torch.Tensor, int] | None = None) -> None:
        """Keeps what is under way and will not be waited for."""
        left = _Left(held, unseen, self._before)
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
    """A value that is on its way from `send` on; it must not change until `finish` is done."""

    def start(self, number: int, forward: int | None = None) -> None:
        super().start(number, forward)
        self._works: list[Any] = []
        self._held: list[torch.Tensor] = []  # what they send
        self._lengths = [0] if self._about is None else self._about.lengths
        self.sent = 0  # of these parts
        self._answer = self._room(_HEADER_BYTES)

    def send(self, part: torch.Tensor) -> None:
        """The value, or the next of its parts."""
        data = part.detach().contiguous().reshape(-1)
        # One element or none is contiguous whatever its stride, which is 0 in what was expanded.
        self._add(data.as_strided(data.shape, (1,)).view(torch.uint8))
        if self.sent == len(self._lengths) > 1:
            self._post(_END, self._text(self._facts))

    def _add(self, data: torch.Tensor) -> None:
        first = not self._works
        if first:
            self._post(_HEADER, self._text(self._facts))
        self._post(_VALUE, data)
        self.sent += 1
        if first:
            self._answered = self._receive(_ANSWER, self._answer)

    def _post(self, part: int, data: torch.Tensor) -> None:
        self._held.append(data)
        self._works.append(self._send(part, data))

    def finish(self) -> Steps:
        """Until it has been received.

        Raises:
            DistBackendError: where the other side expects something else, or has given up.
        """
        yield Transfer(self._answered)
        self._told = True
        if _given_up(self._answer) is not None:
            self._leave(self._works, self._held)
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
        text = self._text(_GIVEN_UP + reason)
        if not self._works:
            self._post(_HEADER, text)
            if self._early:  # the other side waits for a value: it gets one of another size
                self._post(_VALUE, self._room(0))
            self._answered = self._receive(_ANSWER, self._answer)
        elif self._about is not None and self.sent < len(self._lengths):
            for length in self._lengths[self.sent :]:
                self._add(self._room(length * self._about.dtype.itemsize))
            self._post(_END, text)
        self._leave(self._works, self._held, self._answered, self._answer)


class Receiving(_Message):
    """A value that may arrive from `start` on."""

    def start(self, number: int, forward: int | None = None) -> None:
        super().start(number, forward)
        about = self._about
        lengths, dtype = ([0], torch.uint8) if about is None else (about.lengths, about.dtype)
        self._value = torch.empty(sum(lengths), dtype=dtype, device=self._device)
        self._parts = self._value.split(lengths)
        self._taken = 0  # of them
        self._header, self._last = self._room(_HEADER_BYTES), self._room(_HEADER_BYTES)
        self._announced = self._receive(_HEADER, self._header)
        # What an earlier message has left is to be received before.
        early = self._early and self._before is None
        self._arriving = [self._of_part(self._parts[0])] if early else []

    def _of_part(self, part: torch.Tensor) -> Any:
        return self._receive(_VALUE, part.view(torch.uint8))

    def finish(self) -> Steps:
        """The value, when it is here; raises as the other side does."""
        assert self._about is not None
        for _ in self._parts:
            yield from self.part()
        return self._value.view(self._about.shape)

    def part(self) -> Steps:
        """The next part; the last one when all that belongs to the message is here."""
        if not self._told:
            yield from self._compare()
        part, self._taken = self._parts[self._taken], self._taken + 1
        yield Transfer(self._arriving[self._taken - 1])
        if self._taken == len(self._parts):
            if self._ending is not None:
                yield Transfer(self._ending)
                self._raise_given_up(self._last)
            yield Transfer(self._answered)
        return part

    def _compare(self) -> Steps:
        """Reads the header and answers; the parts are then on their way."""
        yield Transfer(self._announced)
        self._told = True
        self._answer = self._text(self._facts)
        self._answered = self._send(_ANSWER, self._answer)
        if self._before is not None:
            self._before.drop(self._drop)
            self._before = None
        difference = self._difference(self._header)
        if difference:
            for work in self._arriving:
                with contextlib.suppress(Exception):  # that sizes differ
                    work.wait()
            with contextlib.suppress(Exception):
                self._drop(self._header, len(self._arriving))
            self._answered.wait()
            self._taken = len(self._parts)
            self._raise_given_up(self._header)
            raise self._mismatch(difference)
        rest = self._parts[len(self._arriving) :]
        self._arriving += [self._of_part(part) for part in rest]
        self._ending = self._receive(_END, self._last) if len(self._parts) > 1 else None

    def give_up(self, reason: str) -> None:
        held: list[object] = [self._arriving, self._value]
        if not self._told:
            answer = self._text(_GIVEN_UP + reason)
            held += [self._send(_ANSWER, answer), answer]
            unseen = self._announced, self._header, len(self._arriving)
            self._leave(*held, unseen=unseen)
        elif self._taken < len(self._parts):
            self._leave(*held, self._ending, self._last, self._answered, self._answer)

    def _drop(self, header: torch.Tensor, posted: int) -> None:
        """Receives what is behind a header that is not this program's.

        Args:
            posted: parts that have a receive already.
        """
        sizes = _sizes_behind(header, self._early)
        for size in sizes[posted:]:
            self._receive(_VALUE, self._room(size)).wait()
        if len(sizes) > 1:
            self._receive(_END, self._room(_HEADER_BYTES)).wait()


class _Left:
    """What is under way of a message that this side has given up: the other may still take it.

    unseen: of a value that nobody has received, its header, the receive of that, and how many of
    the value's parts have a receive.
    """

    def __init__(
        self,
        held: object,
        unseen: tuple[Any, torch.Tensor, int] | None,
        before: _Left | None,
    ) -> None:
        self._held, self._unseen, self._before = held, unseen, before

    def drop(self, take: Callable[[torch.Tensor, int], None]) -> None:
        """Takes values out of the way of the next one, whose header is here: so theirs are."""
        if self._before is not None:
            self._before.drop(take)
        if self._unseen is not None:
            announced, header, posted = self._unseen
            announced.wait()
            take(header, posted)


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


def _sizes_behind(header: torch.Tensor, early: bool) -> list[int]:
    """The bytes of each part that follows a header. `early`: a value follows even a refusal."""
    if _given_up(header) is not None:
        return [0] if early else []
    facts = dict(line.partition(": ")[::2] for line in _decoded(header).split("\n"))
    shape = tuple(map(int, _numbers(facts["shape"])))
    slices = facts["sent as"] == "slices"
    ranks, rank = (int(facts[x]) for x in ("ranks of a stage", "rank in its stage"))
    lengths = _lengths(shape, int(facts["parts"]), *((ranks, rank) if slices else (1, 0)))
    return [length * getattr(torch, facts["type"]).itemsize for length in lengths]


def _lengths(shape: tuple[int, ...], chunks: int, ranks: int, rank: int) -> list[int]:
    """The elements of each part of a value that `ranks` ranks send in slices; 1: it is whole."""
    counts = [math.prod(shape)]
    if chunks > 1:
        spans = Group("overlap", frozenset(), chunks).spans(shape)
        counts = [(last - first) * shape[-1] for first, last in spans]
    return [shard_range(count, ranks, rank)[1] for count in counts]


def _numbers(text: str) -> list[str]:
    return [number for number in text.strip("[]").split(", ") if number]


def _sizes_may_differ(stages: dist.ProcessGroup) -> bool:
    """Whether a receive of another size than its message raises, and does no other harm."""
    try:
        group_info(stages)
    except ValueError:  # another backend
        return False
    return True
