"""Groups that programs ask for as "gloo", made by fusedpg.

``ProcessGroupGloo`` is replaced in torch's modules by a class whose calls make our groups; checks
and everything else see the real one. Which of the two a group gets, its ranks agree on in the store
first: all of them have ours, or all have Gloo's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import types
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as c10d_bindings
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from fusedpg._registration import load_extension, loaded_extension

Gloo: Any = c10d_bindings.ProcessGroupGloo
"""torch's class, whatever its name stands for elsewhere."""

_MODULES = (c10d, dist, c10d_bindings)
_NAME = "ProcessGroupGloo"
_WRAPPER = "_create_process_group_wrapper"

# A rank that makes a real Gloo group writes its address under 0/<rank> in the group's store. With
# an earlier group's address there it has this long to say that it wants ours.
_GRACE = 0.5
_LOOK_FOR_GLOO = 0.1  # seconds between two looks for such keys
_LONGEST_PAUSE = 0.005  # between two questions to the store
_LONGEST = 10 * 365 * 86400.0  # seconds; timedelta.max means that
_DECISION = "decision"
_MISSING = "missing"  # what the first rank whose time is over has found
_NO_VALUE = "-"  # no key of ours has it
_MOST_NAMED = 8  # ranks in an error

_logger = logging.getLogger("fusedpg")
_said: set[str] = set()


class _Here(threading.local):
    real = False  # whether this thread wants torch's class


_here = _Here()
_original_wrapper: Any = None  # torch's function, while we serve


def serving() -> bool:
    """Whether new groups that are asked for as "gloo" are ours."""
    return _original_wrapper is not None


def serve_gloo(on: bool = True) -> None:
    """Serves the backend "gloo" of ``torch.distributed`` from now on, or ends that.

    New groups that are asked for as "gloo" are fusedpg's, also the CPU half of the default and of
    "cpu:gloo,cuda:nccl". They keep the name, the options and the exceptions of Gloo. All ranks of
    a group have to do the same: where one does not, all of them get Gloo's group, and a line in
    the log says why. Groups that exist already stay what they are.

    ``FUSEDPG_SERVE_GLOO=1`` does this when torch is imported.

    Args:
        on: False gives torch its own class back.

    Example::

        fusedpg.serve_gloo()
        dist.init_process_group("gloo")
        fusedpg.group_info()["backend"]  # "gloo"
    """
    global _original_wrapper
    if on == serving():
        return
    if not on:
        for module in _MODULES:
            setattr(module, _NAME, Gloo)
        setattr(c10d, _WRAPPER, _original_wrapper)
        _original_wrapper = None
        return
    if any("gloo" in str(name) for name, _ in c10d._world.pg_map.values()):
        warnings.warn(
            "fusedpg serves gloo from now on; the groups of this process that exist stay Gloo's",
            stacklevel=2,
        )
    _original_wrapper = getattr(c10d, _WRAPPER)
    setattr(c10d, _WRAPPER, _wrap)
    for module in _MODULES:
        setattr(module, _NAME, ProcessGroupGloo)


def serve_where_asked() -> None:
    """Serves "gloo" if ``FUSEDPG_SERVE_GLOO`` says so; it is read when fusedpg is imported."""
    value = os.environ.get("FUSEDPG_SERVE_GLOO", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"fused: FUSEDPG_SERVE_GLOO must be 0 or 1, got {value}")
    if value == "1":
        serve_gloo()


def describe() -> str:
    """For ``python -m fusedpg``."""
    if not serving():
        return "torch's (FUSEDPG_SERVE_GLOO=1 serves it)"
    reason = _refusal()
    return f"torch's: {reason}" if reason else "served by fusedpg"


class _Class(type(Gloo)):  # type: ignore[misc]
    """The metaclass of the class that stands for Gloo's."""

    def __new__(
        mcs, name: str, bases: tuple[type, ...], body: dict[str, object], **more: Any
    ) -> type:
        if "ProcessGroupGloo" not in globals():
            return super().__new__(mcs, name, bases, body)
        # A user's subclass: it is one of torch's class, and stays real.
        bases = tuple(Gloo if base is ProcessGroupGloo else base for base in bases)
        return types.new_class(name, bases, more, lambda space: space.update(body))

    def __getattribute__(cls, name: str) -> object:
        return getattr(Gloo, name)

    def __setattr__(cls, name: str, value: object) -> None:
        setattr(Gloo, name, value)

    def __call__(cls, *args: object, **kwargs: object) -> object:
        return _make(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Gloo) or _is_served(instance)

    def __subclasscheck__(cls, other: type) -> bool:
        return other is cls or issubclass(other, Gloo)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is Gloo

    def __hash__(cls) -> int:
        return hash(Gloo)


class ProcessGroupGloo(metaclass=_Class):
    """Stands for torch's class while we serve."""


def _is_served(backend: object) -> bool:
    module = loaded_extension()
    return (
        module is not None
        and isinstance(backend, module.ProcessGroupFused)
        and backend.name() == "gloo"
    )


def _wrap(wrapped_pg: object, *args: object, **kwargs: object) -> object:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around a backend, which compares calls.

    Our groups compare them anyway. And DDP's logger takes the wrapper, too, for torch's class: a
    memory fault, on Gloo as well. The helper of another backend's wrapper is a real Gloo group.
    """
    if _is_served(wrapped_pg):
        return wrapped_pg
    _here.real = True
    try:
        return _original_wrapper(wrapped_pg, *args, **kwargs)
    finally:
        _here.real = False


def _make(*args: Any, **kwargs: Any) -> object:
    """The result of a call of the class: our group, or Gloo's."""
    if _here.real or not serving():
        return Gloo(*args, **kwargs)
    try:
        store, rank, size, timeout = _arguments(*args, **kwargs)
    except TypeError:
        return Gloo(*args, **kwargs)  # which explains what is wrong
    if not _can_agree(store):
        _log('a group asked for as "gloo" is Gloo\'s: its store has only what Gloo asks of it')
        return Gloo(*args, **kwargs)
    with _agreement(store, rank, size, timeout) as (decision, left):
        if timeout is not None and decision.startswith("serve"):
            return _serve(store, rank, size, timeout, left, cuda=decision == "serve cuda")
        _log(f'a group asked for as "gloo" is Gloo\'s on all its ranks: {decision}')
        return Gloo(*args, **kwargs)


def _arguments(
    store: dist.Store,
    rank: int,
    size: int,
    timeout: object = c10d.default_pg_timeout,
    enable_reconfigure: bool = False,  # since torch 2.14
) -> tuple[dist.Store, int, int, timedelta | None]:
    """The arguments; the timeout is None if only Gloo can do what they ask for."""
    if isinstance(timeout, Gloo._Options) or enable_reconfigure:
        return store, rank, size, None
    if not isinstance(timeout, timedelta):
        raise TypeError
    return store, rank, size, timeout


def _serve(
    store: dist.Store, rank: int, size: int, timeout: timedelta, left: timedelta, cuda: bool
) -> object:
    module = load_extension()
    options = module.Options(timeout=left, _name="gloo", _gloo_for_cuda=cuda)
    if not cuda:
        # DDP takes its buckets from the group's memory only with this set. It is the whole
        # process's, where NCCL may be: there it stays as it is.
        os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
    group = module.ProcessGroupFused(store, rank, size, options)
    group._set_default_timeout(timeout)
    return group


# --- which ranks can ----------------------------------------------------------

_refusals: list[str] = []  # "", or why this process cannot serve; found once


def _refusal() -> str:
    """Why this process cannot serve, or nothing."""
    if not _refusals:
        try:
            _refusals.append("" if _fits() else f"its layout in torch {torch.__version__} is new")
        except Exception as error:
            _refusals.append(f"{type(error).__name__}: {error}".partition("\n")[0])
    return _refusals[0]


def _fits() -> bool:
    """Whether C++ code that takes our groups for Gloo's finds what it reads."""
    options = Gloo._Options()
    options._devices = [Gloo.create_device(hostname="127.0.0.1")]
    options._threads = 3
    gloo = Gloo(dist.HashStore(), 0, 1, options)
    return bool(load_extension().ProcessGroupFused._layout_is_gloos(gloo, 3))


# --- the agreement ------------------------------------------------------------


def _can_agree(store: dist.Store) -> bool:
    """Whether a store is one of torch's; one written in Python may do without what we ask of it."""
    inner = getattr(store, "_underlying_non_prefix_store", store)
    return isinstance(inner, (dist.TCPStore, dist.FileStore, dist.HashStore))


@contextlib.contextmanager
def _agreement(
    store: dist.Store, rank: int, size: int, timeout: timedelta | None
) -> Iterator[tuple[str, timedelta]]:
    """The decision of all ranks, "serve", "serve cuda" or why not, and the rest of the time.

    Each rank says what it wants, and rank 0 decides when it has heard all. Any rank may decide for
    Gloo as soon as it knows that one cannot serve. The first decision in the store counts. Keys are
    removed when the group has been made, since a later one may have the same store.
    """
    ours = dist.PrefixStore("fusedpg-serve", store)
    refusal = "options or enable_reconfigure were given" if timeout is None else _refusal()
    # This may change from one group to the next, and asks for too much where hosts are several.
    refusal = refusal or load_extension()._shared_memory_refusal(size)
    seconds = min((timeout or c10d.default_pg_timeout).total_seconds(), _LONGEST)
    deadline = time.monotonic() + seconds
    # An earlier group's address, and its failure.
    for known, key in ((store, f"0/{rank}"), (ours, _MISSING)):
        with contextlib.suppress(Exception):
            known.delete_key(key)
    try:
        if refusal:
            decision = _decide(ours, f"rank {rank}: {refusal}")
        else:
            kind = "cuda" if torch.cuda.is_available() else "cpu"
            ours.set(str(rank), f"{kind} (host {socket.gethostname()}, pid {os.getpid()})")
            decision = _await(store, ours, rank, size, deadline, seconds)
        yield decision, timedelta(seconds=max(deadline - time.monotonic(), 0.001))
    finally:
        for key in [str(rank), _DECISION] if rank == 0 else [str(rank)]:
            with contextlib.suppress(Exception):
                ours.delete_key(key)


def _read(store: dist.Store, key: str) -> str | None:
    """A key's value, if there is one now.

    A `get` after a `check` waits for ever where a rank that leaves removes its key in between.
    """
    value = store.compare_set(key, _NO_VALUE, _NO_VALUE).decode()
    return None if value == _NO_VALUE else str(value)


def _decide(ours: dist.Store, decision: str) -> str:
    """Writes a decision unless there is one; the one that counts."""
    return str(ours.compare_set(_DECISION, "", decision).decode())


def _await(
    store: dist.Store, ours: dist.Store, rank: int, size: int, deadline: float, seconds: float
) -> str:
    """The decision, which may become this rank's to make.

    Args:
        seconds: what the user gave, for the error; less is left when this begins.
    """
    begin = now = time.monotonic()
    keys = [str(p) for p in range(size)]
    pause, look = 0.0001, begin
    since: dict[int, float] = {}  # when a Gloo's address of a silent rank was first seen
    while now < deadline:
        decision = _read(ours, _DECISION)
        if decision is not None:
            return decision
        if rank == 0 and ours.check(keys):
            cuda = any((_read(ours, key) or "").startswith("cuda") for key in keys)
            return _decide(ours, "serve cuda" if cuda else "serve")
        if now >= look:
            look = now + _LOOK_FOR_GLOO
            # Rank 0 looks at all, others at rank 0.
            for p in range(size) if rank == 0 else [0]:
                if ours.check([keys[p]]) or not store.check([f"0/{p}"]):
                    since.pop(p, None)
                elif now - since.setdefault(p, now) >= _GRACE:
                    return _decide(ours, f"rank {p} does not serve it")
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_PAUSE)
        now = time.monotonic()
    raise dist.DistStoreError(
        f'fused: creating a group that serves "gloo": timeout after '
        f"{round(seconds * 1000)}ms on rank {rank}: {_missing(ours, keys)}"
    )


def _missing(ours: dist.Store, keys: list[str]) -> str:
    """Names the ranks that have not come. The first to ask finds them; later ones would miss those
    that have left."""
    found = _read(ours, _MISSING)
    if found is not None:
        return found
    came: list[str] = []
    silent: list[str] = []
    for key in keys:
        said = _read(ours, key)
        if said is not None:
            came.append(f"rank {key} {said.partition(' ')[2]}")
        else:
            silent.append(f"rank {key}")
    text = "all had come, but rank 0 has not decided"
    if silent:
        text = (
            f"{len(silent)} of {len(keys)} ranks have not come: {_some(silent)}; "
            f"{len(came)} have: {_some(came)}"
        )
    return str(ours.compare_set(_MISSING, "", text).decode())


def _some(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _log(text: str) -> None:
    """Once a process."""
    if text not in _said:
        _said.add(text)
        _logger.warning("[fusedpg] %s", text)
