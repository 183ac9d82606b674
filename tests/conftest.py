"""Fixtures: pools of worker processes by world size."""

from __future__ import annotations

import os

# Before torch is imported: more threads than cores would only measure the
# scheduler.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
# Compiling takes seconds a program: the tests of generated code turn it on.
os.environ.setdefault("FUSEDPG_FUSION", "eager")
# torch's own compiler first compiles a program for each instruction set and all its headers, in
# processes that take as long to start: for kernels that are fast, and three times as late.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import signal
from collections.abc import Iterator

import hypothesis
import pytest

import harness
import parts
from parts import pytest_addoption, pytest_terminal_summary

__all__ = ["pytest_addoption", "pytest_terminal_summary"]  # pytest calls them

# Run by mpirun through test_mpi_launch.py.
collect_ignore_glob = [] if "FUSEDPG_TEST_MPI" in os.environ else ["python/mpi/*"]

hypothesis.settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=False,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.register_profile(
    "explore", hypothesis.settings.get_profile("ci"), derandomize=False, max_examples=1000
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

fused_only = pytest.mark.skipif(
    not harness.IS_FUSED, reason="about the fused backend's own guarantees"
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fused_only: needs the fused backend")
    config.addinivalue_line("markers", "slow: more of the same; make test-all")
    config.addinivalue_line("markers", "long: no part of make test; make test-rest")
    harness.compiled_in_this_run()
    # A shell's background jobs ignore it, and so would the programs that tests interrupt.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# Minutes each: first, so that the last minutes have work for all workers of xdist.
LONG = (
    "test_c10d_suite.py",
    "test_optim_differential.py",
    "test_random.py",
    "test_cuda_fake.py",
    "test_compress_random.py",
    "test_compress.py",
    "test_chaos.py",
    "test_examples.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    parts.select(config, items)
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONG)))
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))
        if item.get_closest_marker("fused_only") is not None:
            item.add_marker(fused_only)


@pytest.fixture(scope="session", autouse=True)
def _workers_end_with_the_session() -> Iterator[None]:
    yield
    harness.close_pools()


@pytest.fixture(scope="module", autouse=True)
def _pools_leave_memory_to_others() -> Iterator[None]:
    """A process of a pool takes 0.1 GB or more, and pytest's three workers had 177 of them."""
    yield
    harness.close_pools(keep=24)


@pytest.fixture(params=[1, 2, 3, harness.slow(4)], ids=lambda size: f"world{size}")
def workers(request: pytest.FixtureRequest) -> harness.Workers:
    """A pool of 1, 2, 3 and 4 ranks in turn."""
    return harness.pool(request.param)


@pytest.fixture
def pair() -> harness.Workers:
    """A pool of two ranks."""
    return harness.pool(2)


@pytest.fixture
def trio() -> harness.Workers:
    """A pool of three ranks."""
    return harness.pool(3)
