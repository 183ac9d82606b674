"""What an optimizer does in one mode otherwise than in another.

Manual mode (``_manual.py``): nobody has told it of a DistributedDataParallel. Sharded
(``_sharded.py``, ``overlap=False``): DDP's buckets are reduce-scattered in backward and ``step()``
updates. Overlap (``_overlap.py``): backward updates. The mode is chosen where the optimizer is
made, by ``attach()`` and by ``detach()``. It keeps what it alone needs. It does not keep its
optimizer, which would be a cycle that only the garbage collector frees: every call is given it.
"""

from __future__ import annotations

from typing import Any

import torch

from fusedpg.optim._bridge import Bridge
from fusedpg.optim._ddp import unsynchronised


class Mode:
    """What optimizers ask of their mode; by itself it has no objections, and nothing to do."""

    bridge: Bridge | None = None  # to the DDP whose gradients the optimizer takes
    manual = False  # nobody has told the optimizer of a DDP, so it watches gradients itself
    tells = True  # under Join what it does with gradients, as ranks that have joined do it, too

    def add(self, optimizer: Any, params: list[torch.Tensor]) -> None:
        """Parameters that a group has brought, before they are moved."""

    def watch(self, optimizer: Any, params: list[torch.Tensor]) -> None:
        """And when they have been."""

    def check(self) -> None:
        """Raises unless gradients can be reduced and steps made."""

    def check_scaling(self) -> None:
        """Raises unless GradScaler works."""

    def prepare_clipping(self, optimizer: Any) -> None:
        """Has all gradients reduced, or raises."""

    def reduce_asked(self, optimizer: Any) -> None:
        """Somebody wants to know something of a gradient that is not reduced."""
        self.check()

    def not_reduced(self, name: str) -> str:
        """What is wrong with a plain gradient among others that are ours."""
        return (
            f"the gradient of parameter {name} was put in by hand and is not reduced over "
            "ranks, but others are: call optimizer.reduce_gradients() before clipping"
        )

    def operations_ahead(self) -> int:
        """How many operations a rank begins before it waits for one, where this one has raised in
        ``step()`` or in another call of the optimizer's."""
        return 1

    def step(self, optimizer: Any, scale: Any, found_inf: Any) -> None:
        """All of ``step()`` but its closure."""

    def end_before_loading(self) -> None:
        """State is going to be replaced: ends what backward has begun of a step, or raises."""

    def check_detaching(self) -> None:
        """Raises if backward has begun a step."""

    def leave(self, optimizer: Any) -> None:
        """Another mode is going to begin: takes off all hooks."""


class Attached(Mode):
    """With a DDP, whether backward updates or not. Its bridge calls ``bucket_ready``,
    ``gradients_ready``, ``nested_done``, and ``backward_done`` or ``shadow_done``."""

    bridge: Bridge

    def __init__(self, bridge: Bridge) -> None:
        self.bridge = bridge

    def add(self, optimizer: Any, params: list[torch.Tensor]) -> None:
        self.bridge.add(optimizer, params)

    def leave(self, optimizer: Any) -> None:
        self.bridge.remove(optimizer)

    def shadow_done(self, optimizer: Any) -> None:
        """A joined rank has taken part in a backward of the others."""
        optimizer._wait()

    def nested_done(self, optimizer: Any) -> None:
        """A backward inside of another one has ended, and there are further buckets."""

    def reduce_asked(self, optimizer: Any) -> None:
        raise RuntimeError(unsynchronised("asked for"))

    def not_reduced(self, name: str) -> str:
        return unsynchronised(name)
