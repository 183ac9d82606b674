"""A worker's side of the rendezvous of an elastic job (fusedpg-run is the other side).

A worker that has no place, or has lost it, writes that it waits into the driver's store and reads
its place in the next generation of the job: rank, size, and the address of a store that only this
generation uses. A generation consists of workers that were waiting when it was formed, so nobody
in it is known to be dead.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the launcher, which takes its keys from here, starts without torch
    import torch.distributed as dist

__all__ = ["JobEnded", "Membership", "current"]

STORE, WORKER = "FUSEDPG_RUN_STORE", "FUSEDPG_RUN_WORKER"
# An answer of the driver's store that takes longer means that the driver is gone.
STORE_TIMEOUT = datetime.timedelta(seconds=60)
POLL_SECONDS = 0.02


class JobEnded(RuntimeError):
    """The driver forms no further generation of the job."""


def waiting_key(worker: int, meeting: int) -> str:
    return f"waiting/{worker}/{meeting}"


def place_key(worker: int, meeting: int) -> str:
    return f"place/{worker}/{meeting}"


def synced_key(generation: int, worker: int) -> str:
    return f"synced/{generation}/{worker}"


# Two numbers: how often workers were added to and removed from what the job may use.
UPDATES_KEY = "updates"


def variables(place: dict[str, object]) -> dict[str, str]:
    """The variables of a place that torch.distributed and Horovod's programs read."""
    names = {
        "rank": ("RANK", "HOROVOD_RANK"),
        "size": ("WORLD_SIZE", "HOROVOD_SIZE"),
        "local_rank": ("LOCAL_RANK", "HOROVOD_LOCAL_RANK"),
        "local_size": ("LOCAL_WORLD_SIZE", "HOROVOD_LOCAL_SIZE"),
        "cross_rank": ("HOROVOD_CROSS_RANK",),
        "cross_size": ("HOROVOD_CROSS_SIZE",),
        "hostname": ("HOROVOD_HOSTNAME",),
        "host": ("GROUP_RANK",),
        "hosts": ("GROUP_WORLD_SIZE",),
        "address": ("MASTER_ADDR",),
        "port": ("MASTER_PORT",),
    }
    result = {name: str(place[key]) for key, both in names.items() for name in both}
    # The driver serves the store; no rank does.
    result["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return result


@dataclass
class Membership:
    """The place of this process in an elastic job."""

    store: dist.Store
    worker: int
    meetings: int = 0
    generation: int = -1
    updates: tuple[int, int] = field(default=(0, 0))

    def meet(self) -> None:
        """Waits for a place in the next generation and puts it into the environment.

        A newcomer may wait until the others commit; as long as the driver answers, it waits.

        Raises:
            JobEnded: there will be no further generation.
            SystemExit: the job goes on without this worker.
        """
        import torch.distributed as dist

        self.meetings += 1
        key = place_key(self.worker, self.meetings)
        try:
            self.store.set(waiting_key(self.worker, self.meetings), "1")
            while not self.store.check([key]):
                time.sleep(POLL_SECONDS)
            place = json.loads(self.store.get(key))
        except dist.DistError as error:
            raise JobEnded(f"fusedpg-run does not answer: {error}") from error
        if "ended" in place:
            raise JobEnded(f"fusedpg-run: {place['ended']}")
        if place.get("leave"):
            sys.exit(0)
        self.generation = place["generation"]
        self.updates = tuple(place["updates"])
        os.environ.update(variables(place))

    def changes(self) -> tuple[bool, bool]:
        """True if workers were added or removed since this generation began."""
        added, removed = map(int, self.store.get(UPDATES_KEY).decode().split(","))
        return added > self.updates[0], removed > self.updates[1]

    def mark_synced(self) -> None:
        """Tells the driver that this worker has the job's state."""
        self.store.set(synced_key(self.generation, self.worker), "1")


_current: Membership | None = None


def current() -> Membership | None:
    """The membership of this process; None where no elastic fusedpg-run started it."""
    global _current
    if _current is None and STORE in os.environ:
        import torch.distributed as dist

        host, _, port = os.environ[STORE].rpartition(":")
        store = dist.TCPStore(host, int(port), is_master=False, timeout=STORE_TIMEOUT)
        _current = Membership(store, int(os.environ[WORKER]))
    return _current
