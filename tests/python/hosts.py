"""Hosts out of network namespaces: the links between them have a rate, and count bytes.

    with Hosts(2, rate="1gbit") as hosts:
        hosts.run(["train.py", "--steps", "10"], ranks=1)
        sent = hosts.sent_bytes()

Every host is a network namespace with one interface on a common bridge; ``tc tbf`` limits what it
sends and what it receives. Files, memory and processes are those of this machine, so
``FUSEDPG_HOST_ID`` says which host a rank is on. Needs root, ``ip`` and ``tc``:
:func:`why_not` says what is missing. As a program it runs one::

    python tests/python/hosts.py --hosts 2 --rate 1gbit -- benchmarks/sparse.py --sizes 1M
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import IO, TypeVar

Result = TypeVar("Result")
MAX_HOSTS = 8
PORT = 29400
# Bytes that a link may pass at once; the kernel's timer needs some, and more for a fast link.
BURST, FAST_BURST = "256kb", "4mb"
LATENCY = "50ms"


def burst(rate: str) -> str:
    return FAST_BURST if rate.endswith("0gbit") else BURST


def _ip(*arguments: str) -> None:
    _command("ip", *arguments)


def _command(*arguments: str) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def why_not() -> str | None:
    """Why there can be no such hosts here; None if there can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"no `{tool}` on PATH (Debian's package iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Hosts(2, rate="1gbit"):
            pass
    except RuntimeError as error:
        return f"this machine does not allow it: {error}"
    return None


def _system(name: str, *arguments: object) -> None:
    call = getattr(ctypes.CDLL(None, use_errno=True), name)
    if call(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def enter_network(namespace: str) -> None:
    """This thread, and those that it starts, see the network of a namespace."""
    clone_newnet = 0x40000000
    file = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _system("setns", file, clone_newnet)
    finally:
        os.close(file)


class Hosts:
    """Namespaces ``0 ... count - 1`` with addresses ``10.77.0.1 ...``.

    Args:
        count: 2 to 8 hosts.
        rate: of each host's link, both ways, as ``tc`` writes it ("1gbit"); None: no limit.

    Raises:
        RuntimeError: with what ``ip`` or ``tc`` said.
    """

    def __init__(self, count: int, rate: str | None = None) -> None:
        if not 2 <= count <= MAX_HOSTS:
            raise ValueError(f"2 to {MAX_HOSTS} hosts, not {count}")
        self.count = count
        self._rate = rate
        self._name = f"fpg{uuid.uuid4().hex[:6]}"
        self._made: list[str] = []
        self._running: list[subprocess.Popen[str]] = []

    def namespace(self, host: int | str) -> str:
        return f"{self._name}-{host}"

    def _make(self, name: str) -> None:
        _ip("netns", "add", name)
        self._made.append(name)
        _ip("-n", name, "link", "set", "lo", "up")

    def _limit(self, namespace: str, device: str) -> None:
        if self._rate is not None:
            limit = ["root", "tbf", "rate", self._rate, "burst", burst(self._rate)]
            limit += ["latency", LATENCY]
            _command("tc", "-n", namespace, "qdisc", "add", "dev", device, *limit)

    def __enter__(self) -> Hosts:
        try:
            switch = self.namespace("switch")
            self._make(switch)
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            for host in range(self.count):
                name = self.namespace(host)
                port = f"port{host}"
                self._make(name)
                _ip(
                    *("-n", switch, "link", "add", port, "type", "veth"),
                    *("peer", "name", "eth0", "netns", name),
                )
                _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
                _ip("-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "up")
                # The same everywhere: with BBR, some machines' default, links of namespaces take
                # twice as long both ways at once.
                _ip(
                    *("-n", name, "route", "change", "10.77.0.0/24", "dev", "eth0"),
                    *("proto", "kernel", "scope", "link", "src", self.address(host)),
                    *("congctl", "cubic"),
                )
                self._limit(name, "eth0")
                self._limit(switch, port)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends what still runs and removes the namespaces, and with them their interfaces."""
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._running = []
        for name in reversed(self._made):
            _ip("netns", "delete", name)
        self._made = []

    def cut(self, host: int) -> None:
        """Pulls a host's cable: what it sends and what it would receive is lost, without a word."""
        _ip("-n", self.namespace("switch"), "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        _ip("-n", self.namespace("switch"), "link", "set", f"port{host}", "up")

    def call(self, host: int, function: Callable[[], Result]) -> Result:
        """What a function gives in the network of a host; sockets it opens stay there."""
        results: list[Result] = []
        errors: list[BaseException] = []

        def body() -> None:
            try:
                enter_network(self.namespace(host))
                results.append(function())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host + 1}"

    def environment(self, host: int) -> dict[str, str]:
        return {
            "FUSEDPG_HOST_ID": self.namespace(host),
            "GLOO_SOCKET_IFNAME": "eth0",
        }

    def start(
        self,
        host: int,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        stderr: IO[str] | int = subprocess.STDOUT,
    ) -> subprocess.Popen[str]:
        """A process on a host, in a process group of its own."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(host), *command],
            env=os.environ | self.environment(host) | dict(env or {}),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        self._running.append(process)
        return process

    def run(
        self,
        program: Sequence[str],
        *,
        ranks: int | Sequence[int] = 1,
        env: Mapping[str, str] | None = None,
        timeout: float = 300,
    ) -> list[str]:
        """``torchrun`` with one rendezvous on all hosts; what each wrote to stdout.

        torchrun and libraries write to stderr whenever they like, so that is kept apart.

        Args:
            program: a script and its arguments.
            ranks: processes on each host, or on each of the first hosts.

        Raises:
            RuntimeError: with all output, when one fails; when one does not end in time.
        """
        processes = []
        ranks = [ranks] * self.count if isinstance(ranks, int) else ranks
        # Files, which unlike pipes are never full.
        errors = [tempfile.TemporaryFile("w+") for _ in ranks]  # noqa: SIM115
        for host, here in enumerate(ranks):
            launcher = [sys.executable, "-m", "torch.distributed.run"]
            launcher += [f"--nnodes={len(ranks)}", f"--nproc-per-node={here}"]
            launcher += [f"--node-rank={host}", f"--master-addr={self.address(0)}"]
            launcher += [f"--master-port={PORT}"]
            processes.append(self.start(host, [*launcher, *program], env, errors[host]))
        outputs = []
        try:
            for process in processes:
                try:
                    outputs.append(process.communicate(timeout=timeout)[0])
                except subprocess.TimeoutExpired:
                    raise RuntimeError(f"{program[0]} did not end within {timeout} s") from None
        finally:
            ended = [process.poll() for process in processes]
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self._running.remove(process)
        if any(ended):
            for error in errors:
                error.seek(0)
                outputs.append(error.read())
            raise RuntimeError(f"{program[0]} failed with {ended}:\n" + "\n".join(outputs))
        return outputs

    def _counter(self, host: int, name: str) -> int:
        path = f"/sys/class/net/eth0/statistics/{name}"
        return int(_command("ip", "netns", "exec", self.namespace(host), "cat", path))

    def sent_bytes(self) -> list[int]:
        """What each host has sent since it began, with all headers."""
        return [self._counter(host, "tx_bytes") for host in range(self.count)]

    def received_bytes(self) -> list[int]:
        return [self._counter(host, "rx_bytes") for host in range(self.count)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="on each host")
    parser.add_argument("--rate", help='of each link, such as "1gbit"')
    parser.add_argument("--timeout", type=float, default=3600)
    parser.add_argument("program", nargs="+", metavar="-- PROGRAM")
    args = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"no hosts: {reason}", file=sys.stderr)
        return 2
    with Hosts(args.hosts, args.rate) as hosts:
        outputs = hosts.run(args.program, ranks=args.ranks, timeout=args.timeout)
        print(outputs[0], end="")
        print(f"bytes sent by each host: {hosts.sent_bytes()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
