"""Forked children: what they can do, and what they must not keep of their parents."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import harness
from harness import Context

pytestmark = pytest.mark.fused_only

SCRIPT = Path(__file__).parent / "scripts" / "forks.py"
ENVIRONMENT = {"one": {}, "hosts": [{"FUSEDPG_HOST_ID": f"host {rank}"} for rank in range(2)]}


def futures_in_children(context: Context, backend: str) -> None:
    """The parent has used a future a moment before."""
    if backend == "gloo":
        import fusedpg

        fusedpg.serve_gloo()
    first = dist.PrefixStore(backend, context.store)
    dist.init_process_group(backend, store=first, rank=context.rank, world_size=2)
    dist.all_reduce(torch.ones(1000), async_op=True).get_future().wait()
    begun = dist.irecv(x := torch.zeros(1000), 1 - context.rank)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            for wait in (begun.wait, lambda: begun.get_future().wait(), lambda: dist.barrier()):
                with pytest.raises((RuntimeError, ValueError), match="forked"):
                    wait()
            dist.destroy_process_group()
            again = dist.FileStore(f"{context.scratch}/{backend}", 2)
            dist.init_process_group(backend, store=again, rank=context.rank, world_size=2)
            future = dist.all_reduce(y := torch.ones(1000), async_op=True).get_future()
            assert future.wait()[0][0] == 2 and y[0] == 2
            dist.destroy_process_group()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        os._exit(1)
    sent = dist.isend(torch.ones(1000), 1 - context.rank)
    begun.wait()
    sent.wait()
    assert x[0] == 1
    assert os.waitpid(child, 0)[1] == 0
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["fused", "gloo"])
@pytest.mark.parametrize("layout", ["hosts", "one"])
def test_futures_in_a_child(layout: str, backend: str) -> None:
    with harness.Workers(2, init=False, oracle=False, env=ENVIRONMENT[layout]) as workers:
        workers.run(futures_in_children, backend)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["fused", "gloo"])
@pytest.mark.parametrize("layout", ["hosts", "one"])
def test_forks_at_random_moments(layout: str, backend: str) -> None:
    seed = int(os.environ.get("SEED", random.randrange(1 << 30)))
    count = int(os.environ.get("FORKS", 3))
    print(f"SEED={seed}")
    done = subprocess.run(
        harness.python(str(SCRIPT), layout, backend, str(count), str(seed)),
        capture_output=True,
        text=True,
        timeout=120 + 40 * count,
    )
    assert done.returncode == 0, f"seed {seed}\n{done.stderr[-6000:]}"


def begin_child(context: Context, how: str) -> int:
    """Leaves a child that lives on; its pid."""
    dist.all_reduce(torch.ones(100_000))
    peer = 1 - context.rank
    work = dist.isend(torch.ones(10), peer)
    dist.recv(torch.ones(10), peer)
    work.wait()
    if how == "loader":
        import multiprocessing

        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        data = TensorDataset(torch.arange(8.0))
        loader: Any = DataLoader(
            data, 2, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
        )
        context.oracle = loader, iter(loader)  # kept
        return int(loader._iterator._workers[0].pid)
    if how == "exec":
        program = "import time; print(flush=True); time.sleep(30)"
        started = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert started.stdout is not None
        started.stdout.readline()
        return started.pid
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    return child


def until_death(context: Context, what: str) -> str:
    """What an operation raises when the other rank is gone."""
    try:
        if what == "recv":
            dist.recv(torch.ones(10), 1 - context.rank)
        else:
            dist.all_reduce(torch.ones(10))
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nothing was noticed")


@pytest.mark.parametrize("how", ["loader", "fork", "exec"])
@pytest.mark.parametrize("what", ["all_reduce", "recv"])
@pytest.mark.parametrize("layout", ["hosts", "one"])
def test_a_child_does_not_hide_a_death(layout: str, what: str, how: str) -> None:
    with harness.Workers(2, oracle=False, env=ENVIRONMENT[layout]) as workers:
        children = workers.run(begin_child, how)
        try:
            workers.start(until_death, what, ranks=[0])
            time.sleep(0.2)
            workers.signal(1, signal.SIGKILL)
            killed = time.monotonic()
            (text,) = workers.collect(ranks=[0])
            seconds = time.monotonic() - killed
            os.kill(children[1], 0)  # it lives, and has the pipe to the test, too
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
    assert seconds < 2, text
    assert "rank 1" in text
