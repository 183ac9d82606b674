"""Pools of worker processes that stay alive between tests.

Importing torch costs seconds, so workers are forked from a server that has
imported it once, and one pool serves many tests: the test sends a module-level
function to every rank and gets back one result per rank. A pool whose ranks
raised, hung or died is thrown away; the next test gets a fresh one.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import importlib
import importlib.util
import inspect
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import hosts as namespaces

BACKEND = os.environ.get("FUSEDPG_TEST_BACKEND", "fused")
"""The backend under test. "gloo" checks the tests themselves."""

IS_FUSED = BACKEND == "fused"
DEFAULT_TIMEOUT = 60.0
# How long the other ranks may need after the first one has raised.
GRACE = 10.0
ROOT = Path(__file__).resolve().parents[2]
FORKED = multiprocessing.get_context("forkserver")
# What many workers would import, each for itself. Who makes an optimizer or a DDP module imports
# torch._dynamo, which takes as long as all the rest; pytest and hypothesis come with the module of
# a test, whose functions the workers run.
FORKED.set_forkserver_preload(
    [
        *("torch.distributed", "torch.nn.parallel", "torch._dynamo"),
        *("torch.distributed.checkpoint", "pytest", "hypothesis"),
        *("fusedpg.optim", "fusedpg.fusion", "fusedpg.compress", "fusedpg.tensor_parallel"),
    ]
)


@dataclasses.dataclass
class Context:
    """What a check function knows about the rank that runs it."""

    rank: int
    world_size: int
    backend: str
    oracle: Any = None  # a Gloo group over the same ranks
    store: Any = None
    one_host: bool = True
    scratch: str = ""

    @property
    def fused(self) -> bool:
        return self.backend == "fused"

    @property
    def exact(self) -> bool:
        """Whether results must equal the reference bit by bit."""
        return self.fused and self.one_host

    def empty(self, *size: int, dtype: torch.dtype = torch.float32, arena: bool) -> torch.Tensor:
        """An uninitialised tensor, in the shared arena if there is one."""
        if arena and self.fused:
            import fusedpg

            return fusedpg.empty(*size, dtype=dtype)
        return torch.empty(*size, dtype=dtype)


class RemoteError(NamedTuple):
    """An exception of a worker."""

    rank: int
    kind: str  # the exception's class name
    bases: tuple[str, ...]
    text: str
    trace: str


class Died(NamedTuple):
    """A worker that ended without an answer."""

    rank: int
    exitcode: int | None


class WorkerFailure(AssertionError):
    """A check failed, hung or died in a worker."""


@dataclasses.dataclass
class _Start:
    rank: int
    world_size: int
    port: int
    log: str
    scratch: str
    backend: str
    timeout: float
    env: dict[str, str]
    init: bool
    oracle: bool
    one_host: bool
    options: dict[str, Any]
    address: str
    namespace: str | None


def compiled_in_this_run() -> Path:
    """A cache of compiled functions for all pools: the same ones run in those of several sizes.

    conftest.py asks first: the workers of xdist, and what they start, inherit the answer.
    """
    if "FUSEDPG_TEST_COMPILED" not in os.environ:
        made = tempfile.mkdtemp(prefix="fusedpg-test-compiled-")
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        os.environ["FUSEDPG_TEST_COMPILED"] = made
    return Path(os.environ["FUSEDPG_TEST_COMPILED"])


def share_compiled(cache: Path) -> None:
    """Lets FUSEDPG_CACHE_DIR=`cache` have the run's compiled functions, but its own tuned ones."""
    (cache / "fusion").symlink_to(compiled_in_this_run())


def _connect(start: _Start) -> Context:
    store = dist.TCPStore(start.address, start.port, is_master=False)
    context = Context(
        start.rank,
        start.world_size,
        start.backend,
        store=store,
        one_host=start.one_host,
        scratch=start.scratch,
    )
    if start.init:
        options = None
        if start.options:
            import fusedpg

            options = fusedpg.Options(**start.options)
        # A short deadline is for operations: on a busy machine processes start seconds apart.
        creation = 30.0 if start.backend == "fused" else start.timeout
        dist.init_process_group(
            start.backend,
            store=store,
            rank=start.rank,
            world_size=start.world_size,
            timeout=datetime.timedelta(seconds=max(start.timeout, creation)),
            pg_options=options,
        )
        if creation > start.timeout:
            group = dist.group.WORLD
            assert group is not None
            backend: Any = group._get_backend(torch.device("cpu"))
            backend._set_default_timeout(datetime.timedelta(seconds=start.timeout))
        if start.oracle:
            context.oracle = dist.new_group(backend="gloo")
    return context


def _describe(rank: int, error: BaseException) -> RemoteError:
    bases = tuple(base.__name__ for base in type(error).__mro__)
    trace = "".join(traceback.format_exception(error))
    return RemoteError(rank, type(error).__name__, bases, str(error), trace)


def _worker(connection: Any, start: _Start) -> None:
    log = os.open(start.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # A terminal's interrupt is for the parent, which ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(start.env)
    if start.namespace is not None:
        namespaces.enter_network(start.namespace)
    torch.set_num_threads(1)
    try:
        if start.backend == "fused":
            importlib.import_module("fusedpg")
        context = _connect(start)
        connection.send(("ready", None))
    except BaseException as error:
        connection.send(("error", _describe(start.rank, error)))
        return
    while True:
        try:
            message = connection.recv()
        except EOFError:
            break
        if message is None:
            break
        function, arguments = message
        try:
            answer: tuple[str, Any] = ("result", function(context, *arguments))
        except BaseException as error:
            answer = ("error", _describe(start.rank, error))
        connection.send(answer)
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    connection.close()


class Workers:
    """One process per rank, connected by a group of the backend under test."""

    def __init__(
        self,
        world_size: int,
        *,
        timeout: float = 120.0,
        env: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
        init: bool = True,
        oracle: bool = True,
        one_host: bool = True,
        backend: str = BACKEND,
        options: Mapping[str, Any] | None = None,
        hosts: namespaces.Hosts | None = None,
        on: Sequence[int] = (),
    ) -> None:
        """`on`: each rank's host of `hosts`; the store is on host 0."""
        self.world_size = world_size
        self.broken = False
        self._scratch = tempfile.TemporaryDirectory(prefix="fusedpg-test-")
        self.scratch = Path(self._scratch.name)
        share_compiled(self.scratch)
        address = "127.0.0.1" if hosts is None else hosts.address(0)
        self.store = serve() if hosts is None else hosts.call(0, functools.partial(serve, address))
        self.processes: list[Any] = [None] * world_size
        self._connections: list[Any] = [None] * world_size
        self._starts: list[_Start] = []
        for rank in range(world_size):
            own = env if isinstance(env, Mapping) else (env[rank] if env else {})
            start = _Start(
                rank,
                world_size,
                self.store.port,
                str(self._log(rank)),
                str(self.scratch),
                backend,
                timeout,
                {"OMP_NUM_THREADS": "1", **own},
                init,
                oracle,
                one_host,
                dict(options or {}),
                address,
                None if hosts is None else hosts.namespace(on[rank]),
            )
            self._starts.append(start)
            self._spawn(rank)
        try:
            self._expect_success(self.collect(DEFAULT_TIMEOUT))
        except BaseException:
            self.close()
            raise

    def _spawn(self, rank: int) -> None:
        here, there = FORKED.Pipe()
        process = FORKED.Process(target=_worker, args=(there, self._starts[rank]), daemon=True)
        process.start()
        there.close()
        self.processes[rank] = process
        self._connections[rank] = here

    def respawn(self, ranks: Sequence[int]) -> None:
        """New processes, in no group, in the places of dead ones."""
        for rank in ranks:
            self.processes[rank].kill()
            self.processes[rank].join()
            self._connections[rank].close()
            self._spawn(rank)
        self._expect_success(self.collect(DEFAULT_TIMEOUT, ranks=ranks))
        self.broken = False

    def _log(self, rank: int) -> Path:
        return self.scratch / f"rank{rank}.log"

    def log(self, rank: int) -> str:
        """What a rank has written to its standard streams."""
        path = self._log(rank)
        return path.read_text(errors="replace") if path.exists() else ""

    def pid(self, rank: int) -> int:
        return int(self.processes[rank].pid)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal to one of our own workers."""
        os.kill(self.pid(rank), number)

    def start(
        self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None
    ) -> None:
        """Sends a function to the workers without waiting for it."""
        for rank in range(self.world_size) if ranks is None else ranks:
            self._connections[rank].send((function, args))

    def collect(
        self,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        ranks: Sequence[int] | None = None,
        grace: float | None = None,
    ) -> list[Any]:
        """Results in the order of `ranks`: values, RemoteError or Died.

        `grace` limits the wait for the rest after the first error.
        """
        order = list(range(self.world_size)) if ranks is None else list(ranks)
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(order):
            waiting = {self._connections[rank]: rank for rank in order if rank not in answers}
            left = deadline - time.monotonic()
            ready = multiprocessing.connection.wait(list(waiting), max(left, 0))
            if not ready and left <= 0:
                self._hang([rank for rank in order if rank not in answers], answers)
            for connection in ready:
                rank = waiting[connection]
                answers[rank] = self._receive(rank)
                if grace is not None and isinstance(answers[rank], RemoteError | Died):
                    deadline = min(deadline, time.monotonic() + grace)
        return [answers[rank] for rank in order]

    def _receive(self, rank: int) -> Any:
        try:
            _, value = self._connections[rank].recv()
        except (EOFError, ConnectionError):
            self.processes[rank].join(5)
            self.broken = True
            return Died(rank, self.processes[rank].exitcode)
        return value

    def _hang(self, silent: list[int], answers: Mapping[int, Any]) -> None:
        for rank in silent:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid(rank), signal.SIGUSR1)
        time.sleep(0.5)
        stacks = "\n".join(f"--- rank {rank} ---\n{self.log(rank)[-4000:]}" for rank in silent)
        errors = "\n".join(
            f"--- rank {rank} ---\n{getattr(answer, 'trace', answer)}"
            for rank, answer in answers.items()
            if isinstance(answer, RemoteError | Died)
        )
        self.close()
        raise WorkerFailure(f"no answer from ranks {silent}\n{errors}\n{stacks}")

    def _expect_success(self, answers: list[Any]) -> list[Any]:
        bad = [answer for answer in answers if isinstance(answer, RemoteError | Died)]
        if bad:
            self.broken = True
            text = "\n".join(getattr(answer, "trace", repr(answer)) for answer in bad)
            logs = "\n".join(
                f"--- log of rank {answer.rank} ---\n{self.log(answer.rank)[-2000:]}"
                for answer in bad
            )
            self.close()
            raise WorkerFailure(f"{text}\n{logs}")
        return answers

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT
    ) -> list[Any]:
        """Runs `function(context, *args)` on every rank; one result per rank."""
        self.start(function, *args)
        return self._expect_success(self.collect(timeout, grace=GRACE))

    def agree(
        self, function: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT
    ) -> Any:
        """Runs a function as `run` does; the one result that all ranks give."""
        answers = self.run(function, *args, timeout=timeout)
        assert all(answer == answers[0] for answer in answers), f"ranks differ: {answers}"
        return answers[0]

    def errors(
        self, function: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT
    ) -> list[RemoteError]:
        """Runs a function that must raise on every rank; the exceptions."""
        self.start(function, *args)
        answers = self.collect(timeout, grace=GRACE)
        calm = [rank for rank, answer in enumerate(answers) if not isinstance(answer, RemoteError)]
        if calm:
            self.close()
            raise WorkerFailure(f"ranks {calm} raised nothing: {answers}")
        return answers

    def close(self) -> None:
        """Ends all workers, the hard way if they do not listen."""
        self.broken = True
        for connection in self._connections:
            with contextlib.suppress(OSError, ValueError):
                connection.send(None)
        deadline = time.monotonic() + 5
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0))
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()
        for connection in self._connections:
            connection.close()
        self._scratch.cleanup()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_pools: dict[Any, Workers] = {}


def pool(world_size: int, **options: Any) -> Workers:
    """The shared pool of this size and these options, alive and usable."""
    key = (world_size, repr(sorted(options.items())))
    workers = _pools.pop(key, None)
    if workers is None or workers.broken:
        workers = Workers(world_size, **options)
    _pools[key] = workers  # at the end: close_pools() ends the first ones first
    return workers


class _Body:
    """The body of a test made by `on_ranks`, which is found under the test's name."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self._module, self._name = body.__module__, body.__name__

    def __call__(self, context: Context, arguments: dict[str, Any]) -> Any:
        return getattr(importlib.import_module(self._module), self._name).body(context, **arguments)


def on_ranks(*world_sizes: Any, timeout: float = DEFAULT_TIMEOUT) -> Callable[..., Any]:
    """Makes a test of what each rank does, in a pool of each of these sizes, or names of HOSTS.

    The first parameter is the rank's Context, the others are pytest's. The innermost decorator.
    What the body returns, such as a digest of its results, must be the same on all ranks.
    """
    import pytest  # a worker that only runs checks does without

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        def test(world_size: int | str, **arguments: Any) -> None:
            ranks = pool_of_hosts(world_size) if world_size in HOSTS else pool(world_size)
            ranks.agree(_Body(body), arguments, timeout=timeout)

        signature = inspect.signature(body)
        size = inspect.Parameter("world_size", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        others = list(signature.parameters.values())[1:]
        made: Any = functools.update_wrapper(test, body)
        del made.__wrapped__
        made.__signature__ = signature.replace(parameters=[size, *others])
        made.body = body
        ids = [str(getattr(n, "values", [n])[0]) for n in world_sizes]
        ids = [f"world{name}" if name.isdigit() else name for name in ids]
        return pytest.mark.parametrize("world_size", world_sizes, ids=ids)(made)

    return decorate


HOSTS = {
    "two": ["a", "b"],
    "three": ["a", "b", "c"],
    "two of two": ["a", "a", "b", "b"],
    "two and one": ["a", "a", "b"],
    "crossed": ["a", "b", "a", "b"],
    "three and one": ["a", "a", "a", "b"],
}


def pool_of_hosts(names: str, **more: str) -> Workers:
    """Ranks of this machine that take each other for those of several."""
    env = [{"FUSEDPG_HOST_ID": name, **more} for name in HOSTS[names]]
    return pool(len(env), env=env, one_host=False)


def fake_gpu(**more: str) -> dict[str, Any]:
    """Options of workers whose CPU tensors are a fake GPU's memory (tests/fake_gpu)."""
    library = os.environ.get("FUSEDPG_FAKE_GPU") or str(ROOT / "build/cmake/libfusedpg_fake_gpu.so")
    if not Path(library).exists():
        raise WorkerFailure(f"{library} is missing: run `make test-cpp` first")
    return {
        "env": {"FUSEDPG_CUDA_LIB": library, "FUSEDPG_NCCL_LIB": library, **more},
        # Small chunks, so that small tensors make many.
        "options": {"_cpu_as_cuda": True, "cuda_chunk_bytes": 1 << 14},
        "oracle": False,
    }


def close_pools(keep: int = 0) -> None:
    """Ends shared pools, the least recently used first, until at most `keep` processes are left."""
    while sum(workers.world_size for workers in _pools.values()) > keep:
        _pools.pop(next(iter(_pools))).close()


def slow(*values: Any) -> Any:
    """A parameter of tests that only `make test-all` runs: more of the same."""
    import pytest  # not in workers

    return pytest.param(*values, marks=pytest.mark.slow)


def python(*args: str) -> list[str]:
    """The command line of a fresh interpreter."""
    return [sys.executable, *args]


def tool(name: str) -> ModuleType:
    """A program of tools/, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def serve(address: str = "127.0.0.1") -> dist.TCPStore:
    """A store of this process, on whichever port is free."""
    return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False, use_libuv=True)


def environment_of(store: dist.TCPStore) -> dict[str, str]:
    """With it env:// meets in a store that is there, as workers do in that of torchrun's agent.

    A port that was free a moment ago may not be when the ranks start.
    """
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def run_ranks(
    program: str, *arguments: str, size: int = 2, **environment: str
) -> list[subprocess.CompletedProcess[str]]:
    """Interpreters of their own that end, each of them a rank by its environment."""
    store = serve()
    processes = []
    for rank in range(size):
        own = {"RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1", **environment}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", program, *arguments],
                env={**os.environ, **environment_of(store), **own},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    done = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=100)
            done.append(subprocess.CompletedProcess("", process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
    return done
