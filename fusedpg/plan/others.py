"""Measures the processor time that other processes take."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

# Linux counts in ticks, so that a short measurement sees none of what is little.
TICK = 1.0 / os.sysconf("SC_CLK_TCK")
LEAST_TICKS, MOST = 3, 0.04


class Others:
    """Watches from where it is made; a collective of the default group, as `share` is.

    Args:
        machine: the number of each rank's machine.
    """

    def __init__(self, machine: Sequence[int]) -> None:
        self.machine = machine
        self._begin = self._read()

    def share(self) -> float:
        """The share of the cores that processes other than ranks have used since.

        It is that of the machine where it is most, 0.0 if it is a few ticks only, and NaN where
        the system does not say.
        """
        wall, busy, own = (b - a for a, b in zip(self._begin, self._read()))
        capacity = wall * (os.cpu_count() or 1)  # in the sum, or ranks could differ in the answer
        count = len(set(self.machine))
        sums = torch.zeros(3, count, dtype=torch.float64)
        here = self.machine[dist.get_rank()]
        sums[:, here] = torch.tensor([capacity, busy, own], dtype=torch.float64)
        sums[:2, here] /= self.machine.count(here)
        dist.all_reduce(sums)
        most = 0.0
        for capacity, busy, own in sums.t().tolist():
            if math.isnan(busy):
                return math.nan
            if busy - own > LEAST_TICKS * TICK:
                most = max(most, (busy - own) / capacity)
        return most

    @staticmethod
    def _read() -> tuple[float, float, float]:
        """Seconds: of the clock, of all processes on this machine's cores, of this process."""
        path, busy = Path("/proc/stat"), math.nan
        if path.exists():
            user, nice, system, _, _, _, _, stolen = path.read_text().split("\n", 1)[0].split()[1:9]
            busy = sum(map(int, (user, nice, system, stolen))) * TICK
        return time.perf_counter(), busy, time.process_time()
