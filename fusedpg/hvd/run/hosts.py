"""Which hosts a job may use, and how many workers on each."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from pathlib import Path

__all__ = [
    "DiscoveryScript",
    "address_towards",
    "interface_address",
    "is_local",
    "parse_hostfile",
    "parse_hosts",
]

# How often the script runs, and how long it may take.
DISCOVERY_INTERVAL = 1.0
DISCOVERY_TIMEOUT = 60.0


def _host_and_slots(text: str, default: int | None) -> tuple[str, int]:
    name, colon, slots = text.partition(":")
    if not colon and default is not None:
        slots = str(default)
    if not name or not slots.isdecimal() or int(slots) < 1:
        raise ValueError(f"a host is written as name:slots, with slots >= 1, not {text!r}")
    return name, int(slots)


def _without_duplicates(pairs: list[tuple[str, int]]) -> dict[str, int]:
    hosts = dict(pairs)
    if len(hosts) < len(pairs):
        raise ValueError(f"a host appears twice: {', '.join(name for name, _ in pairs)}")
    if not hosts:
        raise ValueError("no hosts")
    return hosts


def parse_hosts(text: str) -> dict[str, int]:
    """`a:2,b:4`: slots by host. A host without a number has one slot."""
    return _without_duplicates([_host_and_slots(part.strip(), 1) for part in text.split(",")])


def parse_hostfile(path: str | Path) -> dict[str, int]:
    """Lines `name slots=4`. A host without a number has one slot; `#` begins a comment."""
    pairs = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = words[1].removeprefix("slots=") if len(words) == 2 else "1"
        if len(words) > 2 or (len(words) == 2 and not words[1].startswith("slots=")):
            raise ValueError(f"{path}:{number}: expected `name slots=4`, not {line!r}")
        pairs.append(_host_and_slots(f"{words[0]}:{slots}", None))
    return _without_duplicates(pairs)


def is_local(host: str) -> bool:
    """True if a name means this machine: one of its addresses can be bound here."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
                return True
            except OSError:
                continue
    return False


def address_towards(host: str) -> str:
    """The address that this machine uses when it talks to a host; nothing is sent."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, 9, type=socket.SOCK_DGRAM, family=socket.AF_INET
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(f"cannot reach host {host}: {error}") from error


def interface_address(name: str) -> str:
    """The IPv4 address of one of this machine's interfaces."""
    import fcntl

    get_interface_address = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = name.encode()[:15].ljust(256, b"\0")
        try:
            answer = fcntl.ioctl(probe, get_interface_address, request)
        except OSError as error:
            raise ValueError(f"no IPv4 address at interface {name}: {error}") from error
    return socket.inet_ntoa(answer[20:24])


class DiscoveryScript:
    """Runs a program again and again that prints the hosts: `name` or `name:slots` a line.

    Args:
        command: an executable.
        slots: of a host that is printed without a number; None: such a line is an error.
    """

    def __init__(self, command: str, slots: int | None) -> None:
        self._command, self._slots = command, slots
        self._running: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        self._started = self._next = 0.0

    def parse(self, text: str) -> dict[str, int]:
        lines = [line.strip() for line in text.splitlines()]
        return dict(_host_and_slots(line, self._slots) for line in lines if line)

    def first(self) -> dict[str, int]:
        """The hosts at the start.

        Raises:
            ValueError: the script failed, or printed something else.
        """
        try:
            done = subprocess.run(
                [self._command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                timeout=DISCOVERY_TIMEOUT,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise ValueError(f"host discovery script: {error}") from error
        return self.parse(done.stdout)

    def poll(self) -> tuple[dict[str, int] | None, str | None]:
        """Does not wait: the hosts, if a run of the script has ended; what went wrong."""
        now = time.monotonic()
        if self._running is None:
            if now >= self._next:
                self._output.seek(0)
                self._output.truncate()
                try:
                    self._running = subprocess.Popen(
                        [self._command], stdin=subprocess.DEVNULL, stdout=self._output
                    )
                except OSError as error:
                    self._next = now + DISCOVERY_INTERVAL
                    return None, str(error)
                self._started = now
            return None, None
        code = self._running.poll()
        if code is None and now - self._started < DISCOVERY_TIMEOUT:
            return None, None
        if code is None:
            self.close()
        self._running, self._next = None, now + DISCOVERY_INTERVAL
        if code is None:
            return None, f"did not end within {DISCOVERY_TIMEOUT:.0f} s"
        if code != 0:
            return None, f"ended with {code}"
        self._output.seek(0)
        try:
            return self.parse(self._output.read().decode(errors="replace")), None
        except ValueError as error:
            return None, str(error)

    def close(self) -> None:
        if self._running is not None and self._running.poll() is None:
            self._running.kill()
            self._running.wait()
