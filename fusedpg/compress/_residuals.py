"""The residuals that a rank keeps from step to step, and their names in checkpoints."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from fusedpg._by_parameter import ByParameter, Kept, Order, shape_in_memory
from fusedpg.compress._checkpoint import Loaded, ParameterRecord
from fusedpg.compress._piece import Run, Runs, Shared, StateReader
from fusedpg.compress._units import Unit
from fusedpg.compress.memories import Memory


class Residuals:
    """Flat tensors by parameter and by a name of the memory's or compressor's.

    Args:
        named_parameters: by these names parameters are known; others by the order in which they
            appear.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, torch.Tensor]] | None) -> None:
        self._names: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        for name, parameter in named_parameters or ():
            # DDP's own names are those of its module.
            self._names[parameter] = name.removeprefix("module.")
        self._next_key = 0
        self.pending = False  # whether anything but zeros may be kept of earlier steps
        self.loaded_anywhere = False  # whether any rank has loaded a checkpoint's memory
        self._loaded: Loaded | None = None
        self._clear()

    def _clear(self) -> None:
        self._kept = ByParameter()
        # Parameters in the order of their first appearance.
        self._records: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._order: list[tuple[weakref.ref[torch.Tensor], ParameterRecord]] = []
        # By unit: of which parameters, in which orders.
        self._runs: dict[int, tuple[list[weakref.ref[torch.Tensor]], list[Order], Runs]] = {}
        self._seen: dict[int, list[weakref.ref[torch.Tensor]]] = {}  # by bucket

    # --- which parameters there are -----------------------------------------------------------

    def know(self, bucket: int, parameters: list[torch.Tensor], last: bool) -> None:
        """Numbers the parameters of a bucket that are new, and gives them what a checkpoint has.

        Args:
            last: no further parameters will come in this backward.

        Raises:
            ValueError: if the checkpoint that was loaded is of another model.
        """
        seen = self._seen.get(bucket)
        if seen is None or not _same(seen, parameters):
            # DDP's first buckets are the model's parameters from the last to the first, but for
            # the order in a bucket.
            self._know(parameters[::-1])
            self._seen[bucket] = [*map(weakref.ref, parameters)]
        if last:
            loaded, self._loaded = self._loaded, None
            if loaded is not None:
                loaded.check_complete()

    def _know(self, parameters: Sequence[torch.Tensor]) -> None:
        for parameter in parameters:
            if parameter in self._records:
                continue
            name, key = self._names.get(parameter), self._next_key
            if self._loaded is not None and self._loaded.records:
                place = self._loaded.take(parameter, name)
                key = self._loaded.records[place].key
                name = name or self._loaded.records[place].name
                for kept, saved in self._loaded.memory.items():
                    if saved[place] is not None:
                        self._kept.set(kept, parameter, saved[place].to(parameter.device))
            record = ParameterRecord(name, key, str(parameter.dtype), tuple(parameter.shape))
            self._next_key = max(self._next_key, key + 1)
            self._records[parameter] = record
            self._order.append((weakref.ref(parameter), record))

    def runs_of(self, unit: Unit) -> Runs:
        """The parameters of a unit, as its piece has them."""
        known = self._runs.get(unit.index)
        if known is not None and known[1] == unit.orders and _same(known[0], unit.parameters):
            return known[2]
        found = []
        for parameter, order in zip(unit.parameters, unit.orders, strict=True):
            record: ParameterRecord = self._records[parameter]
            shape = shape_in_memory(parameter, order)
            found.append(Run(record.label, record.key, 0, parameter.numel(), shape))
        runs = Runs(found)
        self._runs[unit.index] = [*map(weakref.ref, unit.parameters)], unit.orders, runs
        return runs

    # --- what is kept of them -------------------------------------------------------------------

    def of_unit(self, unit: Unit, dtype: torch.dtype) -> tuple[StateReader, Callable[..., Kept]]:
        """``state`` and ``kept`` of a unit's piece."""
        wholes: dict[str, torch.Tensor] = {}

        def unsettled(name: str, shared: Sequence[Shared] = ()) -> Kept:
            def moved(tensor: torch.Tensor) -> None:
                """Slices that ranks share out are others than before."""
                for group, _, _ in shared:
                    dist.all_reduce(tensor, group=group)
                if shared:
                    # All of this rank's slice, of which what is asked for may be a part.
                    _, first, last = shared[0]
                    tensor[:first].zero_()
                    tensor[last:].zero_()

            wholes.pop(name, None)
            return self._kept.unsettled(
                name, unit.parameters, unit.orders, dtype, unit.slices[0].device, moved,
                self.loaded_anywhere,
            )  # fmt: skip

        def state(name: str, begin: int, end: int, shared: Sequence[Shared]) -> torch.Tensor:
            if name not in wholes:
                found = unsettled(name, shared)
                found.settle()
                wholes[name] = found.tensor
            return wholes[name][begin:end]

        return state, unsettled

    def send(
        self, grad: torch.Tensor, memory: Memory, state: StateReader, ranks: int, here: int
    ) -> None:
        """Adds to gradients that are sent as they are what was kept of earlier steps.

        Args:
            ranks: how many of them the mean is taken of.
            here: of how many ranks a worker's residual is the mean.
        """
        for name in self._kept.names() if self.pending else ():
            if not name.startswith("residual"):
                continue
            residual = state(name, 0, grad.numel(), ())
            # A server's is of the mean, a host's of the mean of its ranks, and what a memory keeps
            # may have another unit.
            share = memory.scale * memory.beta * here
            if name.endswith("@server"):
                sums = memory.for_sums()
                share = ranks * sums.scale * sums.beta
            grad.add_(residual, alpha=share)
            residual.zero_()

    def names(self) -> list[str]:
        return self._kept.names()

    def get(self, name: str, parameter: torch.Tensor) -> torch.Tensor | None:
        """The residual of a parameter, in its shape."""
        return self._kept.get(name, parameter)

    # --- checkpoints ----------------------------------------------------------------------------

    @property
    def has_loaded(self) -> bool:
        """Whether a checkpoint holds residuals that no parameter has been given yet."""
        return self._loaded is not None and any(self._loaded.memory.values())

    def state_dict(self) -> dict[str, object]:
        """Tensors on the CPU, by name and by parameter, and the parameters' records."""
        # Without those of modules that have gone: who loads it has never seen them.
        known = [(p, record) for ref, record in self._order if (p := ref()) is not None]
        if not known and self._loaded is not None:
            # The checkpoint that was loaded, as no parameter has asked for it yet.
            return {
                "parameters": [tuple(record) for record in self._loaded.records],
                "memory": dict(self._loaded.memory),
            }
        memory = {
            name: [
                None
                if (kept := self._kept.get(name, parameter)) is None
                else kept.detach().reshape(-1).to("cpu", copy=True)
                for parameter, _ in known
            ]
            for name in self._kept.names()
        }
        return {"parameters": [tuple(record) for _, record in known], "memory": memory}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Replaces what is kept; nothing is changed unless all of it fits."""
        loaded = Loaded(state_dict)
        known = [parameter for ref, _ in self._order if (parameter := ref()) is not None]
        if known and loaded.records:
            trial = Loaded(state_dict)
            for parameter in known:
                trial.take(parameter, self._names.get(parameter))
        self.pending = True
        self._loaded = loaded
        self._clear()
        self._know(known)


def _same(known: list[weakref.ref[torch.Tensor]], parameters: list[torch.Tensor]) -> bool:
    return len(known) == len(parameters) and all(map(is_, [ref() for ref in known], parameters))
