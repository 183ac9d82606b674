"""A trace of operations on rank 0, for chrome://tracing and Perfetto, with Horovod's events."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence

from fusedpg.hvd import _controller as c
from fusedpg.hvd._controller import Controller, Key, Response

_log = logging.getLogger("fusedpg")


class Timeline:
    """Writes a JSON array of events; a tensor is a process of the trace.

    Args:
        path: the file, overwritten.
        mark_cycles: whether every cycle is an event.
    """

    def __init__(self, path: str, mark_cycles: bool) -> None:
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115
        self._mark_cycles = mark_cycles
        self._lock = threading.Lock()
        self._began = time.perf_counter()
        self._pids: dict[str, int] = {}
        self._told: dict[Key, set[int]] = {}
        self._first = True
        epoch = {"start_time_since_epoch_in_micros": int(time.time() * 1e6)}
        with self._lock:
            self._write({"name": "process_name", "ph": "M", "pid": 0, "args": epoch})

    def close(self) -> None:
        """Ends the array; later events are dropped."""
        with self._lock:
            if not self._file.closed:
                with self._dropped_if_full():
                    self._file.write("\n]\n")
                    self._file.close()

    def cycle(self) -> None:
        if self._mark_cycles:
            with self._lock:
                self._write_now("i", "CYCLE_START", 0, s="g")

    def told(self, controller: Controller, bits: Sequence[int], messages: dict[int, bytes]) -> None:
        """Which ranks have become ready for which operations."""
        with self._lock:
            for rank, theirs in enumerate(bits):
                for key, kind in controller.of_bits(theirs, rank):
                    self._tick(key, kind, rank)
            for rank, message in messages.items():
                for key, signature in c.decode(message):
                    if key != c.JOIN_KEY:
                        self._tick(key, signature.kind, rank)

    @contextlib.contextmanager
    def activity(self, call: Sequence[Response], kind: str) -> Iterator[None]:
        """One operation, or several that are one call."""
        name = kind.upper()
        inner = f"FUSED_{name}" if len(call) > 1 else f"COLLECTIVE_{name}"
        with self._lock:
            for response in call:
                self._end_negotiation(response)
                pid = self._pid(response.any.kind, response.key)
                self._write_now("B", name, pid, args=self._described(response))
                self._write_now("B", inner, pid)
        try:
            yield
        finally:
            with self._lock:
                for response in call:
                    pid = self._pid(response.any.kind, response.key)
                    self._write_now("E", inner, pid)
                    self._write_now("E", name, pid, args=self._described(response))

    def negotiated(self, response: Response) -> None:
        """Ends the negotiation of an operation that moves nothing."""
        with self._lock:
            self._end_negotiation(response)

    def _described(self, response: Response) -> dict[str, str]:
        dtypes, shapes = response.any.dtypes, response.any.shapes
        return {"dtype": ", ".join(dtypes), "shape": ", ".join(str(list(s)) for s in shapes)}

    def _end_negotiation(self, response: Response) -> None:
        if self._told.pop(response.key, None) is not None:
            kind = response.any.kind
            self._write_now("E", f"NEGOTIATE_{kind.upper()}", self._pid(kind, response.key))

    def _tick(self, key: Key, kind: str, rank: int) -> None:
        pid = self._pid(kind, key)
        if key not in self._told:
            self._told[key] = set()
            self._write_now("B", f"NEGOTIATE_{kind.upper()}", pid)
        if rank not in self._told[key]:
            self._told[key].add(rank)
            self._write_now("X", str(rank), pid, dur=0)

    def _pid(self, kind: str, key: Key) -> int:
        set_id, name = key
        if not name.startswith(kind):
            name = f"{kind}.{name}"
        label = f"{name} (process set {set_id})" if set_id else name
        pid = self._pids.get(label)
        if pid is None:
            pid = self._pids[label] = len(self._pids) + 1
            self._write({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": label}})
            order = {"sort_index": pid}
            self._write({"name": "process_sort_index", "ph": "M", "pid": pid, "args": order})
        return pid

    def _write_now(self, phase: str, name: str, pid: int, **more: object) -> None:
        now = int((time.perf_counter() - self._began) * 1e6)
        self._write({"ph": phase, "name": name, "pid": pid, "ts": now, **more})

    def _write(self, event: dict[str, object]) -> None:
        if not self._file.closed:
            with self._dropped_if_full():
                # Chrome needs no thread, and no names and arguments at ends; other readers do.
                text = json.dumps({**event, "tid": 0})
                self._file.write(("[\n" if self._first else ",\n") + text)
                self._first = False

    @contextlib.contextmanager
    def _dropped_if_full(self) -> Iterator[None]:
        """Ends the trace, not the training, where the file cannot be written."""
        try:
            yield
        except OSError as error:
            _log.warning("fused: hvd: the timeline %s ends: %s", self._file.name, error)
            with contextlib.suppress(OSError):
                self._file.close()
