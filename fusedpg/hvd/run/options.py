"""fusedpg-run's flags, which are horovodrun's, and its configuration file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fusedpg.hvd.run import hosts
from fusedpg.hvd.served import python_path

__all__ = ["Settings", "parse"]

DESCRIPTION = """\
Runs a program on several ranks, with horovodrun's flags:

  fusedpg-run -np 4 python train.py
  fusedpg-run -np 4 -H a:2,b:2 python train.py
  fusedpg-run -np 4 --min-np 2 --host-discovery-script ./hosts.sh python train.py
"""


def _flag(value: object) -> str:
    return "1" if value else "0"


def _not_negative(kind: Callable[..., float]) -> Callable[[object], str]:
    def convert(value: object) -> str:
        number = kind(value)
        if number < 0:
            raise ValueError(f"must be >= 0, not {value}")
        return str(number)

    return convert


def _mebibytes(value: object) -> str:
    return str(int(float(_not_negative(float)(value)) * (1 << 20)))


def _share(value: str | float) -> str:
    if not 0 <= float(value) <= 1:
        raise ValueError(f"must be from 0 to 1, not {value}")
    return str(float(value))


def _level(value: object) -> str:
    levels = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
    if str(value).upper() not in levels:
        raise ValueError(f"must be one of {', '.join(levels)}, not {value}")
    return str(value).upper()


@dataclass(frozen=True)
class Tunable:
    """An environment variable of the workers with the flag and the key of the file that set it."""

    flag: str
    variable: str
    key: str  # section and name in the configuration file
    convert: Callable[..., str]  # the flag's or the file's value to the variable's
    help: str
    switch: bool = False  # --flag and --no-flag
    inverted: str = ""  # a key of the file that means the opposite

    @property
    def name(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")


_count, _time = _not_negative(int), _not_negative(float)
# fmt: off
TUNABLES = (
    Tunable("--fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD", "params.fusion_threshold_mb",
            _mebibytes, "MiB that are reduced in one call (default: 128)"),
    Tunable("--cycle-time-ms", "HOROVOD_CYCLE_TIME", "params.cycle_time_ms", _time,
            "ms between two looks at what is ready (default: 1)"),
    Tunable("--cache-capacity", "HOROVOD_CACHE_CAPACITY", "params.cache_capacity", _count,
            "requests that are remembered (default: 1024)"),
    Tunable("--autotune", "HOROVOD_AUTOTUNE", "autotune.enabled", _flag,
            "search for the best fusion threshold and cycle time", switch=True),
    Tunable("--autotune-log-file", "HOROVOD_AUTOTUNE_LOG", "autotune.log_file", str,
            "a line for each point that was tried; the last one has the best"),
    Tunable("--autotune-warmup-samples", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
            "autotune.warmup_samples", _count, "points to drop before the search (default: 3)"),
    Tunable("--autotune-steps-per-sample", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE",
            "autotune.steps_per_sample", _count, "cycles in a sample (default: 10)"),
    Tunable("--autotune-bayes-opt-max-samples", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
            "autotune.bayes_opt_max_samples", _count, "points to try (default: 20)"),
    Tunable("--autotune-gaussian-process-noise", "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE",
            "autotune.gaussian_process_noise", _share,
            "noise of the scores, from 0 to 1 (default: 0.8)"),
    Tunable("--timeline-filename", "HOROVOD_TIMELINE", "timeline.filename", str,
            "rank 0 writes a Chrome trace of the operations there"),
    Tunable("--timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", "timeline.mark_cycles", _flag,
            "mark cycles in the timeline", switch=True),
    Tunable("--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE", "", _flag,
            "no warnings about operations that some ranks lack", switch=True,
            inverted="stall_check.enabled"),
    Tunable("--stall-check-warning-time-seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS",
            "stall_check.warning_time_seconds", _count,
            "seconds before such a warning (default: 60)"),
    Tunable("--stall-check-shutdown-time-seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
            "stall_check.shutdown_time_seconds", _count,
            "seconds before the job ends because of it (default: 1800)"),
    Tunable("--gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS",
            "library_options.gloo_timeout_seconds", _count,
            "seconds that an operation may take, on any backend"),
    Tunable("--log-level", "HOROVOD_LOG_LEVEL", "logging.level", _level,
            "the least important messages to show"),
)
# Flags of horovodrun that choose between things of which fusedpg has one, by number of values.
WITHOUT_MEANING = {
    "--gloo": 0, "--mpi": 0, "--jsrun": 0, "--tcp": 0, "--disable-cache": 0,
    "--mpi-args": 1, "--binding-args": 1, "--num-nccl-streams": 1, "--thread-affinity": 1,
    "--mpi-threads-disable": 0, "--no-mpi-threads-disable": 0,
    "--hierarchical-allreduce": 0, "--no-hierarchical-allreduce": 0,
    "--hierarchical-allgather": 0, "--no-hierarchical-allgather": 0,
    "--torus-allreduce": 0, "--no-torus-allreduce": 0,
    "--log-with-timestamp": 0, "--log-without-timestamp": 0,
}
KEYS_WITHOUT_MEANING = {
    "controller", "params.hierarchical_allreduce", "params.hierarchical_allgather",
    "params.torus_allreduce", "library_options.mpi_threads_disable",
    "library_options.num_nccl_streams", "library_options.thread_affinity",
    "logging.with_timestamp", "logging.hide_timestamp",
}
# fmt: on


@dataclass
class Settings:
    """A job to run."""

    num_proc: int
    command: Sequence[str] = ()
    min_num_proc: int | None = None
    max_num_proc: int | None = None
    hosts: dict[str, int] | None = None
    discovery_script: str | None = None
    slots: int | None = None
    elastic_timeout: float = 600.0
    reset_limit: int | None = None
    cooldown: tuple[float, float] | None = None
    start_timeout: float = 30.0
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    interfaces: Sequence[str] = ()
    output_filename: str | None = None
    timestamps: bool = False
    verbose: bool = False
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of the workers, beside those of this process."""

    def __post_init__(self) -> None:
        if self.num_proc < 1:
            raise ValueError(f"-np must be >= 1, not {self.num_proc}")
        least, most = self.least, self.max_num_proc
        if not 1 <= least <= self.num_proc or (most is not None and most < self.num_proc):
            raise ValueError(
                f"1 <= --min-np <= -np <= --max-np does not hold: {least}, {self.num_proc}, {most}"
            )
        if self.hosts is not None and self.discovery_script is not None:
            raise ValueError("either hosts or a discovery script, not both")
        if self.max_num_proc is not None and not self.elastic:
            raise ValueError("--max-np needs --min-np or --host-discovery-script")
        if self.cooldown is not None and not 0 <= self.cooldown[0] <= self.cooldown[1]:
            raise ValueError("--blacklist-cooldown-range: the first number must be the smaller one")

    @property
    def elastic(self) -> bool:
        return self.min_num_proc is not None or self.discovery_script is not None

    @property
    def least(self) -> int:
        return self.num_proc if self.min_num_proc is None else self.min_num_proc


def _ignored(flag: str) -> str:
    return f"ignored_{flag.strip('-').replace('-', '_')}"


def parser() -> argparse.ArgumentParser:
    from fusedpg import __version__

    result = argparse.ArgumentParser(
        prog="fusedpg-run",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    add("-v", "--version", action="version", version=__version__)
    add("-cb", "--check-build", action="store_true", help="show what is there, and end")
    add("-np", "--num-proc", type=int, help="number of ranks; elastic: before the job begins")
    add("--start-timeout", type=float, help="seconds until every host must answer (default: 30)")
    for flag in ("--network-interfaces", "--network-interface"):
        add(flag, action="append", dest="interfaces", help="interfaces to use, with commas between")
    add(
        "--serve-horovod",
        action="store_true",
        help="`import horovod` in the program is fusedpg.hvd; it may be a Python script",
    )
    add("--output-filename", help="folder for <folder>/rank.<rank>/stdout and stderr")
    add(
        *("-prefix-timestamp", "--prefix-output-with-timestamp"),
        action="store_true",
        dest="timestamps",
        help="the time before each line of output",
    )
    add("--verbose", action="store_true", help="say what the launcher does")
    add("--config-file", help="YAML file; flags and environment variables come before it")
    group = result.add_argument_group("hosts")
    add = group.add_mutually_exclusive_group().add_argument
    add("-H", "--hosts", help="host1:2,host2:4, that is names and slots (default: localhost)")
    add("-hostfile", "--hostfile", help="file of lines `host1 slots=2`")
    add("--host-discovery-script", help="program that prints the hosts, a line each; elastic")
    group.add_argument("-p", "--ssh-port", type=int)
    group.add_argument("-i", "--ssh-identity-file")
    add = result.add_argument_group("elastic jobs").add_argument
    add("--min-np", "--min-num-proc", type=int, dest="min_num_proc", help="fewest ranks to go on")
    add("--max-np", "--max-num-proc", type=int, dest="max_num_proc", help="most ranks")
    add("--slots-per-host", type=int, dest="slots", help="where the script prints no number")
    add("--elastic-timeout", type=float, help="seconds for a change of ranks (default: 600)")
    add("--reset-limit", type=int, help="changes of ranks before the job ends (default: no limit)")
    add(
        "--blacklist-cooldown-range",
        type=float,
        nargs=2,
        dest="cooldown",
        metavar=("MIN", "MAX"),
        help="seconds until the slot of a rank that failed is used again; doubles each time up to "
        "MAX (default: never again)",
    )
    add = result.add_argument_group("tunable parameters").add_argument
    for tunable in TUNABLES:
        text = f"{tunable.help} [{tunable.variable}]"
        if tunable.switch:
            opposite = tunable.flag.replace("--", "--no-").replace("--no-no-", "--")
            add(tunable.flag, action="store_const", const=True, help=text, dest=tunable.name)
            add(opposite, action="store_const", const=False, dest=tunable.name, help="the opposite")
        else:
            add(tunable.flag, help=text)
    add = result.add_argument_group("accepted and without a meaning here").add_argument
    for flag, values in WITHOUT_MEANING.items():
        name = _ignored(flag)
        if values:
            add(flag, dest=name, help=argparse.SUPPRESS)
        else:
            add(flag, dest=name, action="store_true", default=None, help=argparse.SUPPRESS)
    result.add_argument("command", nargs=argparse.REMAINDER, help="program and its arguments")
    return result


def read_config(path: str | Path) -> dict[str, object]:
    """Values by `section.name`.

    Raises:
        ValueError: the file is not YAML of that shape, or has a key that nobody reads.
        ImportError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise ImportError("--config-file needs PyYAML: pip install pyyaml") from error
    try:
        content = yaml.safe_load(Path(path).read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected sections with names and values")
    values: dict[str, object] = {}
    for section, body in content.items():
        if isinstance(body, dict):
            values.update({f"{section}.{name}": value for name, value in body.items()})
        else:
            values[str(section)] = body
    known = {key for tunable in TUNABLES for key in (tunable.key, tunable.inverted) if key}
    unknown = sorted(values.keys() - known - KEYS_WITHOUT_MEANING)
    if unknown:
        raise ValueError(f"{path}: unknown keys: {', '.join(unknown)}")
    return values


def _variables(
    args: argparse.Namespace, config: Mapping[str, object], environ: Mapping[str, str]
) -> dict[str, str]:
    """Flags come before environment variables, and these before the file."""
    result = {}
    for tunable in TUNABLES:
        value, source = getattr(args, tunable.name), tunable.flag
        if value is None and tunable.variable in environ:
            continue
        if value is None and tunable.inverted in config:
            value, source = not config[tunable.inverted], tunable.inverted
        elif value is None and tunable.key in config:
            value, source = config[tunable.key], tunable.key
        if value is not None:
            try:
                result[tunable.variable] = tunable.convert(value)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{source}: {error}") from None
    return result


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> Settings | None:
    """The job that a command line asks for; None: it asks for `--check-build`.

    Prints usage and exits where the arguments are wrong.
    """
    command_line = parser()
    args = command_line.parse_args(arguments)
    if args.check_build:
        return None
    try:
        return _settings(args, environ)
    except (ValueError, OSError, ImportError) as error:
        command_line.error(str(error))


def _settings(args: argparse.Namespace, environ: Mapping[str, str]) -> Settings:
    if args.num_proc is None:
        raise ValueError("-np is missing")
    if not args.command:
        raise ValueError("no program to run")
    config = read_config(args.config_file) if args.config_file else {}
    ignored = [flag for flag in WITHOUT_MEANING if getattr(args, _ignored(flag)) is not None]
    ignored += sorted(KEYS_WITHOUT_MEANING & config.keys())
    for name in ignored:
        print(f"fusedpg-run: {name} has no meaning here", file=sys.stderr)
    named = None
    if args.hosts:
        named = hosts.parse_hosts(args.hosts)
    elif args.hostfile:
        named = hosts.parse_hostfile(args.hostfile)

    def seconds(value: float | None, variable: str, default: float) -> float:
        return float(environ.get(variable) or default) if value is None else value

    interfaces = ",".join(args.interfaces or []).split(",")
    variables, command = _variables(args, config, environ), args.command
    if args.serve_horovod:
        variables["PYTHONPATH"] = python_path(environ)
        if command[0].endswith(".py") and not os.access(command[0], os.X_OK):
            command = [sys.executable, *command]
    return Settings(
        num_proc=args.num_proc,
        command=command,
        min_num_proc=args.min_num_proc,
        max_num_proc=args.max_num_proc,
        hosts=named,
        discovery_script=args.host_discovery_script,
        slots=args.slots,
        elastic_timeout=seconds(args.elastic_timeout, "HOROVOD_ELASTIC_TIMEOUT", 600),
        reset_limit=args.reset_limit,
        cooldown=tuple(args.cooldown) if args.cooldown else None,
        start_timeout=seconds(args.start_timeout, "HOROVOD_START_TIMEOUT", 30),
        ssh_port=args.ssh_port,
        ssh_identity_file=args.ssh_identity_file,
        interfaces=[name for name in interfaces if name],
        output_filename=args.output_filename,
        timestamps=args.timestamps,
        verbose=args.verbose,
        variables=variables,
    )
