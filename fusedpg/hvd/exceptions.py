"""The exceptions of operations of ``fusedpg.hvd``."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """An operation failed: ranks disagree about it, or a rank or the engine has ended."""


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts were added or removed; training goes on with the new ones.

    Args:
        skip_sync: whether the state need not be synchronised, because hosts were only removed.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts were added or removed")
        self.skip_sync = skip_sync
