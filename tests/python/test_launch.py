"""fusedpg.launch: the variables of each launcher, and what is derived from them."""

from __future__ import annotations

import os

import pytest

from fusedpg.launch import LaunchEnvironment, init_from_environment

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-4242@1",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "4,3",
    "SLURM_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "991",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}


def read(env: dict[str, str]) -> LaunchEnvironment:
    result = init_from_environment(env)
    assert result is not None
    return result


def test_no_launcher_changes_nothing() -> None:
    env = {"PATH": "bin"}
    assert init_from_environment(env) is None
    assert env == {"PATH": "bin"}


def test_torchrun_wins_and_is_left_alone() -> None:
    env = {**OPENMPI, **SLURM, **TORCHRUN}
    before = dict(env)
    result = read(env)
    assert env == before
    assert result == LaunchEnvironment(1, 4, 1, 2, "head", 29500, "torchrun")


def test_torchrun_incomplete() -> None:
    with pytest.raises(RuntimeError, match="WORLD_SIZE is not set"):
        init_from_environment({"RANK": "0"})


@pytest.mark.parametrize(
    ("env", "launcher", "place"),
    [(OPENMPI, "openmpi", (1, 2, 1, 2)), (HYDRA, "hydra", (3, 4, 3, 4))],
)
def test_mpi_on_one_machine(
    env: dict[str, str], launcher: str, place: tuple[int, int, int, int]
) -> None:
    env = dict(env)
    result = read(env)
    assert result.launcher == launcher
    assert (
        result.rank,
        result.world_size,
        result.local_rank,
        result.local_world_size,
    ) == place
    assert result.master_addr == "127.0.0.1"
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert tuple(int(env[name]) for name in names) == place
    assert env["MASTER_ADDR"] == "127.0.0.1"
    assert env["MASTER_PORT"] == str(result.master_port)


@pytest.mark.parametrize("base", [OPENMPI, HYDRA])
def test_mpi_over_machines_needs_an_address(base: dict[str, str]) -> None:
    size = "OMPI_COMM_WORLD_SIZE" if base is OPENMPI else "PMI_SIZE"
    env = {**base, size: "8"}
    before = dict(env)
    with pytest.raises(RuntimeError, match="-x MASTER_ADDR"):
        init_from_environment(env)
    assert env == before, "a failure must not leave half a configuration"
    env["MASTER_ADDR"] = "head"
    assert read(env).master_addr == "head"


def test_hydra_without_local_ranks_is_not_guessed() -> None:
    with pytest.raises(RuntimeError, match="MPI_LOCALRANKID is not set"):
        init_from_environment({"PMI_RANK": "0", "PMI_SIZE": "2"})


def test_slurm() -> None:
    result = read(dict(SLURM))
    assert (result.rank, result.world_size) == (5, 7)
    assert (result.local_rank, result.local_world_size) == (1, 3)
    assert (result.master_addr, result.launcher) == ("gpu07", "slurm")


def test_slurm_step_is_the_world() -> None:
    env = {
        **SLURM,
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "8",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "gpu08,cpu1",
    }
    result = read(env)
    assert (result.world_size, result.local_world_size) == (2, 1)
    assert result.master_addr == "gpu08"


def test_slurm_on_one_node_without_a_layout() -> None:
    env = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}
    result = read(env)
    assert (result.local_world_size, result.master_addr) == (2, "127.0.0.1")


def test_slurm_ntasks_per_node() -> None:
    env = {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NODELIST": "a1,a2",
    }
    result = read(env)
    assert (result.local_world_size, result.master_addr) == (2, "a1")


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[03-05,9],login", "gpu03"),
        ("rack[1-2]n[08-10]", "rack1n08"),
        ("a[7],b[1-2]", "a7"),
        ("cn[12,20-22].site", "cn12.site"),
    ],
)
def test_slurm_host_lists(nodelist: str, first: str) -> None:
    assert read({**SLURM, "SLURM_NODELIST": nodelist}).master_addr == first


@pytest.mark.parametrize("nodelist", ["gpu[", "[x-y]", ","])
def test_slurm_host_list_that_cannot_be_read(nodelist: str) -> None:
    with pytest.raises(RuntimeError, match="cannot read the node list"):
        init_from_environment({**SLURM, "SLURM_NODELIST": nodelist})


def test_hydra_inside_slurm_is_hydra() -> None:
    assert read({**SLURM, **HYDRA}).launcher == "hydra"


def test_srun_with_pmi2_is_slurm() -> None:
    assert read({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "7"}).launcher == "slurm"


def test_port_is_the_same_on_all_ranks_and_differs_between_jobs() -> None:
    def port(**changes: str) -> int:
        return read({**OPENMPI, **changes}).master_port

    assert port(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_LOCAL_RANK="0") == port()
    ports = {port(PMIX_NAMESPACE=f"prterun-host-{i}@1") for i in range(50)}
    assert len(ports) > 40
    assert all(20000 <= p < 32768 for p in ports)
    steps = {read({**SLURM, "SLURM_STEP_ID": str(i)}).master_port for i in range(4)}
    assert len(steps) == 4


def test_given_port_is_kept() -> None:
    assert read({**OPENMPI, "MASTER_PORT": "12345"}).master_port == 12345


@pytest.mark.parametrize(
    "change",
    [
        {"OMPI_COMM_WORLD_RANK": "2"},
        {"OMPI_COMM_WORLD_RANK": "-1"},
        {"OMPI_COMM_WORLD_SIZE": "0"},
        {"OMPI_COMM_WORLD_LOCAL_RANK": "2"},
        {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"},
    ],
)
def test_impossible_places(change: dict[str, str]) -> None:
    with pytest.raises(RuntimeError, match="impossible place"):
        init_from_environment({**OPENMPI, **change})


def test_local_size_that_open_mpi_counts_wrongly() -> None:
    """`mpirun --host a:2,b:2 -n 3` of 5.0.11: of two ranks on `a` each is told that it is alone."""
    env = {**OPENMPI, "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    before = dict(env)
    with pytest.raises(RuntimeError) as caught:
        init_from_environment(env)
    for said in ("rank 1 of 3", "LOCAL_RANK=1", "LOCAL_SIZE=1", "slots", "--host a:2,b:1 -n 3"):
        assert said in str(caught.value)
    assert env == before


def test_text_where_a_number_belongs() -> None:
    with pytest.raises(RuntimeError, match="is not a number"):
        init_from_environment({**OPENMPI, "OMPI_COMM_WORLD_SIZE": "two"})


def test_default_is_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set first, so that monkeypatch removes what the call writes as well.
    for name in TORCHRUN:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in OPENMPI.items():
        monkeypatch.setenv(name, value)
    assert init_from_environment() is not None
    assert os.environ["RANK"] == "1"
    for name in TORCHRUN:
        monkeypatch.delenv(name)
