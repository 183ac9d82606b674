"""Which operations all ranks are ready for: a pure function of what the ranks have told each other.

Every rank gets the same messages in the same order and computes the same answer, so that there is
no coordinator. Nothing here communicates.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

Key = tuple[int, str]
"""A process set's id and an operation's name: what operations of different ranks are matched by."""

ALLREDUCE, ALLGATHER, BROADCAST = "allreduce", "allgather", "broadcast"
ALLTOALL, REDUCESCATTER, BARRIER, JOIN = "alltoall", "reducescatter", "barrier", "join"
JOIN_KEY: Key = (0, JOIN)
ADD_SET, REMOVE_SET = "add_process_set", "remove_process_set"
FAILED = "failed"
"""In place of a rank's operation: its call has raised, and why."""

AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)

# These may have other first dimensions on other ranks.
_RAGGED = (ALLGATHER, ALLTOALL)


class Signature(NamedTuple):
    """One rank's description of its operation.

    ``numbers``: the splits of an all-to-all, the ranks of a new process set, the id of an old one,
    how many handles a rank that joins has given out. ``why``: the error of a call that raised.
    """

    kind: str
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    op: int = SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    numbers: tuple[int, ...] = ()
    why: str = ""


@dataclasses.dataclass
class Response:
    """An operation that all its ranks are ready for, or that they must raise an error for.

    Attributes:
        signatures: each announcing rank's.
        error: why ranks raise; empty if the operation is to be done.
    """

    key: Key
    signatures: dict[int, Signature]
    error: str = ""

    @property
    def any(self) -> Signature:
        return next(iter(self.signatures.values()))


def encode(requests: Sequence[tuple[Key, Signature]]) -> bytes:
    """A rank's new requests as bytes; JSON, so that decoding them runs nothing."""
    return json.dumps([[*key, *signature] for key, signature in requests]).encode()


def decode(message: bytes) -> Iterator[tuple[Key, Signature]]:
    for set_id, name, kind, dtypes, shapes, *rest, numbers, why in json.loads(message):
        tuples = tuple(dtypes), tuple(map(tuple, shapes))
        op, prescale, postscale, root = rest
        scale = prescale, postscale
        yield (set_id, name), Signature(kind, *tuples, op, *scale, root, tuple(numbers), why)


def _differing(values: Mapping[int, object], what: str) -> str:
    told: dict[object, list[int]] = {}
    for rank in sorted(values):
        told.setdefault(values[rank], []).append(rank)
    return f"{what}: " + "; ".join(f"{value} on ranks {ranks}" for value, ranks in told.items())


def difference(signatures: dict[int, Signature]) -> str:
    """The differences between ranks, in words; empty if they agree."""
    raised = [f"rank {r}'s call raised {s.why}" for r, s in signatures.items() if s.kind == FAILED]
    if raised:
        return "; ".join(raised)
    fields = {"kind": "operations", "dtypes": "data types"}
    fields |= {"op": "reduction operations", "prescale": "prescale factors"}
    fields |= {"postscale": "postscale factors", "root": "root ranks"}
    for field, words in fields.items():
        values = {rank: getattr(s, field) for rank, s in signatures.items()}
        if len(set(values.values())) > 1:
            return _differing(values, f"ranks have different {words}")
    kind = next(iter(signatures.values())).kind
    shapes = {rank: s.shapes for rank, s in signatures.items()}
    if kind in _RAGGED:
        shapes = {r: tuple((-1, *shape[1:]) for shape in of) for r, of in shapes.items()}
    if len(set(shapes.values())) > 1:
        return _differing(shapes, "ranks have different shapes")
    numbers = {rank: s.numbers for rank, s in signatures.items()}
    if kind != ALLTOALL and len(set(numbers.values())) > 1:
        return _differing(numbers, "ranks have different process sets")
    return ""


def _refusal(signature: Signature, joined: list[int]) -> str:
    """Why an operation cannot be done without ranks that have joined; empty if it can."""
    if not joined or signature.kind in (BARRIER, ADD_SET, REMOVE_SET):
        return ""
    if signature.kind != ALLREDUCE:
        return f"{signature.kind} is not possible after ranks {joined} have joined"
    if signature.op not in (SUM, AVERAGE):
        return f"only sums and averages are possible after ranks {joined} have joined"
    return ""


class Controller:
    """The requests of all ranks, as every rank knows them.

    Attributes:
        sets: the global ranks of each process set.
        bits: this rank's ready operations, a bit for each remembered request.
        left: ranks whose ``join()`` has raised, until somebody empties it.
    """

    def __init__(self, rank: int, size: int, capacity: int) -> None:
        self.rank, self.size = rank, size
        self.sets: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self.bits = 0
        self._capacity = max(capacity, 0)
        self._slots: list[Response | None] = []
        self._free: list[int] = []
        self._slot_of: dict[Key, int] = {}
        self._recent: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._in_set: dict[int, int] = {}  # the slots of each set, as bits
        self._table: dict[Key, dict[int, Signature]] = {}
        self._joined: dict[int, int] = {}  # and the handles that they have given out
        self.left: set[int] = set()
        self._next_set = 1

    @property
    def slots(self) -> int:
        """How many bits a rank's ready operations have, the same on all ranks."""
        return len(self._slots)

    def has_joined(self) -> list[int]:
        """The ranks that have joined; asked from any thread."""
        return sorted(self._joined)

    def mark(self, key: Key, signature: Signature) -> bool:
        """Says that this rank is ready for a remembered request; False if it has to announce it."""
        slot = self._slot_of.get(key)
        if slot is None:
            return False
        known = self._slots[slot]
        assert known is not None
        if known.signatures.get(self.rank) != signature:
            return False
        self.bits |= 1 << slot
        return True

    def of_bits(self, bits: int, rank: int) -> Iterator[tuple[Key, str]]:
        """The keys and kinds of remembered requests that a rank is ready for."""
        for slot in _ones(bits):
            known = self._slots[slot]
            if known is not None and rank in self.sets[known.key[0]]:
                yield known.key, known.any.kind

    def waiting(self, bits: Sequence[int]) -> Iterator[tuple[Key, list[int], list[int]]]:
        """Operations that some of their ranks announced: key, who did, and who did not."""
        for key, told in self._table.items():
            # Nobody waits for the others of calls that have all raised.
            if key[0] in self.sets and any(s.kind != FAILED for s in told.values()):
                missing = [r for r in self.sets[key[0]] if r not in told and r not in self._joined]
                yield key, sorted(told), missing
        some = 0
        for theirs in bits:
            some |= theirs
        for slot in _ones(some):
            known = self._slots[slot]
            if known is not None:
                ranks = self.sets[known.key[0]]
                told_by = [r for r in ranks if bits[r] >> slot & 1]
                if told_by:
                    rest = [r for r in ranks if r not in told_by and r not in self._joined]
                    yield known.key, told_by, rest

    def decide(
        self, bits: Sequence[int], messages: dict[int, bytes]
    ) -> tuple[list[Response], list[Key]]:
        """Decides on the operations that follow a cycle.

        Args:
            bits: each rank's ready operations.
            messages: new requests, of those ranks that have some.

        Returns:
            Responses in the order in which every rank carries them out, and the keys of requests
            that are not remembered any longer: ranks that wait for them announce them again.
        """
        responses = [self._known(slot, bits) for slot in _ones(self._ready(bits))]
        forgotten: list[Key] = []
        touched: dict[Key, None] = {}
        had_joined = set(self._joined)
        for rank in sorted(messages):
            for key, signature in decode(messages[rank]):
                if signature.kind == JOIN:
                    self._joined[rank] = signature.numbers[0]
                    continue
                if key == JOIN_KEY:
                    self.left.add(rank)
                    self._joined.pop(rank, None)
                    responses.append(Response(key, {rank: signature}))
                    continue
                if key in self._slot_of:
                    forgotten += self._forget(self._slot_of[key])
                self._table.setdefault(key, {})[rank] = signature
                touched[key] = None
        if self._joined.keys() != had_joined:
            touched.update(dict.fromkeys(self._table))
        for key in touched:
            response = self._complete(key)
            if response is not None:
                responses.append(response)
                forgotten += self._after(response)
        for key in [key for key in self._table if key[0] not in self.sets]:
            response = self._complete(key)
            assert response is not None
            responses.append(response)
        if len(self._joined) == self.size:
            last = next(reversed(self._joined))
            done = Signature(JOIN, root=last, numbers=(max(self._joined.values()),))
            responses.append(Response(JOIN_KEY, {0: done}))
            self._joined.clear()
        return responses, forgotten

    # --- remembered requests ----------------------------------------------------------------

    def _ready(self, bits: Sequence[int]) -> int:
        ready = 0
        for set_id, slots in self._in_set.items():
            active = [rank for rank in self.sets[set_id] if rank not in self._joined]
            for rank in active:
                slots &= bits[rank]
            if active:
                ready |= slots
        return ready

    def _known(self, slot: int, bits: Sequence[int]) -> Response:
        known = self._slots[slot]
        assert known is not None
        self._recent.move_to_end(slot)
        self.bits &= ~(1 << slot)
        absent = [r for r in self._joined_of(known.key[0]) if not bits[r] >> slot & 1]
        error = _refusal(known.any, absent)
        return Response(known.key, known.signatures, error) if error else known

    def _remember(self, response: Response) -> list[Key]:
        """Gives a request a bit; the one that was not used for longest is forgotten for it."""
        forgotten: list[Key] = []
        if len(self._slot_of) >= self._capacity:
            if not self._capacity:
                return forgotten
            forgotten = self._forget(next(iter(self._recent)))
        if self._free:
            slot = self._free.pop()
            self._slots[slot] = response
        else:
            slot = len(self._slots)
            self._slots.append(response)
        self._slot_of[response.key] = slot
        self._recent[slot] = None
        set_id = response.key[0]
        self._in_set[set_id] = self._in_set.get(set_id, 0) | 1 << slot
        return forgotten

    def _forget(self, slot: int) -> list[Key]:
        known = self._slots[slot]
        assert known is not None
        self._slots[slot] = None
        self._free.append(slot)
        del self._slot_of[known.key], self._recent[slot]
        self._in_set[known.key[0]] &= ~(1 << slot)
        self.bits &= ~(1 << slot)
        return [known.key]

    # --- announced requests -----------------------------------------------------------------

    def _joined_of(self, set_id: int) -> list[int]:
        return [rank for rank in self.sets[set_id] if rank in self._joined]

    def _complete(self, key: Key) -> Response | None:
        told = self._table[key]
        ranks = self.sets.get(key[0])
        if ranks is None:
            del self._table[key]
            return Response(key, told, f"process set {key[0]} was removed")
        if any(rank not in told and rank not in self._joined for rank in ranks):
            return None
        del self._table[key]
        told = dict(sorted(told.items()))
        error = difference(told)
        absent = [rank for rank in self._joined_of(key[0]) if rank not in told]
        return Response(key, told, error or _refusal(next(iter(told.values())), absent))

    def _after(self, response: Response) -> list[Key]:
        """Remembers a request, and knows new and removed process sets."""
        signature, (set_id, name) = response.any, response.key
        if response.error:
            return []
        if signature.kind == ADD_SET:
            self.sets[self._next_set] = signature.numbers
            self._next_set += 1
        elif signature.kind == REMOVE_SET:
            gone = signature.numbers[0]
            forgotten = [k for s in _ones(self._in_set.get(gone, 0)) for k in self._forget(s)]
            self._in_set.pop(gone, None)
            self.sets.pop(gone, None)
            return forgotten
        elif signature.kind != BARRIER and ".noname." not in name:
            # Another operation of this cycle may have removed the set.
            ranks = self.sets.get(set_id, ())
            if ranks and all(rank in response.signatures for rank in ranks):
                return self._remember(response)
        return []


def _ones(bits: int) -> Iterator[int]:
    """The places of the ones in a number, from the lowest."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
