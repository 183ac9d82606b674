"""PyTorch's own DistributedTest on any backend; run.py starts it.

The suite in torch's wheel asks for backends by name, when it is imported
(which tests exist) and in the bodies of its tests (which branch they take). So
it is imported under a name it knows, the gate, and at the edge of the API the
gate's name is replaced by that of the backend under test.

C10D_SUITE_BACKEND  name passed to init_process_group
C10D_SUITE_GATE     "gloo" runs what Gloo runs; "mpi" the all_to_all tests too
C10D_SUITE_SMALL    1: run also what is skipped below eight ranks
C10D_SUITE_SELECT   file of the names of the tests to run
FUSEDPG_SERVE_GLOO  1 with the backend "gloo": fusedpg serves it, and no group may be Gloo's
C10D_SUITE_HOSTS    a name for each rank, such as "a,a,b": hosts that ranks take themselves to be on
WORLD_SIZE, TEMP_DIR  read by the suite itself
"""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
import os
from typing import Any

BACKEND = os.environ["C10D_SUITE_BACKEND"]
GATE = os.environ["C10D_SUITE_GATE"]
SERVED = BACKEND == "gloo" and os.environ.get("FUSEDPG_SERVE_GLOO") == "1"
HOSTS = [name for name in os.environ.get("C10D_SUITE_HOSTS", "").split(",") if name]
# Read by the suite while it is imported.
os.environ["BACKEND"] = GATE

import torch.distributed as dist  # noqa: E402
import torch.distributed.distributed_c10d as c10d  # noqa: E402
from torch.testing._internal import common_distributed  # noqa: E402

if BACKEND == "fused":
    importlib.import_module("fusedpg")

for feature in ("ddp", "subgroup", "plugin"):
    common_distributed.DistTestCases.backend_feature[feature].add(BACKEND)

from torch.testing._internal.distributed import distributed_test as suite  # noqa: E402

# Read while the tests run: only MPI is allowed groups of less than eight ranks.
os.environ["BACKEND"] = "mpi" if os.environ.get("C10D_SUITE_SMALL") == "1" else BACKEND


class _Name(str):
    """Equal to the gate's name, but profiler titles begin with the real one."""

    def __add__(self, other: str) -> str:
        return BACKEND + other

    def __format__(self, spec: str) -> str:
        return format(BACKEND, spec)


def _real(name: Any) -> Any:
    return BACKEND if name is not None and str(name).lower() == GATE else name


def _init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
    return c10d.init_process_group(_real(backend), *args, **kwargs)


def _new_group(
    ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any
) -> Any:
    return c10d.new_group(ranks, timeout, _real(backend), *args, **kwargs)


def _get_backend(group: Any = None) -> str:
    name = c10d.get_backend(group)
    return _Name(GATE) if name == BACKEND else name


def _monitored_barrier(
    group: Any = dist.group.WORLD, timeout: Any = None, wait_all_ranks: bool = False
) -> Any:
    # torch's function refuses every name but gloo; the method does not.
    if c10d._rank_not_in_group(group):
        return None
    if timeout is None:
        timeout = c10d._get_default_timeout("gloo")
    elif isinstance(timeout, float):
        timeout = datetime.timedelta(seconds=timeout)
    group = c10d._get_default_group() if group is None else group
    return group.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)


if GATE != BACKEND:
    dist.init_process_group = _init_process_group
    dist.new_group = _new_group
    dist.get_backend = _get_backend
    dist.monitored_barrier = _monitored_barrier

for titles in (
    suite.PROFILING_SUPPORTED_BACKENDS,
    suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
):
    if BACKEND not in titles:
        titles.append(BACKEND)


FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["suite", "torch._dynamo"])


def _refuse(text: str) -> None:
    """Instead of a line in the log where a group is not served."""
    raise AssertionError(text)


def _in_environment(
    environment: dict[str, str], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    os.environ.update(environment)
    if HOSTS:
        os.environ["FUSEDPG_HOST_ID"] = HOSTS[args[0]]
    if SERVED:
        serve_gloo = importlib.import_module("fusedpg._serve_gloo")
        assert serve_gloo.serving()
        serve_gloo._log = _refuse
    target(*args, **kwargs)


def _process(target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # The suite changes variables from test to test; the server has its first ones.
    arguments = (dict(os.environ), target, args, kwargs)
    return FORKED.Process(target=_in_environment, name=name, args=arguments)


class TestDistributed(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
    """torch's tests, one set of processes each."""

    def setUp(self) -> None:
        super().setUp()
        # Forked from a server that has imported all this once: torch's own way
        # pays for the imports again in every rank of every test.
        self._start_processes(_process)
