"""Launchers over two hosts, which are network namespaces."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import harness
import hosts
from test_mpi_launch import mpirun

pytestmark = [
    pytest.mark.fused_only,
    pytest.mark.timeout(180),
    pytest.mark.skipif(hosts.why_not() is not None, reason=f"no hosts: {hosts.why_not()}"),
]

SCRIPT = str(Path(__file__).resolve().parent / "scripts/launched.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture(scope="module")
def two() -> Iterator[hosts.Hosts]:
    with hosts.Hosts(2) as made:
        yield made


def outputs(processes: Sequence[subprocess.Popen[str]]) -> list[str]:
    texts = [process.communicate(timeout=120)[0] for process in processes]
    codes = [process.returncode for process in processes]
    assert not any(codes), (codes, "\n".join(texts))
    return texts


def said(texts: Sequence[str], ranks: int) -> list[dict[str, Any]]:
    """What every rank said, in the order of ranks."""
    lines = [line for text in texts for line in text.splitlines()]
    # The launchers' own lines share the pipe, too: one may follow without an end of line.
    decode = json.JSONDecoder().raw_decode
    found = [decode(x.partition("launched ")[2])[0] for x in lines if "launched {" in x]
    found.sort(key=lambda one: int(one["rank"]))
    assert [one["rank"] for one in found] == list(range(ranks)), "\n".join(texts)
    assert len({one["digest"] for one in found}) == 1
    return found


def torchrun(
    two: hosts.Hosts, ranks: Sequence[int], options: Sequence[str], *arguments: str
) -> list[dict[str, Any]]:
    processes = [
        two.start(
            host,
            [
                *TORCHRUN,
                "--nnodes=2",
                f"--nproc-per-node={count}",
                *(x.format(host=host, first=host == 0, here=two.address(host)) for x in options),
                SCRIPT,
                *arguments,
            ],
            {"OMP_NUM_THREADS": "1"},
        )
        for host, count in enumerate(ranks)
    ]
    return said(outputs(processes), sum(ranks))


STATIC = ["--node-rank={host}", "--master-addr=10.77.0.1", "--master-port=29400"]


def c10d(name: str, *more: str) -> list[str]:
    """torchrun asks for the name of its machine, which is that of all these hosts: say the rest."""
    store = "--rdzv-endpoint=10.77.0.1:29401"
    conf = "--rdzv-conf=is_host={first}"
    return ["--rdzv-backend=c10d", f"--rdzv-id={name}", store, "--local-addr={here}", conf, *more]


@functools.cache
def expected(ranks: tuple[int, ...]) -> str:
    """The weights that training without an accident ends with."""
    with hosts.Hosts(2) as made:
        return str(torchrun(made, ranks, STATIC)[0]["digest"])


@pytest.mark.long
@pytest.mark.parametrize("ranks", [(2, 1), harness.slow((1, 1))], ids=str)
def test_torchrun_static(two: hosts.Hosts, ranks: tuple[int, ...]) -> None:
    found = torchrun(two, ranks, STATIC)
    assert [one["local_world_size"] for one in found] == [r for r in ranks for _ in range(r)]
    assert {one["transport"] for one in found} == {"tcp"}
    assert {one["launcher"] for one in found} == {"torchrun"}


@pytest.mark.slow
def test_torchrun_rendezvous(two: hosts.Hosts) -> None:
    found = torchrun(two, (2, 2), c10d("plain"))
    assert {one["local_world_size"] for one in found} == {2}


@pytest.mark.slow
def test_killed_worker_is_started_again(two: hosts.Hosts, tmp_path: Path) -> None:
    """All workers start anew, go on from the checkpoint, and end with the same weights."""
    found = torchrun(
        two,
        (1, 1),
        c10d("elastic", "--max-restarts=2"),
        f"--checkpoint={tmp_path / 'saved'}",
        "--kill=1",
    )
    assert {one["began_at"] for one in found} == {5}
    assert {one["digest"] for one in found} == {expected((1, 1))}


@pytest.mark.long
def test_survivor_ends_with_the_error(two: hosts.Hosts) -> None:
    """A program that does not handle the failure ends at once, with it, and not by a signal."""
    processes = []
    for rank in range(2):
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": two.address(0),
            "MASTER_PORT": "29402",
            "OMP_NUM_THREADS": "1",
        }
        processes.append(two.start(rank, [sys.executable, SCRIPT, "--kill=1"], env))
    texts = [process.communicate(timeout=60)[0] for process in processes]
    assert processes[1].returncode == -signal.SIGKILL, texts[1]
    assert processes[0].returncode == 1, texts[0]
    assert "DistBackendError: fused: " in texts[0]
    assert "rank 1" in texts[0].split("DistBackendError: fused: ")[1]


def test_mpirun(two: hosts.Hosts, tmp_path: Path) -> None:
    """Open MPI's daemons are started by `ip netns exec` in place of ssh."""
    command = mpirun()
    if command is None:
        pytest.skip("no mpirun: pip install -r requirements/mpi.txt")
    version = subprocess.run([command, "--version"], capture_output=True, text=True).stdout
    if "Open MPI" not in version:
        pytest.skip("how to start its daemons is written for Open MPI")
    agent = tmp_path / "agent"
    agent.write_text(
        "#!/bin/sh\n"
        f"case $1 in {two.address(0)}) host=0;; *) host=1;; esac; shift\n"
        f'exec ip netns exec {two.namespace("")}$host sh -c "$*"\n'
    )
    agent.chmod(0o755)
    where = ",".join(f"{two.address(host)}:2" for host in range(2))
    process = two.start(
        0,
        [
            # Inherited by all hosts it would be one; that their networks differ is found out.
            *("env", "-u", "FUSEDPG_HOST_ID"),
            *(command, "--allow-run-as-root", "--host", where, "-n", "4"),
            *("--prtemca", "plm_ssh_agent", str(agent)),
            *("--prtemca", "prte_if_include", "eth0"),
            *("-x", f"MASTER_ADDR={two.address(0)}", "-x", "GLOO_SOCKET_IFNAME=eth0"),
            *("-x", "OMP_NUM_THREADS=1"),
            *(sys.executable, SCRIPT),
        ],
        {"PATH": os.environ["PATH"]},
    )
    found = said(outputs([process]), 4)
    assert {one["launcher"] for one in found} == {"openmpi"}
    assert {one["local_world_size"] for one in found} == {2}


@pytest.mark.long
def test_slurm_variables(two: hosts.Hosts) -> None:
    """What `srun -N 2 -n 3` sets; nobody knows the nodes' names here, so the address is given."""
    processes = []
    for rank, (host, local) in enumerate([(0, 0), (0, 1), (1, 0)]):
        env = {
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": "3",
            "SLURM_LOCALID": str(local),
            "SLURM_NODEID": str(host),
            "SLURM_STEP_NUM_TASKS": "3",
            "SLURM_STEP_TASKS_PER_NODE": "2,1",
            "SLURM_STEP_NODELIST": "node[1-2]",
            "SLURM_JOB_ID": "77",
            "MASTER_ADDR": two.address(0),
            "OMP_NUM_THREADS": "1",
        }
        processes.append(two.start(host, [sys.executable, SCRIPT], env))
    found = said(outputs(processes), 3)
    assert {one["launcher"] for one in found} == {"slurm"}
    assert [one["local_world_size"] for one in found] == [2, 2, 1]
