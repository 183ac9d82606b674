"""A context's configuration: SwitchML's keys, in a file, the environment or the program."""

from __future__ import annotations

import configparser
import dataclasses
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")

PREFIX = "FUSEDPG_AGGREGATION_"
# Keys of switchml.cfg. The controller is where workers join: an aggregator by UDP.
CONTROLLER = ("general.controller_ip", "general.controller_port")
_CONTROLLER_PORT = 50099
# For a switch or other hardware: known, and without effect here.
_WITHOUT_EFFECT = (
    "general.rank",
    "general.timeout_threshold",
    "general.timeout_threshold_increment",
    "backend.dpdk.worker_port",
    "backend.dpdk.worker_ip",
    "backend.dpdk.cores",
    "backend.dpdk.extra_eal_options",
    "backend.dpdk.port_id",
    "backend.dpdk.pool_size",
    "backend.dpdk.pool_cache_size",
    "backend.dpdk.burst_rx",
    "backend.dpdk.burst_tx",
    "backend.dpdk.bulk_drain_tx_us",
    "backend.rdma.msg_numel",
    "backend.rdma.device_name",
    "backend.rdma.device_port_id",
    "backend.rdma.gid_index",
)


@dataclasses.dataclass(frozen=True)
class Config:
    """The parameters of a context.

    A value is taken from the first of these that has it: the keyword given to ``Config`` or
    ``load``, the environment (``FUSEDPG_AGGREGATION_NUM_WORKER_THREADS`` and so on), the file.

    Args:
        num_workers: how many workers add up. None: the ranks of the process group; with the
            backend "dummy", which has none, 1.
        num_worker_threads: threads that work at the slices of jobs.
        max_outstanding_packets: packets under way at a time, of all threads together.
        packet_numel: elements a packet.
        backend: "group" (the collectives of a process group), "udp" (SwitchML's packets, to
            aggregators), "dummy" (sleeps as long as a link would take), or a name given to
            :func:`register_backend`.
        scheduler: "fifo", or a name given to :func:`register_scheduler`.
        prepostprocessor: "bypass" (the tensor's own elements travel), "cpu_exponent_quantizer"
            (floats as 32-bit integers with one exponent a packet), or a name given to
            :func:`register_prepostprocessor`.
        instant_job_completion: jobs finish at once and nothing is done; for measuring a program
            without its all-reduces.
        aggregators: with "udp", which ones: ``"host:port,..."``. Their key is in the variable
            FUSEDPG_AGGREGATOR_KEY.
        timeout: with "udp", milliseconds after which a packet is sent again before it is known how
            long its sum takes.
        seal: with "udp", whether packets end with a keyed hash. Without it, whoever can send
            datagrams to the aggregator can change sums; for a switch, which knows no such thing.
        dummy_bandwidth: of the dummy's link, in megabits a second.
        dummy_process_packets: whether the dummy pre- and postprocesses. Without that it leaves the
            output as it is.

    Raises:
        ValueError: a value out of range.
    """

    num_workers: int | None = None
    num_worker_threads: int = 1
    max_outstanding_packets: int = 256
    packet_numel: int = 1024
    backend: str = "group"
    scheduler: str = "fifo"
    prepostprocessor: str = "bypass"
    instant_job_completion: bool = False
    aggregators: str = ""
    timeout: float = 10.0
    seal: bool = True
    dummy_bandwidth: float = 1000.0
    dummy_process_packets: bool = True

    def __post_init__(self) -> None:
        for name in ("num_worker_threads", "max_outstanding_packets", "packet_numel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.num_workers is not None and self.num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, found {self.num_workers}")
        if not 0.1 <= self.timeout <= 1e6:
            raise ValueError(f"timeout must be 0.1 to 1e6 milliseconds, found {self.timeout}")
        if not 0 < self.dummy_bandwidth < float("inf"):
            raise ValueError(f"dummy_bandwidth must be positive, found {self.dummy_bandwidth}")
        if self.max_outstanding_packets < self.num_worker_threads:
            raise ValueError(
                f"max_outstanding_packets ({self.max_outstanding_packets}) must be at least one "
                f"for each of the {self.num_worker_threads} worker threads"
            )

    @property
    def batch_packets(self) -> int:
        """Packets that a thread has under way at a time."""
        return self.max_outstanding_packets // self.num_worker_threads

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        **values: object,
    ) -> Config:
        """Reads a file and the environment.

        Args:
            path: a file in the format of ``switchml.cfg``, or a TOML file (``*.toml``) with the
                names of this class's parameters. None: :meth:`find`, or no file.
            environment: default: ``os.environ``.
            values: parameters that go before both.

        Raises:
            ValueError: an unknown key, or a value that cannot be read; names where it stands.
            OSError: the file cannot be read.
        """
        path = cls.find() if path is None else Path(path)
        found: dict[str, Any] = {}
        if path is not None:
            values_there = _read(path)
            if (place := controller(values_there)) is not None:
                found["aggregators"] = place
            for key, text in values_there.items():
                if (name := parameter(key, f"{path}")) is not None:
                    found[name] = _value(name, text, f"{path}: {key}")
        names = {field.name for field in dataclasses.fields(cls)}
        for key, text in (os.environ if environment is None else environment).items():
            if key.startswith(PREFIX) and text:
                name = key.removeprefix(PREFIX).lower()
                if name not in names:
                    raise ValueError(f"{key}: no such parameter; there are {_listed(names)}")
                found[name] = _value(name, text, key)
        return cls(**{**found, **values})

    @staticmethod
    def find() -> Path | None:
        """The configuration file that SwitchML's programs would use: ``switchml-HOST.cfg`` or
        ``switchml.cfg`` in the working directory, or ``/etc/switchml.cfg``; the first that exists.

        SwitchML itself takes the file that names the host last.
        """
        places = [f"switchml-{socket.gethostname()}.cfg", "switchml.cfg", "/etc/switchml.cfg"]
        return next((Path(place) for place in places if os.path.isfile(place)), None)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _read(path: Path) -> Mapping[str, object]:
    """Values by key, as ``section.name``; in a TOML file without a section, ``name``."""
    if path.suffix == ".toml":
        try:
            import tomllib
        except ImportError:  # Python 3.10
            raise ValueError(
                f"{path}: TOML files need Python 3.11; write it as switchml.cfg"
            ) from None
        try:
            return tomllib.loads(path.read_text())
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: {error}") from None
    return read_sections(path.read_text(), f"{path}")


def read_sections(text: str, where: str) -> dict[str, str]:
    """Values of a file with sections by ``section.name``; names in lower case."""
    parser = configparser.ConfigParser(interpolation=None, inline_comment_prefixes=("#", ";"))
    try:
        parser.read_string(text, where)
    except configparser.Error as error:
        raise ValueError(str(error)) from None
    return {f"{section}.{key}": value for section in parser.sections()
            for key, value in parser.items(section)}  # fmt: skip


def controller(values: Mapping[str, object]) -> str | None:
    """The ``host:port`` that a file names as that of SwitchML's controller, if it does."""
    if not any(key in values for key in CONTROLLER):
        return None
    host = str(values.get("general.controller_ip", "127.0.0.1"))
    port = values.get("general.controller_port", _CONTROLLER_PORT)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parameter(key: str, where: str) -> str | None:
    """The parameter that a key of a file names; None for one that has no effect here or is the
    controller's."""
    names = {field.name for field in dataclasses.fields(Config)}
    if key in _WITHOUT_EFFECT or key in CONTROLLER:
        return None
    section, _, name = key.rpartition(".")
    if section == "backend.dummy":
        name = f"dummy_{name}"
    elif section not in ("general", "") or (section and name.startswith("dummy_")):
        name = key
    if name not in names:
        raise ValueError(f"{where}: unknown key {key}; there are {_listed(names)}")
    return name


def named(kind: str, known: Mapping[str, _T], name: str) -> _T:
    """A part that a configuration names."""
    if name not in known:
        raise ValueError(f"no {kind} {name!r}; there are {sorted(known)}")
    return known[name]


_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def _value(name: str, value: object, where: str) -> bool | float | str | int:
    kind = next(field.type for field in dataclasses.fields(Config) if field.name == name)
    text = str(value).strip()
    try:
        if kind == "bool":
            if text.lower() not in _TRUE + _FALSE:
                raise ValueError
            return text.lower() in _TRUE
        if kind == "float":
            return float(text)
        if kind == "str":
            return text
        return int(text)
    except ValueError:
        raise ValueError(f"{where}: expected {kind}, found {text!r}") from None
