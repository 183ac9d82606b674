"""The agent of a host, which fusedpg-run starts: it runs workers and forwards their output.

The driver writes lines of JSON to its standard input and reads lines of JSON from its standard
output. When the input ends, because the driver or the connection is gone, it ends all workers.
It runs by its path with `python -I` and imports only the standard library, so that it starts
quickly and needs nothing of the host but Python.

Commands: {"start": key, "argv", "env", "cwd", "input"}, {"stop": key}.
Answers: {"hello": pid}, {"output": key, "stream", "data"}, {"exit": key, "code"}.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

# The time between SIGTERM and SIGKILL.
GRACE_SECONDS = 5.0
# The time by which a process that left its worker's group may delay the worker's last output.
DRAIN_SECONDS = 1.0
TICK_SECONDS = 0.05
MAX_LINE = 1 << 16
RESULT_FD_VARIABLE = "FUSEDPG_RUN_RESULT_FD"
PR_SET_PDEATHSIG = 1

Command = dict[str, Any]

_libc = ctypes.CDLL(None)


def _die_with_agent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def say(message: dict[str, object]) -> None:
    sys.stdout.buffer.write(json.dumps(message).encode() + b"\n")
    sys.stdout.buffer.flush()


def text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


class Worker:
    """One process, the leader of a process group, and the pipes from it."""

    def __init__(self, command: Command, selector: selectors.BaseSelector) -> None:
        self.key = command["start"]
        self.selector = selector
        self.buffers: dict[int, tuple[str, bytearray]] = {}
        self.kill_at: float | None = None
        self.drain_until: float | None = None
        pipes = {name: os.pipe() for name in ("stdout", "stderr", "result")}
        result = pipes["result"][1]
        env = {**os.environ, **command["env"], RESULT_FD_VARIABLE: str(result)}
        try:
            with tempfile.TemporaryFile() as stdin:
                stdin.write(base64.b64decode(command["input"]))
                stdin.seek(0)
                self.process = subprocess.Popen(
                    command["argv"],
                    env=env,
                    cwd=command["cwd"],
                    stdin=stdin,
                    stdout=pipes["stdout"][1],
                    stderr=pipes["stderr"][1],
                    pass_fds=[result],
                    start_new_session=True,
                    preexec_fn=_die_with_agent,
                )
        except BaseException:
            for reader, _ in pipes.values():
                os.close(reader)
            raise
        finally:
            for _, writer in pipes.values():
                os.close(writer)
        for name, (reader, _) in pipes.items():
            os.set_blocking(reader, False)
            self.buffers[reader] = (name, bytearray())
            selector.register(reader, selectors.EVENT_READ, self)

    def signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def stop(self) -> None:
        if self.kill_at is None:
            self.kill_at = time.monotonic() + GRACE_SECONDS
            self.signal_group(signal.SIGTERM)

    def read(self, fd: int) -> None:
        name, buffer = self.buffers[fd]
        try:
            data = os.read(fd, MAX_LINE)
        except BlockingIOError:
            return
        buffer += data
        # Progress bars end their lines with a carriage return.
        end = max(buffer.rfind(b"\n"), buffer.rfind(b"\r")) + 1
        if name == "result" or len(buffer) >= MAX_LINE or not data:
            end = len(buffer)
        if end:
            say({"output": self.key, "stream": name, "data": text(bytes(buffer[:end]))})
            del buffer[:end]
        if not data:
            self.close(fd)

    def close(self, fd: int) -> None:
        self.selector.unregister(fd)
        del self.buffers[fd]
        os.close(fd)

    def ended(self) -> bool:
        """True if the process is gone and its output read. Ends the process if it is time to."""
        now = time.monotonic()
        if self.process.poll() is None:
            if self.kill_at is not None and now >= self.kill_at:
                self.signal_group(signal.SIGKILL)
            return False
        if self.drain_until is None:
            self.signal_group(signal.SIGKILL)  # what it has left behind
            self.drain_until = now + DRAIN_SECONDS
        if self.buffers and now >= self.drain_until:
            for fd in list(self.buffers):
                self.read(fd)
                if fd in self.buffers:
                    self.close(fd)
        return not self.buffers


class Agent:
    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.workers: dict[str, Worker] = {}
        self.input = bytearray()
        self.ending = False

    def start(self, command: Command) -> None:
        try:
            self.workers[command["start"]] = Worker(command, self.selector)
        except OSError as error:
            reason = f"cannot start {command['argv'][0]}: {error}\n"
            say({"output": command["start"], "stream": "stderr", "data": reason})
            say({"exit": command["start"], "code": 127})

    def listen(self) -> None:
        data = os.read(0, MAX_LINE)
        if not data:
            self.end()
            return
        self.input += data
        *lines, rest = self.input.split(b"\n")
        self.input = bytearray(rest)
        for line in lines:
            command = json.loads(line)
            if "start" in command:
                self.start(command)
            elif command["stop"] in self.workers:
                self.workers[command["stop"]].stop()

    def end(self, *_: object) -> None:
        if not self.ending:
            self.ending = True
            with contextlib.suppress(KeyError):
                self.selector.unregister(0)
            for worker in self.workers.values():
                worker.stop()

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.end)
        self.selector.register(0, selectors.EVENT_READ)
        say({"hello": os.getpid()})
        while not self.ending or self.workers:
            for key, _ in self.selector.select(TICK_SECONDS):
                if key.fd == 0:
                    if not self.ending:
                        self.listen()
                elif key.fd in key.data.buffers:
                    key.data.read(key.fd)
            for name, worker in list(self.workers.items()):
                if worker.ended():
                    say({"exit": name, "code": worker.process.returncode})
                    del self.workers[name]


def main() -> None:
    agent = Agent()
    try:
        agent.run()
    except BrokenPipeError:  # the driver is gone
        pass
    finally:
        for worker in agent.workers.values():
            worker.signal_group(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        for worker in agent.workers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(deadline - time.monotonic(), 0))
            worker.signal_group(signal.SIGKILL)
        # The interpreter's last flush would complain about the broken pipe.
        os._exit(0)


if __name__ == "__main__":
    main()
