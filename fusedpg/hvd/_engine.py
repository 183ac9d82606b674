"""The background thread of a process: it agrees with those of the other ranks on what to do next.

A cycle is one small all-gather: a header and a bit for each remembered request. Only where a rank
has something new is there a second one, of the requests themselves. All ranks carry out what
follows in the same order, whatever their sets, so that no two wait for each other.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedpg.hvd import _controller as c
from fusedpg.hvd._controller import Controller, Key, Response, Signature
from fusedpg.hvd._execute import Refused, Set, fused_calls, nbytes, splits_of
from fusedpg.hvd._settings import Settings
from fusedpg.hvd._timeline import Timeline
from fusedpg.hvd.autotune import Tuner
from fusedpg.hvd.exceptions import HorovodInternalError

_log = logging.getLogger("fusedpg")

# Flags, bytes of the message, fusion threshold, cycle time, turns and what the last one is.
_HEADER = struct.Struct("<BxxxIqdQQ")
_SHUTDOWN, _STALLED, _PENDING = 1, 2, 4

# With nothing to do anywhere, cycles become rarer until one takes this long. Only operations that
# some ranks take no part in wait for it: whoever calls one wakes its own engine.
_LONGEST_IDLE = 0.02
_LONGEST_WAITING = 0.005
# Other ranks' engines answer a shutdown within a cycle, unless their processes are stopped.
_LONGEST_SHUTDOWN = 60.0


class Operation:
    """One rank's part of an operation, pending until the engine has done it.

    Args:
        key: what it is matched by.
        signature: what the other ranks must have alike.
        tensors: what it reads.
        outputs: where all-reduces and broadcasts leave their results; may be ``tensors``.
    """

    __slots__ = ("done", "error", "key", "outputs", "result", "signature", "tensors")

    def __init__(
        self,
        key: Key,
        signature: Signature,
        tensors: Sequence[Tensor] = (),
        outputs: Sequence[Tensor] = (),
    ) -> None:
        self.key, self.signature = key, signature
        self.tensors, self.outputs = tensors, outputs
        self.result: Any = None
        self.error: HorovodInternalError | None = None
        self.done = False


class Engine:
    """Negotiates and carries out this process's operations.

    ``fusion_threshold`` (bytes) and ``cycle_time`` (seconds) may be set at any time, on rank 0: its
    values are everybody's from the next cycle on.

    Attributes:
        tuner: on rank 0, told of the bytes of each cycle and the seconds since the last one.
        timeline: where events go, if anywhere.
    """

    def __init__(
        self, world: dist.ProcessGroup, settings: Settings, tuner: Tuner | None = None
    ) -> None:
        self.rank, self.size = world.rank(), world.size()
        self.fusion_threshold, self.cycle_time = settings.fusion_threshold, settings.cycle_time
        self.tuner = tuner
        self.timeline: Timeline | None = None
        self._settings = settings
        self._controller = Controller(self.rank, self.size, settings.cache_capacity)
        self._world = Set(world, range(self.size))
        self._sets: dict[int, Set] = {0: self._world}
        self._next_set = 1
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._finished = threading.Condition(self._lock)
        self._pending: dict[Key, Operation] = {}
        self._new: list[Operation] = []
        # Operations whose names calls that have raised still have, until all ranks know of these.
        self._held: dict[Key, list[Operation]] = {}
        self._announce: list[Operation] = []
        # Collectives of fused optimizers, which go by call order and not through the engine: how
        # many this rank has begun, and what the last one is; and the same of the rank that has
        # begun most. A rank that has joined is told by them what to take part in.
        self._turn = self._latest = (0, 0)
        self._urgent = False
        self._shutdown = False
        self._ended: HorovodInternalError | None = None
        self._fruitless = 0
        self._others_idle = True
        self._seen: dict[Key, float] = {}  # since when operations wait for ranks
        self._warned: set[Key] = set()
        self._next_look = time.monotonic() + 1
        self._stalled = False
        self._reason = ""
        self._measured = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="fusedpg.hvd", daemon=True)
        self._thread.start()

    # --- what callers do --------------------------------------------------------------------

    def submit(self, operation: Operation) -> None:
        """Has the engine do an operation when all ranks are ready.

        Raises:
            ValueError: one of this name is pending.
            HorovodInternalError: the engine has ended.
        """
        with self._lock:
            if self._ended is not None:
                raise HorovodInternalError(str(self._ended))
            before = self._pending.get(operation.key)
            held = self._held.get(operation.key, [])
            if before is not None and (held or [before])[-1].signature.kind == c.FAILED:
                self._held.setdefault(operation.key, []).append(operation)
                return
            if before is not None:
                raise ValueError(
                    f"hvd: an operation of the same name, {operation.key[1]!r}, is pending: wait "
                    "for it first, or give them different names"
                )
            self._pending[operation.key] = operation
            self._new.append(operation)
            if len(self._new) == 1:
                self._wake.notify()

    def tell_failure(self, key: Key, why: str) -> None:
        """Says that this rank's call has raised, so that no rank waits for its operation."""
        with contextlib.suppress(ValueError, HorovodInternalError):
            self.submit(Operation(key, Signature(c.FAILED, why=why)))

    def wait(self, operation: Operation) -> Any:
        """The result of an operation, when it is done.

        Raises:
            HorovodInternalError: it failed.
        """
        if not operation.done:
            with self._lock:
                while not operation.done:
                    if self._new and not self._urgent:
                        self._urgent = True
                        self._wake.notify()
                    # The engine ends operations after the deadline of stalls, or when it ends.
                    self._finished.wait()
        if operation.error is not None:
            raise HorovodInternalError(str(operation.error))
        return operation.result

    def begin_turn(self, what: int) -> None:
        """Says that this rank begins a collective that joined ranks have to take part in."""
        self._controller.left.clear()
        self._turn = self._turn[0] + 1, what
        if self._controller.has_joined():
            with self._lock:
                self._urgent = True
                self._wake.notify()

    def wait_serving(self, operation: Operation, serve: Callable[[int], None]) -> tuple[int, int]:
        """As :meth:`wait`, for an operation that joins: serves the others' turns meanwhile.

        Args:
            serve: takes part in a turn; it begins one, too. If it raises, this rank has no longer
                joined.
        """
        while True:
            with self._lock:
                self._urgent = True
                self._wake.notify()
                while not operation.done and self._latest[0] <= self._turn[0]:
                    self._finished.wait()
                behind = self._latest[0] > self._turn[0]
            if operation.error is not None or not behind:
                return self.wait(operation)
            try:
                serve(self._latest[1])
            except BaseException:
                with contextlib.suppress(HorovodInternalError):
                    self.leave()
                raise

    def leave(self) -> None:
        """Takes back a ``join()`` that still waits: the others wait for this rank from then on.

        Raises:
            HorovodInternalError: the engine has ended.
        """
        withdrawn = Operation(c.JOIN_KEY, Signature(c.FAILED))
        with self._lock:
            joining = self._pending.get(c.JOIN_KEY)
            if joining is None or joining.signature.kind == c.FAILED:
                return
            if joining in self._new:
                self._new.remove(joining)
                del self._pending[c.JOIN_KEY]
                return
            self._pending[c.JOIN_KEY] = withdrawn
            self._new.append(withdrawn)
        self.wait(withdrawn)

    def joined(self) -> list[int]:
        """The ranks that have joined; also those that this rank's turn has made raise."""
        return sorted({*self._controller.has_joined(), *self._controller.left})

    def call(self, operation: Operation) -> Any:
        self.submit(operation)
        return self.wait(operation)

    def set_of(self, set_id: int) -> tuple[int, ...] | None:
        """The global ranks of a process set; None if there is none of this id."""
        return self._controller.sets.get(set_id)

    def sets(self) -> dict[int, tuple[int, ...]]:
        return dict(self._controller.sets)

    def shutdown(self) -> None:
        """Ends the engines of all ranks; what is pending on any of them raises there."""
        with self._lock:
            self._shutdown = True
            self._wake.notify()
        self._thread.join(_LONGEST_SHUTDOWN)
        if self._thread.is_alive():
            self._abort()
            self._thread.join(_LONGEST_SHUTDOWN)
        for one in [*(one for set_id, one in self._sets.items() if set_id), self._world]:
            one.close()

    # --- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        reason = ""
        try:
            # Tensors that callers have made in inference mode are written in that mode only.
            with torch.inference_mode():
                while not self._cycle():
                    self._sleep()
        except BaseException as error:
            reason = f"hvd: {error}"
        # First, as closing a group may wait for its threads.
        with self._lock:
            self._ended = HorovodInternalError(reason or self._reason)
            for operation in itertools.chain(self._pending.values(), *self._held.values()):
                operation.error, operation.done = self._ended, True
            self._pending.clear()
            self._held.clear()
            self._new.clear()
            self._finished.notify_all()
        if reason:  # not in the handler: the error's frames would keep groups of Gloo open
            self._abort()
        if (timeline := self.timeline) is not None:
            timeline.close()

    def _abort(self) -> None:
        """Ends the operations of peers that wait for this rank."""
        for one in list(self._sets.values()):
            if not one.is_fused:  # Gloo's abort() tells nobody
                one.close()
                continue
            try:
                one.group.abort()
            except Exception as failure:
                _log.info("fused: hvd: %s", failure)

    def _sleep(self) -> None:
        """Until the next cycle is due: soon if there is something to say, later if there is not."""
        began = time.monotonic()
        pause = self.cycle_time * 2 ** min(self._fruitless, 16)
        with self._lock:
            if not self._pending:
                pause = min(pause, max(_LONGEST_IDLE, self.cycle_time))
            elif self._others_idle:
                # Those that are idle set the pace: this rank waits for them in the cycle.
                pause = self.cycle_time
            else:
                pause = min(pause, max(_LONGEST_WAITING, self.cycle_time))
            while not self._urgent and not self._shutdown:
                due = min(pause, self.cycle_time) if self._new else pause
                left = began + due - time.monotonic()
                if left <= 0 or not self._wake.wait(left):
                    break

    def _cycle(self) -> bool:
        """One cycle; returns whether it was the last one."""
        with self._lock:
            new, self._new, self._urgent = self._new, [], False
            flags = _SHUTDOWN * self._shutdown | _STALLED * self._stalled
            flags |= _PENDING * bool(self._pending)
        controller, announce = self._controller, self._announce
        announce += [o for o in new if not controller.mark(o.key, o.signature)]
        message = b""
        announced = {o.key for o in announce}
        if announce:
            message = c.encode([(o.key, o.signature) for o in announce])
            announce.clear()
        header = _HEADER.pack(
            flags, len(message), self.fusion_threshold, self.cycle_time, *self._turn
        )
        bits = controller.bits.to_bytes(-(-controller.slots // 8), "little")
        if (timeline := self.timeline) is not None:
            timeline.cycle()
        told = self._world.exchange(header + bits)
        headers = [_HEADER.unpack_from(one) for one in told]
        flags_of = [one[0] for one in headers]
        if any(flags & (_SHUTDOWN | _STALLED) for flags in flags_of):
            self._reason = self._why(flags_of)
            return True
        self.fusion_threshold, self.cycle_time = headers[0][2:4]
        self._latest = max(one[4:] for one in headers)
        if self._latest[0] > self._turn[0] and c.JOIN_KEY in self._pending:
            with self._lock:
                self._finished.notify_all()
        lengths = [one[1] for one in headers]
        messages: dict[int, bytes] = {}
        if any(lengths):
            padded = self._world.exchange(message.ljust(max(lengths)))
            messages = {r: padded[r][:length] for r, length in enumerate(lengths) if length}
        bits_of = [int.from_bytes(one[_HEADER.size :], "little") for one in told]
        if (timeline := self.timeline) is not None:
            timeline.told(controller, bits_of, messages)
        responses, forgotten = controller.decide(bits_of, messages)
        if forgotten:
            with self._lock:
                # Those that are new to the engine have not said that they are ready yet.
                announced.update(o.key for o in self._new)
                lost = set(forgotten) - announced - {r.key for r in responses}
                announce += [o for key, o in self._pending.items() if key in lost]
        self._fruitless = 0 if responses or messages else self._fruitless + 1
        self._others_idle = not all(flags & _PENDING for flags in flags_of)
        for response in responses if self._seen else ():
            self._seen.pop(response.key, None)
        moved = self._carry_out(responses)
        if self.tuner is not None and moved:
            self._tune(self.tuner, moved)
        if time.monotonic() >= self._next_look:
            self._look_for_stalls(bits_of)
        return False

    def _why(self, flags_of: list[int]) -> str:
        stalled = [rank for rank, flags in enumerate(flags_of) if flags & _STALLED]
        if stalled:
            limit = self._settings.stall_shutdown
            return f"hvd: ranks waited for others for more than {limit:g} s; see rank 0's log"
        ranks = [rank for rank, flags in enumerate(flags_of) if flags & _SHUTDOWN]
        return f"hvd: ranks {ranks} called shutdown() or exited"

    def _tune(self, tuner: Tuner, moved: int) -> None:
        now = time.monotonic()
        try:
            chosen = tuner.record(moved, now - self._measured)
        except Exception as error:
            _log.warning("fused: hvd: autotuning ends: %s", error)
            self.tuner = chosen = None
        self._measured = now
        if chosen is not None:
            self.fusion_threshold, self.cycle_time = int(chosen[0]), float(chosen[1])

    def _look_for_stalls(self, bits_of: list[int]) -> None:
        """On rank 0, which decides for all: warns of what waits for ranks, and gives it up."""
        now = time.monotonic()
        self._next_look = now + 1
        if self.rank != 0:
            return
        waiting = {
            key: (told, missing)
            for key, told, missing in self._controller.waiting(bits_of)
            if missing and key != c.JOIN_KEY
        }
        self._seen = {key: self._seen.get(key, now) for key in waiting}
        self._warned &= set(waiting)
        limit = self._settings.stall_warning
        late = [k for k, since in self._seen.items() if limit and now - since >= limit]
        late = [key for key in late if key not in self._warned]
        if late:
            self._warned.update(late)
            lines = [f"{key[1]} (process set {key[0]}): {waiting[key][1]}" for key in late]
            _log.warning(
                "fused: hvd: operations that some ranks have called and others not for more than "
                "%g s; the missing ranks: %s",
                limit,
                "; ".join(lines),
            )
        give_up = self._settings.stall_shutdown
        self._stalled = any(now - since >= give_up for since in self._seen.values())

    # --- carrying out -----------------------------------------------------------------------

    def _carry_out(self, responses: list[Response]) -> int:
        """Does what all ranks are ready for; returns the bytes of this rank."""
        reductions = [r for r in responses if r.any.kind == c.ALLREDUCE and not r.error]
        moved = 0
        if reductions:
            for call in fused_calls(reductions, self.fusion_threshold):
                moved += self._allreduce(call)
        for response in responses:
            if response.error or response.any.kind != c.ALLREDUCE:
                moved += self._one(response)
        return moved

    def _take(self, responses: Sequence[Response]) -> list[Operation | None]:
        with self._lock:
            return [self._pending.get(response.key) for response in responses]

    def _end(self, operations: Sequence[Operation | None], error: str = "") -> None:
        with self._lock:
            for operation in operations:
                if operation is not None:
                    if error:
                        operation.error = HorovodInternalError(error)
                    operation.done = True
                    del self._pending[operation.key]
                    held = self._held.pop(operation.key, [])
                    if held:
                        self._pending[operation.key] = held[0]
                        self._new.append(held[0])
                        self._urgent = True
                    if held[1:]:
                        self._held[operation.key] = held[1:]
            self._finished.notify_all()

    def _attempt(self, operations: Sequence[Operation | None], work: Callable[[], None]) -> None:
        """Does a collective, whose ranks may all refuse it.

        Raises:
            HorovodInternalError: this rank failed, and the others may have done their part. They
                must not take its next message for one of this operation, so the engine ends.
        """
        try:
            work()
        except Refused as error:
            self._end(operations, f"hvd: {error}")
        except Exception as error:
            names = ", ".join(o.key[1] for o in operations if o is not None)
            raise HorovodInternalError(f"rank {self.rank} failed in {names}: {error}") from error
        else:
            self._end(operations)

    def _allreduce(self, call: list[Response]) -> int:
        """One coalesced all-reduce of the tensors where they lie."""
        here = self._sets.get(call[0].key[0])
        if here is None:
            return 0
        operations = self._take(call)
        by_type: dict[str, list[Tensor]] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        for response, operation in zip(call, operations):
            signature = response.any
            for number, dtype in enumerate(signature.dtypes):
                buffers = by_type.setdefault(dtype, [])
                if operation is None:  # this rank has joined
                    shape = signature.shapes[number]
                    buffers.append(torch.zeros(shape, dtype=getattr(torch, dtype)))
                    continue
                output = operation.outputs[number]
                buffer = _filled(output, operation.tensors[number])
                if buffer is not output:
                    copies.append((output, buffer))
                buffers.append(buffer)

        def work() -> None:
            for dtype in sorted(by_type):
                here.allreduce(by_type[dtype], call[0].any)
            for output, buffer in copies:
                output.copy_(buffer)
            for operation in operations:
                if operation is not None:
                    operation.result = operation.outputs

        size = sum(nbytes(response.any) for response in call)
        with self._activity(call, c.ALLREDUCE):
            self._attempt(operations, work)
        return size

    def _one(self, response: Response) -> int:
        signature = response.any
        (operation,) = self._take([response])
        if response.error:
            if (timeline := self.timeline) is not None:
                timeline.negotiated(response)
            self._end([operation], f"hvd: {response.key[1]}: {response.error}")
            return 0
        if response.key == c.JOIN_KEY and signature.kind == c.FAILED:
            if self.rank in response.signatures:
                self._end([operation])
            return 0
        if signature.kind == c.JOIN:
            if operation is None or operation.signature.kind == c.FAILED:
                return 0  # this rank's call has raised
            operation.result = signature.root, signature.numbers[0]
            self._end([operation])
            return 0
        here = self._sets.get(response.key[0])
        if here is None:
            return 0
        moves = signature.kind not in (c.ADD_SET, c.REMOVE_SET, c.BARRIER)
        if not moves and (timeline := self.timeline) is not None:
            timeline.negotiated(response)
        if signature.kind in (c.ADD_SET, c.REMOVE_SET):
            self._attempt([operation], lambda: self._change_sets(signature, operation))
            return 0
        if signature.kind == c.BARRIER:
            self._end([operation])
            return 0
        assert operation is not None
        with self._activity([response], signature.kind):
            self._attempt([operation], lambda: self._move(here, response, operation))
        return nbytes(signature)

    def _move(self, here: Set, response: Response, operation: Operation) -> None:
        signature, tensors = operation.signature, operation.tensors
        told = [response.signatures[rank] for rank in here.ranks]
        if signature.kind != c.BROADCAST:
            # Its results are tensors that autograd can save, whatever was given.
            with torch.inference_mode(False), torch.no_grad():
                if signature.kind == c.ALLGATHER:
                    operation.result = [
                        here.allgather(tensor, [one.shapes[number][0] for one in told])
                        for number, tensor in enumerate(tensors)
                    ]
                elif signature.kind == c.REDUCESCATTER:
                    operation.result = [here.reducescatter(tensor, signature) for tensor in tensors]
                else:
                    assert signature.kind == c.ALLTOALL
                    splits = splits_of(response, here.ranks)
                    operation.result = here.alltoall(tensors[0], splits)
        else:
            for tensor, output in zip(tensors, operation.outputs):
                buffer = _filled(output, tensor)
                here.broadcast(buffer, signature.root)
                if buffer is not output:
                    output.copy_(buffer)
            operation.result = operation.outputs

    def _change_sets(self, signature: Signature, operation: Operation | None) -> None:
        assert operation is not None
        if signature.kind == c.ADD_SET:
            set_id = operation.result = self._next_set
            self._next_set += 1
            group = dist.new_group(list(signature.numbers))
            if self.rank in signature.numbers:
                self._sets[set_id] = Set(group, signature.numbers)
            return
        gone = self._sets.pop(signature.numbers[0], None)
        if gone is not None:
            dist.destroy_process_group(gone.group)

    def _activity(self, call: list[Response], kind: str) -> contextlib.AbstractContextManager[None]:
        timeline = self.timeline  # a caller may end it at any time
        return contextlib.nullcontext() if timeline is None else timeline.activity(call, kind)


def _filled(output: Tensor, tensor: Tensor) -> Tensor:
    """Memory that has a tensor's elements in order, and neither conjugated nor negated.

    It is the output's own where that lies so, else memory that is copied to the output later.
    """
    buffer = output
    if not output.is_contiguous() or output.is_conj() or output.is_neg():
        buffer = output.resolve_conj().resolve_neg().contiguous()
    if output is not tensor:
        buffer.copy_(tensor)
    return buffer
