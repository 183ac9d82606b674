"""Environment variables of ``fusedpg.hvd``; nothing else of it reads the environment."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import socket
from collections.abc import Callable
from typing import Any

from fusedpg.hvd.autotune import Tuner, check_autotuning

MIB = 1 << 20


def _read(names: str, default: object, parse: Callable[[str], object] = int) -> Any:
    """The first of several variables that is set and not empty."""
    for name in names.split():
        text = os.environ.get(name, "")
        if text:
            try:
                return parse(text)
            except (ValueError, OverflowError):
                raise ValueError(f"hvd: {name} has an invalid value, {text!r}") from None
    return default


def _seconds(text: str) -> datetime.timedelta:
    return datetime.timedelta(seconds=float(text))


def _flag(text: str) -> bool:
    return text.strip().lower() not in ("0", "false", "no", "off")


@dataclasses.dataclass(frozen=True)
class Place:
    """The rank of this process, as its launcher describes it.

    ``local_rank`` to ``cross_size`` are None where the launcher does not tell; ``host`` is the same
    for ranks of one host.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    cross_rank: int | None
    cross_size: int | None
    address: str | None
    port: int | None
    agent_store: bool
    restart: int
    host: str


def place() -> Place:
    """The variables that torchrun, ``fusedpg-run`` or horovodrun has set."""
    return Place(
        rank=_read("HOROVOD_RANK RANK", 0),
        size=_read("HOROVOD_SIZE WORLD_SIZE", 1),
        local_rank=_read("HOROVOD_LOCAL_RANK LOCAL_RANK", None),
        local_size=_read("HOROVOD_LOCAL_SIZE LOCAL_WORLD_SIZE", None),
        cross_rank=_read("HOROVOD_CROSS_RANK GROUP_RANK", None),
        cross_size=_read("HOROVOD_CROSS_SIZE GROUP_WORLD_SIZE", None),
        address=_read("MASTER_ADDR", None, str),
        port=_read("MASTER_PORT", None),
        agent_store=_read("TORCHELASTIC_USE_AGENT_STORE", False, _flag),
        restart=_read("TORCHELASTIC_RESTART_COUNT", 0),
        host=f"{socket.gethostname()} {_read('FUSEDPG_HOST_ID', '', str)}",
    )


def backend() -> str:
    """The backend of a default process group that ``init`` makes."""
    return str(_read("FUSEDPG_HVD_BACKEND", "fused", str))


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings that the engine reads when it starts.

    Attributes:
        fusion_threshold: the bytes of one coalesced call.
        cycle_time: seconds between two cycles while there is something to do.
        cache_capacity: how many requests are remembered.
        stall_warning: seconds after which rank 0 warns of operations that ranks lack; 0: off.
        stall_shutdown: seconds after which the engine ends because of one.
        timeline: the file of a timeline that begins with ``init``; empty: none.
        mark_cycles: whether that timeline has cycles.
        elastic: whether a single rank behaves as one of several.
        timeout: of the operations of a process group that ``init`` makes; None: torch's.
        autotune: makes the tuner of rank 0; None: parameters stay as they are.
    """

    fusion_threshold: int = 128 * MIB
    cycle_time: float = 0.001
    cache_capacity: int = 1024
    stall_warning: float = 60.0
    stall_shutdown: float = 1800.0
    timeline: str = ""
    mark_cycles: bool = False
    elastic: bool = False
    timeout: datetime.timedelta | None = None
    autotune: Callable[[], Tuner] | None = None


def _autotune() -> Callable[[], Tuner] | None:
    if not _read("HOROVOD_AUTOTUNE", False, _flag):
        return None
    check_autotuning()  # on all ranks, of which only one tunes
    prefix = "HOROVOD_AUTOTUNE"
    # A parameter that is set keeps its value: only the other one is searched.
    cycle_time = _read("HOROVOD_CYCLE_TIME", None, float)
    return functools.partial(
        Tuner,
        warmup_samples=_read(f"{prefix}_WARMUP_SAMPLES", 3),
        steps_per_sample=_read(f"{prefix}_STEPS_PER_SAMPLE", 10),
        max_samples=_read(f"{prefix}_BAYES_OPT_MAX_SAMPLES", 20),
        noise=_read(f"{prefix}_GAUSSIAN_PROCESS_NOISE", 0.8, float),
        log=_read(f"{prefix}_LOG", None, str),
        fusion_threshold=_read("HOROVOD_FUSION_THRESHOLD", None),
        cycle_time=None if cycle_time is None else cycle_time / 1000,
    )


def settings() -> Settings:
    """Horovod's variables, by their names and in their units."""
    timeline = _read("HOROVOD_TIMELINE", "", str)
    check = not _read("HOROVOD_STALL_CHECK_DISABLE", False, _flag)
    return Settings(
        fusion_threshold=_read("HOROVOD_FUSION_THRESHOLD", Settings.fusion_threshold),
        cycle_time=_read("HOROVOD_CYCLE_TIME", 1.0, float) / 1000,
        cache_capacity=_read("HOROVOD_CACHE_CAPACITY", Settings.cache_capacity),
        stall_warning=_read("HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0, float) if check else 0.0,
        # Horovod's default, 0, is to wait for ever.
        stall_shutdown=_read("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0, float)
        or Settings.stall_shutdown,
        timeline="" if timeline == "DYNAMIC" else timeline,
        mark_cycles=_read("HOROVOD_TIMELINE_MARK_CYCLES", False, _flag),
        elastic=_read("HOROVOD_ELASTIC", False, _flag),
        timeout=_read("HOROVOD_GLOO_TIMEOUT_SECONDS", None, _seconds),
        autotune=_autotune(),
    )
