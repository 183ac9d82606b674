"""``fusedpg-aggregator``: a process that adds up for groups that span hosts.

    python -m fusedpg.aggregator --listen 10.0.0.1:4711

Groups that have ``fusedpg.Options(aggregators="10.0.0.1:4711,...")`` and its key, in the variable
FUSEDPG_AGGREGATOR_KEY, send it what is to be added up. See docs/operate/aggregators.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from fusedpg import _aggregator_config
from fusedpg._registration import not_built

if importlib.util.find_spec("fusedpg._aggregator") is None:
    raise not_built()
from fusedpg import _aggregator

_Server = _aggregator.Aggregator | _aggregator.UdpAggregator
_SIGNALS = {signal.SIGTERM, signal.SIGINT}
_DEFAULT_LISTEN = "127.0.0.1:4711"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of one aggregator.

    Attributes:
        listen: ``"host:port"``, or ``"[host]:port"``; port 0: one that is free.
        key: 32 hexadecimal digits, which its workers must have, too.
        stats: seconds between two lines of counters on standard output; 0: none.
        udp: where SwitchML's packets come, by UDP; "": nowhere.
    """

    listen: str = _DEFAULT_LISTEN
    key: str = ""
    stats: float = 0.0
    udp: str = ""


def _seconds(value: object) -> float:
    seconds = -1.0
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            seconds = float(value)
    if not 0 <= seconds <= 1e6:
        raise ValueError(f"stats is a number of seconds from 0 to 1e6, got {value!r}")
    return seconds


def settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """The settings by the flags, else the environment, else the file that ``--config`` names.

    Raises:
        ValueError: for a value or a key of the file that cannot be.
    """
    parser = argparse.ArgumentParser(
        "fusedpg-aggregator", description="Adds up for groups that span hosts."
    )
    parser.add_argument("--listen", metavar="HOST:PORT", help=f"default: {_DEFAULT_LISTEN}")
    parser.add_argument(
        "--udp", metavar="HOST:PORT", help="also add up SwitchML's packets, which come there by UDP"
    )
    parser.add_argument("--stats", metavar="SECONDS", help="print counters as JSON, so often")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML: listen, udp, stats, key or key_file; or omnireduce.cfg or switchml.cfg",
    )
    given = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    if given.config is not None:
        found, others = _aggregator_config.read(
            given.config, listens=not (given.listen or environment.get("listen"))
        )
        if others:
            print(
                f"fusedpg-aggregator: {given.config}: without meaning here: {', '.join(others)}",
                file=sys.stderr,
            )
    found |= {name: value for name, value in environment.items() if value}
    found |= {
        name: value
        for name, value in (("listen", given.listen), ("udp", given.udp), ("stats", given.stats))
        if value is not None
    }
    found["stats"] = _seconds(found.get("stats", 0))
    return Settings(**found)


def _environment() -> dict[str, str]:
    listen, stats, key = _aggregator.settings()
    return {"listen": listen, "stats": stats, "key": key}


class Aggregator:
    """An aggregator on threads of this process, which may be a rank of the groups that use it.

    It serves from now on, until ``close()`` or the end of the ``with`` that it is the subject of.

    Args:
        listen, udp: as in ``Settings``.
        key: default: FUSEDPG_AGGREGATOR_KEY of the environment.

    Attributes:
        place, udp_place: ``"host:port"``, for ``fusedpg.Options(aggregators=...)`` and
            ``fusedpg.aggregation.Config(aggregators=...)``; the latter "" without ``udp``.

    Raises:
        ValueError: where it cannot listen there, and for a key that is none.

    Example: see docs/operate/aggregators.md.
    """

    def __init__(self, listen: str = "127.0.0.1:0", *, udp: str = "", key: str = "") -> None:
        key = key or _environment()["key"]
        self._servers: list[_Server] = [_aggregator.Aggregator(listen, key)]
        if udp:
            self._servers.append(_aggregator.UdpAggregator(udp, key))
        self.place, self.udp_place = [*map(_place, self._servers), ""][:2]

    def stats(self) -> dict[str, Any]:
        """The counters that ``--stats`` prints."""
        found, *udp = [dict(server.stats()) for server in self._servers]
        return found | ({"udp": udp[0]} if udp else {})

    @property
    def active(self) -> bool:
        """True while a group uses it."""
        return any(server.stats()["active"] for server in self._servers)

    def drain(self) -> None:
        """Takes no more groups; those that are there go on."""
        for server in self._servers:
            server.drain()

    def close(self) -> None:
        """Ends it, and the jobs that are there."""
        self._servers.clear()

    def __enter__(self) -> Aggregator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run(chosen: Settings) -> None:
    """Serves until SIGTERM or SIGINT, and then until its jobs have ended; the second signal ends
    these, too.

    Raises:
        ValueError: where it cannot listen there, and for a key that is none.
    """
    with Aggregator(chosen.listen, udp=chosen.udp, key=chosen.key) as server:
        print(f"fusedpg-aggregator: listens at {server.place}", flush=True)
        if server.udp_place:
            print(f"fusedpg-aggregator: listens by UDP at {server.udp_place}", flush=True)

        def report() -> None:
            if chosen.stats:
                print(json.dumps(server.stats()), flush=True)

        look = min(chosen.stats, 3600.0) if chosen.stats else 3600.0
        while signal.sigtimedwait(_SIGNALS, look) is None:
            report()
        server.drain()
        print("fusedpg-aggregator: takes no more jobs", flush=True)
        while server.active and signal.sigtimedwait(_SIGNALS, 0.05) is None:
            pass
        report()


def _place(server: _Server) -> str:
    host, port = server.address.split()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def main(arguments: Sequence[str] | None = None) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # in all threads that begin from here on
    try:
        run(settings(sys.argv[1:] if arguments is None else arguments, _environment()))
    except (ValueError, RuntimeError) as error:
        print(f"fusedpg-aggregator: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
