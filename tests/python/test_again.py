"""Default groups that come again at the address of an earlier one, and ranks that do not come."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import harness
from checks.faults import rejoin
from harness import Context, slow

pytestmark = pytest.mark.fused_only

SCRIPT = Path(__file__).parent / "scripts" / "again.py"


def again(layout: str, backend: str, ranks: int, rounds: int, what: str) -> dict[int, float]:
    """By rank: the seconds that destroying the group took at most."""
    done = subprocess.run(
        harness.python(str(SCRIPT), layout, backend, str(ranks), str(rounds), what),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    return {int(rank): float(seconds) for rank, seconds in lines}


@pytest.mark.parametrize("ranks", [2, slow(4)])
@pytest.mark.parametrize(
    ("what", "layout", "backend"),
    [
        ("all_reduce", "hosts", "fused"),
        ("all_reduce", "one", "gloo"),
        ("nothing", "one", "fused"),
        ("broadcast", "hosts", "fused"),
        ("subgroup", "hosts", "gloo"),
        ("kept", "one", "fused"),
        ("late", "hosts", "fused"),
    ],
)
def test_at_the_same_address(ranks: int, layout: str, backend: str, what: str) -> None:
    # c10d's store takes a second for each round: its client comes before the server.
    seconds = again(layout, backend, ranks, int(os.environ.get("ROUNDS", 3)), what)
    assert len(seconds) == ranks
    assert seconds[0] < 1  # it waits for nobody
    assert max(seconds.values()) < 2


@pytest.mark.long
@pytest.mark.parametrize("what", ["dead", "alive"])
@pytest.mark.parametrize("layout", ["hosts", "one"])
def test_destroying_alone(layout: str, what: str) -> None:
    seconds = again(layout, "fused", 3, 1, what)
    assert max(seconds.values()) < 2


def missing(context: Context, backend: str, how: str) -> str | None:
    """What a rank says when the last one does not come."""
    if backend == "gloo":
        import fusedpg

        fusedpg.serve_gloo()
    late = context.rank == context.world_size - 1
    try:
        if how == "init" and not late:
            rejoin(context, f"{backend} {how}", None, 1.5, backend)
        elif how == "new_group":
            rejoin(context, f"{backend} {how}", backend=backend)
            if not late:
                dist.new_group(timeout=datetime.timedelta(seconds=1.5))
    except RuntimeError as error:
        return str(error)
    finally:
        time.sleep(2 if late else 0)
        if dist.is_initialized():
            dist.destroy_process_group()
    return None


@pytest.mark.parametrize("how", ["init", "new_group"])
@pytest.mark.parametrize("backend", ["fused", "gloo"])
@pytest.mark.parametrize("layout", ["hosts", "one"])
def test_who_is_missing(layout: str, backend: str, how: str) -> None:
    env = [
        {"FUSEDPG_HOST_ID": f"host {rank % 2}" if layout == "hosts" else "one"} for rank in range(4)
    ]
    with harness.Workers(4, env=env, init=False) as workers:
        texts = workers.run(missing, backend, how)
        pids = [workers.pid(rank) for rank in range(4)]
    assert texts[3] is None
    for text in texts[:3]:
        assert re.search(r"1 of 4 ranks have not come: rank 3\b", text), text
        for rank in range(3):
            assert re.search(rf"rank {rank} \(host [^ ]+, pid {pids[rank]}\)", text), text


@pytest.mark.long
def test_many_are_missing() -> None:
    with harness.Workers(1, init=False) as workers:
        (text,) = workers.run(alone_of_many)
    assert "63 of 64 ranks have not come: rank 1, rank 2, " in text
    assert "rank 8 and 55 more; 1 have: rank 0 (" in text


def alone_of_many(context: Context) -> str:
    short = datetime.timedelta(seconds=1)
    with pytest.raises(RuntimeError) as raised:
        dist.init_process_group("fused", store=context.store, rank=0, world_size=64, timeout=short)
    return str(raised.value)


def test_a_key_that_is_removed_meanwhile() -> None:
    """A rank that gives up removes its key. Another one, which has just seen it, does not wait."""
    from fusedpg import _serve_gloo

    class Leaving:
        """A store in which each key is gone after the first look at it."""

        def __init__(self, store: dist.Store) -> None:
            self.store = store

        def check(self, keys: list[str]) -> bool:
            found = self.store.check(keys)
            for key in keys:
                self.store.delete_key(key)
            return bool(found)

        def __getattr__(self, name: str) -> object:
            return getattr(self.store, name)

    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=1))
    store.set("0", "cpu (host a, pid 1)")
    text = _serve_gloo._missing(Leaving(store), ["0", "1"])
    assert text == "1 of 2 ranks have not come: rank 1; 1 have: rank 0 (host a, pid 1)"
    assert _serve_gloo._read(store, "1") is None and not store.check(["1"])
