"""Beginning and end, ranks, and process sets."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fusedpg.hvd import _controller as c
from fusedpg.hvd import _membership, _settings
from fusedpg.hvd._controller import Signature
from fusedpg.hvd._engine import Engine, Operation
from fusedpg.hvd._execute import Set
from fusedpg.hvd._timeline import Timeline
from fusedpg.hvd.exceptions import HorovodInternalError

Finish = Callable[..., object]
"""Makes what ``synchronize`` returns of an operation's result."""


@dataclasses.dataclass
class _State:
    """The objects that ``init`` has made."""

    engine: Engine
    owns_world: bool
    elastic: bool
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    handles: dict[int, tuple[Operation, Finish]] = dataclasses.field(default_factory=dict)
    counter: int = 0
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


_state: _State | None = None
# Stores outlive shutdown(): a port that was given back may be another's, and peers may still read.
_stores: dict[tuple[str, int], dist.Store] = {}
# How many groups have met in each store: ranks that join later begin with a store of their own.
_groups: Counter[tuple[str, int]] = Counter()
_at_exit = False
# In a forked child what `init` has made in its parent, which is of no use there. It is kept, since
# its destructors would wait for threads that a child does not have, and end connections.
_parents: list[object] = []
_parents_world = False  # `init` made the default group there


def _leave_to_parent() -> None:
    global _state, _stores, _parents_world
    _parents_world = _state is not None and _state.owns_world
    _parents.append((_state, _stores))
    _state, _stores = None, {}
    global_process_set.ranks = []


os.register_at_fork(after_in_child=_leave_to_parent)


def state() -> _State:
    """Raises ValueError before ``init`` and after ``shutdown``."""
    if _state is None:
        raise ValueError("hvd: call hvd.init() first")
    return _state


def engine() -> Engine:
    """The engine of this process."""
    return state().engine


def _store(place: _settings.Place) -> dist.Store:
    if place.size == 1 and place.address is None:
        return dist.HashStore()
    if place.address is None or place.port is None:
        raise ValueError("hvd: MASTER_ADDR and MASTER_PORT must be set for several ranks")
    key = place.address, place.port
    if key not in _stores:
        _stores[key] = dist.TCPStore(
            place.address,
            place.port,
            is_master=place.rank == 0 and not place.agent_store,
            wait_for_workers=False,
            multi_tenant=True,
        )
    _groups[key] += 1
    return dist.PrefixStore(f"fusedpg.hvd/{place.restart}/{_groups[key]}", _stores[key])


def _local(group: dist.ProcessGroup, place: _settings.Place) -> tuple[int, int, int, int]:
    """Local rank and size, cross rank and size: by host, where the launcher has not told."""
    digest = hashlib.blake2b(place.host.encode(), digest_size=8).digest()
    hosts = Set(group, range(group.size())).exchange(digest)
    rank = group.rank()
    local = [r for r, host in enumerate(hosts) if host == hosts[rank]]
    local_rank = local.index(rank) if place.local_rank is None else place.local_rank
    # The other hosts' ranks of this local rank.
    places = [hosts[:r].count(host) for r, host in enumerate(hosts)]
    cross = [r for r, number in enumerate(places) if number == places[rank]]
    return (
        local_rank,
        len(local) if place.local_size is None else place.local_size,
        cross.index(rank) if place.cross_rank is None else place.cross_rank,
        len(cross) if place.cross_size is None else place.cross_size,
    )


def init(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
) -> None:
    """Begins: makes the default process group if there is none, and starts the engine.

    Ranks come from torchrun's variables or horovodrun's. A second call does nothing.

    Args:
        comm: all ranks, or None. A part of them is not possible; use process sets.
        process_sets: sets that are there from the start, alike on all ranks, or "dynamic", which
            is allowed and means nothing: sets may always be added.
    """
    global _state, _at_exit, _parents_world
    if _state is not None:
        return
    if _parents_world and dist.is_initialized():
        dist.destroy_process_group()  # it is the parent's
    _parents_world = False
    owns = not dist.is_initialized()
    membership = _membership.current()
    if membership is not None and owns:
        membership.meet()
    place, settings = _settings.place(), _settings.settings()
    if owns:
        dist.init_process_group(
            _settings.backend(),
            store=_store(place),
            rank=place.rank,
            world_size=place.size,
            timeout=settings.timeout,
        )
    try:
        if comm is not None and list(comm) != list(range(dist.get_world_size())):
            raise ValueError("hvd: init(comm=) must name all ranks in order; use process sets")
        group = dist.new_group()
        local = _local(group, place)
        tuner = settings.autotune() if settings.autotune and group.rank() == 0 else None
        _state = _State(Engine(group, settings, tuner), owns, settings.elastic, *local)
    except BaseException:
        if owns:
            dist.destroy_process_group()
        raise
    if not _at_exit:
        _at_exit = True
        # Before the backend's own, because it was registered later.
        atexit.register(shutdown)
    global_process_set.ranks = list(range(size()))
    if settings.timeline:
        _begin_timeline(settings.timeline, settings.mark_cycles)
    if process_sets is not None and process_sets != "dynamic":
        for one in process_sets:
            assert isinstance(one, ProcessSet)
            add_process_set(one)


def shutdown() -> None:
    """Ends what ``init`` began, on all ranks: pending operations of others raise there."""
    global _state
    if _state is None:
        return
    ending, _state = _state, None
    global_process_set.ranks = []
    ending.engine.shutdown()
    if ending.owns_world:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def is_initialized() -> bool:
    return _state is not None


def rank() -> int:
    return engine().rank


def size() -> int:
    return engine().size


def local_rank() -> int:
    """This rank's number among those of its host."""
    return state().local_rank


def local_size() -> int:
    return state().local_size


def cross_rank() -> int:
    """The number of this rank's host among those that have a rank of its local rank."""
    return state().cross_rank


def cross_size() -> int:
    return state().cross_size


def is_elastic() -> bool:
    """True if the number of ranks may change; a single rank then behaves as one of several."""
    return state().elastic


def is_homogeneous() -> bool:
    """True if all hosts have the same number of ranks."""
    return state().local_size * state().cross_size == size()


def _built(what: str, answer: object) -> Callable[[], object]:
    def built() -> object:
        return answer

    built.__name__ = built.__qualname__ = what
    built.__doc__ = f"{answer}, for programs that ask."
    return built


mpi_threads_supported = _built("mpi_threads_supported", False)
mpi_enabled, mpi_built = _built("mpi_enabled", False), _built("mpi_built", False)
gloo_enabled, gloo_built = _built("gloo_enabled", True), _built("gloo_built", True)
ddl_built, ccl_built = _built("ddl_built", False), _built("ccl_built", False)
cuda_built, rocm_built = _built("cuda_built", False), _built("rocm_built", False)
nccl_built = _built("nccl_built", 0)


def _begin_timeline(path: str, mark_cycles: bool) -> None:
    if rank() == 0:
        stop_timeline()
        engine().timeline = Timeline(path, mark_cycles)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Traces operations into a file of rank 0, until ``stop_timeline``."""
    _begin_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Ends the trace; the file is complete when this returns."""
    timeline, engine().timeline = engine().timeline, None
    if timeline is not None:
        timeline.close()


# --- process sets ---------------------------------------------------------------------------


class ProcessSet:
    """Some of the ranks, for operations among them.

    Args:
        ranks: global ranks.

    Attributes:
        process_set_id: None until the set was added, and after it was removed.
    """

    process_set_id: int | None

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks: list[int] = sorted(ranks)
        if any(not isinstance(one, int) for one in self.ranks):
            raise ValueError("hvd: a process set is made of a list of ranks")
        self.process_set_id = None

    def size(self) -> int | None:
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's number in the set; None if the set was not added.

        Raises:
            ValueError: it is not in the set.
        """
        if self.process_set_id is None:
            return None
        if not self.included():
            raise ValueError(f"hvd: rank {rank()} is not in process set {self.ranks}")
        return self.ranks.index(rank())

    def included(self) -> bool:
        return rank() in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Adds a process set; called on all ranks.

    Raises:
        ValueError: there is a set of these ranks already, or a rank that is none.
        HorovodInternalError: ranks add different sets.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    ranks = tuple(process_set.ranks)
    try:
        if ranks in engine().sets().values():
            raise ValueError(f"hvd: there is a process set of ranks {list(ranks)} already")
        if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(size())):
            raise ValueError(f"hvd: a process set needs ranks from 0 to {size() - 1}, got {ranks}")
    except ValueError as error:
        engine().tell_failure((0, c.ADD_SET), str(error))
        raise
    signature = Signature(c.ADD_SET, numbers=ranks)
    process_set.process_set_id = engine().call(Operation((0, c.ADD_SET), signature))
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set; called on all ranks. Returns False if there is no such set.

    Its pending operations raise HorovodInternalError.
    """
    set_id = process_set.process_set_id
    if not set_id:  # never added, or the global one
        return False
    process_set.process_set_id = None
    if engine().set_of(set_id) is None:
        return False
    engine().call(Operation((0, c.REMOVE_SET), Signature(c.REMOVE_SET, numbers=(set_id,))))
    return True


# --- handles --------------------------------------------------------------------------------


def begin(operation: Operation, finish: Finish) -> int:
    """Submits an operation; returns its handle."""
    here = state()
    here.engine.submit(operation)
    with here.lock:
        here.counter += 1
        here.handles[here.counter] = operation, finish
        return here.counter


def then(handle: int, finish: Finish) -> int:
    """Has ``synchronize`` return another function's value of what it would have returned."""
    operation, before = state().handles[handle]
    state().handles[handle] = operation, lambda result: finish(before(result))
    return handle


def next_name(kind: str) -> str:
    """The name of an operation that has none: by the handle that it will get."""
    return f"{kind}.noname.{state().counter + 1}"


def poll(handle: int) -> bool:
    """True if an operation is done; ``synchronize`` then returns at once."""
    entry = state().handles.get(handle)
    return entry is None or entry[0].done


def synchronize(handle: int) -> Any:
    """Waits for an operation and returns its result; None for a handle that was waited for.

    Raises:
        HorovodInternalError: it failed.
    """
    here = state()
    entry = here.handles.pop(handle, None)
    if entry is None:
        return None
    operation, finish = entry
    return finish(here.engine.wait(operation))


class telling:
    """A context for the part of a call that may raise on this rank alone.

    What it raises, the other ranks' calls raise, too, in place of waiting for this one.
    """

    def __init__(self, kind: str, name: str | None, process_set: ProcessSet) -> None:
        self._of = kind, name, process_set

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, Exception) or _state is None:
            return
        kind, name, process_set = self._of
        try:
            key = membership(process_set), next_name(kind) if name is None else f"{kind}.{name}"
        except Exception:  # nobody waits for a rank that is not in the set
            return
        with _state.lock:  # the other ranks' calls get a handle, and its number names later ones
            _state.counter += 1
        _state.engine.tell_failure(key, f"{type(error).__name__}: {str(error)[:500]}")


@functools.lru_cache
def _can_be_moved(dtype: torch.dtype) -> bool:
    """Not quantised types, and those of less than a byte."""
    try:
        one = torch.zeros(2, dtype=dtype, device="cpu")
        one.clone().copy_(one)
        one.view(torch.uint8)
    except Exception:
        return False
    return True


_PLAIN = torch.Tensor.__torch_dispatch__


def check_tensor(tensor: torch.Tensor, written: bool = False) -> torch.Tensor:
    """A tensor that the engine's thread can read, and write: an alias of the given one's memory.

    Args:
        written: the result goes into it.

    Raises:
        TypeError: no tensor, or one that has no memory of its own, such as a FakeTensor or DTensor.
        ValueError: not dense, not on the CPU, or of a type without bytes.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"hvd: operations take tensors, got {type(tensor).__name__}")
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    if type(tensor).__torch_dispatch__ is not _PLAIN or wrapped:
        what = "one inside of a torch.func transform" if wrapped else type(tensor).__name__
        raise TypeError(f"hvd: operations take plain tensors, got {what}")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        what = f"{tensor.layout} on {tensor.device}"
        raise ValueError(f"hvd: tensors must be dense and on the CPU, got one that is {what}")
    if not _can_be_moved(tensor.dtype):
        raise ValueError(f"hvd: tensors of type {tensor.dtype} cannot be sent")
    own = tensor.detach()
    if type(own) is not torch.Tensor:
        own = own.as_subclass(torch.Tensor)
    if own.numel() and own.untyped_storage().nbytes() == 0:
        raise ValueError("hvd: the tensor's memory was given back: its storage has no bytes")
    if not written:
        if own.is_conj() or own.is_neg():
            own = own.resolve_conj().resolve_neg()
    elif not own.is_contiguous() and torch._debug_has_internal_overlap(own) == 1:
        raise ValueError(
            "hvd: elements of the tensor share memory, as expand() makes them, so that no result "
            "can be written into it: clone() it first, or use the operation that is not in place"
        )
    return own


def membership(process_set: ProcessSet) -> int:
    """The id of a set that this process is in.

    Raises:
        ValueError: the set was not added.
        HorovodInternalError: this process is not in it.
    """
    set_id, own_engine = process_set.process_set_id, state().engine
    ranks = None if set_id is None else own_engine.set_of(set_id)
    if set_id is None or ranks is None:
        raise ValueError(f"hvd: {process_set} was not added")
    if own_engine.rank not in ranks:
        raise HorovodInternalError(f"hvd: rank {own_engine.rank} is not in {process_set}")
    return set_id
