"""Starts jobs: ``fusedpg-run`` on the command line, `run` from Python."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["run"]


def run(
    func: Callable[..., object],
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[float, float] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    elastic_timeout: float = 600,
    start_timeout: float = 30,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    network_interface: str | None = None,
    output_filename: str | None = None,
    verbose: bool = False,
    executable: str | None = None,
    env: Mapping[str, str] | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
) -> list[Any]:
    """Runs a function on several ranks and returns what each returned, by rank.

    Args:
        func: a function that pickle, or cloudpickle where it is installed, can send.
        args: its arguments, alike on all ranks.
        kwargs: its keyword arguments.
        num_proc: number of ranks; `np` is another name.
        min_num_proc: makes the job elastic, as `--min-np` does.
        max_num_proc: most ranks of an elastic job.
        slots: slots of hosts that the discovery script prints without a number.
        reset_limit: changes of an elastic job's ranks before it ends.
        cooldown_range: seconds until the slot of a failed rank is used again.
        hosts: "a:2,b:2"; by default this machine has all ranks.
        hostfile: a file with them.
        host_discovery_script: a program that prints them; makes the job elastic.
        elastic_timeout: seconds that a change of ranks may take.
        start_timeout: seconds until every host must have answered.
        ssh_port: of the hosts.
        ssh_identity_file: a private key.
        network_interface: the interface to use; several with commas between.
        output_filename: a folder for the ranks' output, beside the terminal.
        verbose: say what the launcher does.
        executable: Python of the workers, by default this one.
        env: environment variables of the workers; by default those of this process.
        use_gloo: has no meaning here.
        use_mpi: must not be true, as there is no MPI.

    Returns:
        One value a rank, of the last generation if the job is elastic.

    Raises:
        RuntimeError: a rank failed. Its traceback is on standard error.
        ValueError: the arguments do not fit together.

    Example:
        >>> import fusedpg.hvd as hvd
        >>> hvd.run(pow, (2, 5), num_proc=2)
        [32, 32]
    """
    from fusedpg.hvd.run import task
    from fusedpg.hvd.run.driver import Driver
    from fusedpg.hvd.run.hosts import parse_hostfile, parse_hosts
    from fusedpg.hvd.run.options import Settings

    if use_mpi:
        raise ValueError("use_mpi: fusedpg has no MPI")
    if hosts is not None and hostfile is not None:
        raise ValueError("either hosts or hostfile, not both")
    named = parse_hosts(hosts) if hosts else parse_hostfile(hostfile) if hostfile else None
    settings = Settings(
        num_proc=num_proc if np is None else np,
        command=[executable or sys.executable, "-m", "fusedpg.hvd.run.task"],
        min_num_proc=min_num_proc,
        max_num_proc=max_num_proc,
        hosts=named,
        discovery_script=host_discovery_script,
        slots=slots,
        elastic_timeout=elastic_timeout,
        reset_limit=reset_limit,
        cooldown=cooldown_range,
        start_timeout=start_timeout,
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        interfaces=network_interface.split(",") if network_interface else (),
        output_filename=output_filename,
        verbose=verbose,
    )
    environ = os.environ if env is None else env
    packed = task.pack(func, args, dict(kwargs or {}))
    results = Driver(settings, environ, packed).run()
    return [pickle.loads(results[rank]) for rank in sorted(results)]
