"""The launcher's side of an agent (`agent.py`), on this machine or behind ssh."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusedpg.hvd.run.hosts import is_local
from fusedpg.hvd.run.options import Settings

__all__ = ["AGENT", "Host", "Message"]

Message = dict[str, Any]
"""A line of an agent's output, see ``agent.py``."""

AGENT = Path(__file__).with_name("agent.py")


class Host:
    """The agent of one host: a child of this process, or of an ssh that is one."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.ready = False
        self.deadline = time.monotonic() + settings.start_timeout
        self._buffer, self._pending = bytearray(), bytearray()
        command = [sys.executable, "-I", "-u", str(AGENT)]
        self.local = is_local(name)
        if not self.local:
            command = ssh(name, command, settings)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's interrupt is for the driver
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        os.set_blocking(self.input.fileno(), False)
        os.set_blocking(self.output.fileno(), False)

    def send(self, message: Mapping[str, object]) -> None:
        """Queues a message: `flush` sends it when the agent reads."""
        self._pending += json.dumps(message).encode() + b"\n"

    def flush(self) -> bool:
        """Sends what can be sent now; whether something is left."""
        try:
            while self._pending:
                del self._pending[: os.write(self.input.fileno(), self._pending[: 1 << 16])]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # its output ends, too, which `read` notices
            self._pending.clear()
        return bool(self._pending)

    def read(self) -> list[Message] | None:
        """The messages of the agent since then; None if it is gone."""
        messages: list[Message] = []
        while True:
            try:
                data = os.read(self.output.fileno(), 1 << 16)
            except BlockingIOError:  # nothing more for now
                return messages
            if not data:
                return messages or None
            *lines, rest = (bytes(self._buffer) + data).split(b"\n")
            self._buffer = bytearray(rest)
            messages += [message for message in map(self._parse, lines) if message]

    def _parse(self, line: bytes) -> dict[str, object]:
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError):
            if self.ready:
                raise
            return {}  # a login shell's greeting

    def close_input(self) -> None:
        """Tells the agent to end its workers and itself."""
        self.input.close()

    def kill(self) -> None:
        """Ends this side of the connection, and what ssh has started for it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def ssh(host: str, command: list[str], settings: Settings) -> list[str]:
    """The command line that runs a command on a host, in this process' directory."""
    port = ["-p", str(settings.ssh_port)] if settings.ssh_port is not None else []
    identity = ["-i", settings.ssh_identity_file] if settings.ssh_identity_file else []
    # A login shell reads this text.
    remote = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"
    return ["ssh", "-o", "BatchMode=yes", *port, *identity, host, remote]
