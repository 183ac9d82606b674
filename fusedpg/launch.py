"""Read the rank of this process from the launcher that started it.

``torchrun`` hands a process its place in the job through ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, and ``init_process_group`` reads these.
Open MPI, MPICH (Hydra) and Slurm use names of their own; `init_from_environment` translates them,
so that one script runs under all four.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

__all__ = ["LaunchEnvironment", "init_from_environment"]

# Below Linux's ephemeral ports (32768 and up), which any outgoing connection may occupy.
_FIRST_PORT = 20000
_NUM_PORTS = 12000


@dataclass(frozen=True)
class LaunchEnvironment:
    """Place of this process in its job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    launcher: str  # "torchrun" (or anything that sets RANK), "openmpi", "hydra", "slurm"


def init_from_environment(
    environ: MutableMapping[str, str] | None = None,
) -> LaunchEnvironment | None:
    """Fill torchrun's variables from those of Open MPI, MPICH/Hydra or Slurm.

    Where ``RANK`` is set already nothing is changed. ``MASTER_ADDR`` and ``MASTER_PORT`` are kept
    where given; the defaults are the first Slurm node, or 127.0.0.1 when all ranks are on one
    machine, and a port derived from the job's id, the same on every rank.

    Returns:
        The place of this process, or None when no launcher started it (nothing is changed then).

    Raises:
        RuntimeError: the job spans machines and nothing says where rank 0 is, or the launcher's
            variables are incomplete.
    """
    env = os.environ if environ is None else environ
    if "RANK" in env:
        return _from_torchrun(env)
    result = _detect(env)
    if result is None:
        return None
    env.update(
        RANK=str(result.rank),
        WORLD_SIZE=str(result.world_size),
        LOCAL_RANK=str(result.local_rank),
        LOCAL_WORLD_SIZE=str(result.local_world_size),
        MASTER_ADDR=result.master_addr,
        MASTER_PORT=str(result.master_port),
    )
    return result


def _from_torchrun(env: Mapping[str, str]) -> LaunchEnvironment:
    rank = _require(env, "RANK", "torchrun")
    world_size = _require(env, "WORLD_SIZE", "torchrun")
    return LaunchEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=int(env.get("LOCAL_RANK", rank)),
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", world_size)),
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_require(env, "MASTER_PORT", "torchrun"),
        launcher="torchrun",
    )


def _detect(env: Mapping[str, str]) -> LaunchEnvironment | None:
    if "OMPI_COMM_WORLD_RANK" in env:
        return _from_openmpi(env)
    # Inside an allocation Hydra starts its proxies with srun, whose SLURM_PROCID counts proxies;
    # and srun --mpi=pmi2 sets PMI_RANK too. Only Hydra sets the local rank.
    if "PMI_RANK" in env and ("MPI_LOCALRANKID" in env or "SLURM_PROCID" not in env):
        return _from_hydra(env)
    if "SLURM_PROCID" in env:
        return _from_slurm(env)
    return None


def _from_openmpi(env: Mapping[str, str]) -> LaunchEnvironment:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    numbers = [_require(env, f"OMPI_COMM_WORLD_{name}", "Open MPI") for name in names]
    rank, world_size, local_rank, local_world_size = numbers
    if 0 < local_world_size <= local_rank < world_size:
        # Seen of 5.0.11 with `--host a:2,b:2 -n 3`: a size of 1 on every rank.
        raise RuntimeError(
            f"openmpi: impossible place in the job: rank {rank} of {world_size} has "
            f"OMPI_COMM_WORLD_LOCAL_RANK={local_rank} and OMPI_COMM_WORLD_LOCAL_SIZE="
            f"{local_world_size}. Open MPI 5 counts wrongly where `--host` has more slots than "
            "the job has ranks: give each host as many slots as ranks (`--host a:2,b:1 -n 3`)"
        )
    job_id = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or _batch_id(env)
    return _placed(env, "openmpi", *numbers, job_id=job_id)


def _from_hydra(env: Mapping[str, str]) -> LaunchEnvironment:
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    numbers = [_require(env, name, "MPICH") for name in names]
    return _placed(env, "hydra", *numbers, job_id=_batch_id(env))


def _from_slurm(env: Mapping[str, str]) -> LaunchEnvironment:
    # The step's own values come first: `srun -n 2` inside a job of 8 tasks is a world of 2.
    world_size = _require(env, _first_set(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "Slurm")
    nodes_name = _first_set(
        env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST", required=False
    )
    return _placed(
        env,
        "slurm",
        _require(env, "SLURM_PROCID", "Slurm"),
        world_size,
        _require(env, "SLURM_LOCALID", "Slurm"),
        _slurm_local_size(env, world_size),
        job_id=f"{_batch_id(env)}.{env.get('SLURM_STEP_ID', '0')}",
        first_host=_first_slurm_host(env[nodes_name]) if nodes_name in env else None,
    )


def _placed(
    env: Mapping[str, str],
    launcher: str,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    *,
    job_id: str,
    first_host: str | None = None,
) -> LaunchEnvironment:
    """The launcher's environment, with the meeting point that it leaves out."""
    ok = 0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size
    if not ok:
        raise RuntimeError(
            f"{launcher}: impossible place in the job: rank {rank} of {world_size}, local rank "
            f"{local_rank} of {local_world_size}"
        )
    on_one_machine = local_world_size == world_size
    master_addr = env.get("MASTER_ADDR") or ("127.0.0.1" if on_one_machine else first_host)
    if not master_addr:
        raise RuntimeError(
            f"{launcher}: the job spans machines ({local_world_size} of {world_size} ranks are "
            "here) and MASTER_ADDR is not set; name rank 0's machine, as "
            "`mpirun -x MASTER_ADDR=<host>` (MPICH: `-genv MASTER_ADDR <host>`)"
        )
    # The same on every rank.
    port = env.get("MASTER_PORT") or _FIRST_PORT + zlib.crc32(job_id.encode()) % _NUM_PORTS
    return LaunchEnvironment(
        rank, world_size, local_rank, local_world_size, master_addr, int(port), launcher
    )


def _slurm_local_size(env: Mapping[str, str], world_size: int) -> int:
    layout = _first_set(env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", required=False)
    if layout in env:
        counts = _expand_counts(env[layout])
        node = int(env.get("SLURM_NODEID", "0"))
        if node < len(counts):
            return counts[node]
    num_nodes = _first_set(
        env, "SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", required=False
    )
    if env.get(num_nodes, "1") == "1":
        return world_size
    return _require(env, "SLURM_NTASKS_PER_NODE", "Slurm")


def _batch_id(env: Mapping[str, str]) -> str:
    """An id that all ranks share; two jobs of one user with no batch system share it as well."""
    for name in ("SLURM_JOB_ID", "SLURM_JOBID", "PBS_JOBID", "LSB_JOBID", "JOB_ID"):
        if env.get(name):
            return env[name]
    return f"uid-{os.getuid()}"


def _first_slurm_host(nodelist: str) -> str:
    """First name of a Slurm host list: ``gpu[03-05,9],login`` -> ``gpu03``."""
    # A bracket group is a comma-separated list of numbers and ranges; only its first one counts.
    host, groups = re.subn(r"\[(\d+)[^\]]*\]", r"\1", nodelist)
    first = (host if groups else nodelist).split(",", 1)[0].strip()
    if not first or "[" in first or "]" in first:
        raise RuntimeError(f"Slurm: cannot read the node list {nodelist!r}; set MASTER_ADDR")
    return first


def _expand_counts(layout: str) -> list[int]:
    """Slurm's tasks per node: ``2(x3),1`` -> ``[2, 2, 2, 1]``."""
    counts: list[int] = []
    for part in layout.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise RuntimeError(f"Slurm: cannot read the tasks per node {layout!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _first_set(env: Mapping[str, str], *names: str, required: bool = True) -> str:
    for name in names:
        if env.get(name):
            return name
    if required:
        raise RuntimeError(f"Slurm: none of {', '.join(names)} is set")
    return names[-1]


def _require(env: Mapping[str, str], name: str, launcher: str) -> int:
    text = env.get(name)
    if text is None:
        raise RuntimeError(f"started by {launcher}, but {name} is not set")
    try:
        return int(text)
    except ValueError:
        raise RuntimeError(f"{launcher}: {name}={text!r} is not a number") from None
