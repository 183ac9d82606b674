"""Runs a job: an agent on each host, workers in their slots, and who is which rank.

A fixed job's ranks are known before its workers start, and the first worker that fails ends it.
An elastic job goes through generations. Its workers wait for places (`fusedpg.hvd._membership`);
when all of the last generation that are left wait, the driver gives places in the next one to
everybody who waits. So those that survive keep their memory, and whoever joins gets the state from
rank 0, which is a worker that has it.
"""

from __future__ import annotations

import base64
import json
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from fusedpg.hvd import _membership
from fusedpg.hvd.run import hosts as found
from fusedpg.hvd.run.host import Host, Message
from fusedpg.hvd.run.options import Settings
from fusedpg.hvd.run.output import Output
from fusedpg.hvd.run.store import Store

__all__ = ["Driver", "JobFailed"]

TICK_SECONDS = 0.05
# Agents give their workers 5 s between SIGTERM and SIGKILL.
END_SECONDS = 10.0
# The time in which ranks of a generation must meet after one of them was lost.
MEETING_SECONDS = 5.0
# How long ranks that are ready to join wait for others that start, so that all join together.
TOGETHER_SECONDS = 30.0
# Generations in a row of which no worker got the state although none was lost.
MAX_FRUITLESS = 3
# An address for documentation (RFC 5737): the way to it is the way to other machines.
ELSEWHERE = "203.0.113.1"
# Variables that describe a host or a login, and are not carried to another host.
OF_A_HOST = {
    *("HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "HOSTNAME", "TMPDIR", "DISPLAY"),
    *("XAUTHORITY", "DBUS_SESSION_BUS_ADDRESS", "FUSEDPG_HOST_ID"),
}
OF_A_LOGIN = ("SSH_", "XDG_", "BASH_FUNC_")
# Variables by which a launcher around this one describes this process, not the workers.
OF_THIS_PROCESS = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    *("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME", "HOROVOD_ELASTIC"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_MAX_RESTARTS", _membership.STORE, _membership.WORKER),
}


class JobFailed(RuntimeError):
    """The job ended without success."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


def shell_code(code: int) -> int:
    """A process' return code as a shell reports it."""
    return 128 - code if code < 0 else code


@dataclass
class Worker:
    """A process in a slot of a host."""

    number: int  # in the order in which they started
    host: Host
    slot: int
    rank: int | None = None
    generation: int = -1
    meeting: int = 1  # the number of its next rendezvous
    waiting: bool = False
    announced: bool = False  # the members of the generation were told that it wants to join
    leaving: bool = False  # its slot is gone: it has no place in the next generation
    counted: bool = False  # its exit was looked at
    code: int | None = None

    @property
    def running(self) -> bool:
        return self.code is None

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" (rank {self.rank})"
        return f"worker {self.number}{rank} on {self.host.name}"


@dataclass
class Blocked:
    """A slot whose worker failed."""

    until: float | None  # None: for good
    seconds: float


class Driver:
    """One job.

    Args:
        settings: what to run, and where.
        input: what each worker reads from its standard input.
        environ: the environment that workers get.
    """

    def __init__(self, settings: Settings, environ: Mapping[str, str], input: bytes = b"") -> None:
        self.settings, self._input = settings, input
        self._environ = {k: v for k, v in environ.items() if k not in OF_THIS_PROCESS}
        self._hosts: dict[str, Host] = {}
        self._slots: dict[str, int] = {}  # what the job may use
        self._blocked: dict[tuple[str, int], Blocked] = {}
        self._workers: list[Worker] = []
        self._selector = selectors.DefaultSelector()
        self._output = Output(settings)
        self._results: dict[int, bytearray] = {}
        self._generation = -1
        self._lost_in_generation = 0
        self._lost_at: float | None = None
        self._fruitless = 0
        self._last_failure = 1
        self._had_state: set[int] = set()  # workers that have had the job's state
        self._updates = [0, 0]
        self._stores: list[Store] = []  # of the last two generations
        self._not_serving: list[Store] = []  # stores that do not answer yet
        self._stuck_since: float | None = None
        self._ready_since: float | None = None  # newcomers that nobody was told of
        self._discovery: found.DiscoveryScript | None = None
        if settings.discovery_script is not None:
            self._discovery = found.DiscoveryScript(settings.discovery_script, settings.slots)

    # -- the job from begin to end

    def run(self) -> dict[int, bytes]:
        """Runs the job; what each rank of the last generation wrote to its result pipe.

        Raises:
            JobFailed: a rank failed, or the job cannot go on.
            ValueError: hosts or interfaces that do not exist, or are too few.
        """
        try:
            if self._discovery is not None:
                self._slots = self._discovery.first()
            else:
                self._slots = self.settings.hosts or {"localhost": self.settings.num_proc}
            total = sum(self._slots.values())
            if self._discovery is None and total < self.settings.num_proc:
                raise ValueError(f"-np {self.settings.num_proc}, but the hosts have {total} slots")
            self._address = self._find_address()
            if self.settings.elastic:
                self._run_elastic()
            else:
                self._run_fixed()
            return {
                worker.rank: bytes(self._results.get(worker.number, b""))
                for worker in self._workers
                if worker.rank is not None and worker.generation == self._generation
            }
        except BrokenPipeError:
            code = 128 + signal.SIGPIPE
            raise JobFailed("nobody reads the output any more", code) from None
        finally:
            self._end()

    def _find_address(self) -> str:
        """The address at which all hosts find this process."""
        if self.settings.interfaces:
            return found.interface_address(self.settings.interfaces[0])
        remote = [name for name in self._slots if not found.is_local(name)]
        if remote:
            return found.address_towards(remote[0])
        if self._discovery is not None:  # others may join
            try:
                return found.address_towards(ELSEWHERE)
            except ValueError:  # this machine has no way to others
                pass
        return "127.0.0.1"

    def _run_fixed(self) -> None:
        left = self.settings.num_proc
        for name, slots in self._slots.items():
            for slot in range(min(slots, left)):
                self._workers.append(Worker(len(self._workers), self._host(name), slot))
            left -= min(slots, left)
        while not all(host.ready for host in self._hosts.values()):
            self._turn()
        self._generation = 0
        self._serve_generation()
        for worker, place in self._places(self._workers):
            self._start(worker, _membership.variables(place))
        while any(worker.running for worker in self._workers):
            self._turn()
            for worker in self._workers:
                if worker.code:
                    raise JobFailed(self._said(worker), shell_code(worker.code))

    def _run_elastic(self) -> None:
        self._control = self._new_store()
        self._publish_updates()
        while True:
            self._turn()
            self._look_for_hosts()
            self._look_at_exits()
            self._fill_slots()  # and so each free slot of a host that has answered has a worker
            running = [worker for worker in self._workers if worker.running]
            finished = [w for w in self._workers if w.code == 0 and not w.leaving]
            if finished and all(w.generation < self._generation for w in running):
                return  # who has not joined is not needed any more
            self._look_who_waits(running)
            if finished:
                self._refuse(running, "other ranks have finished")
            else:
                self._form_generation(running)
            self._free_who_meets()

    # -- hosts and processes

    def _host(self, name: str) -> Host:
        if name not in self._hosts:
            self._note(f"starts the agent of {name}")
            host = self._hosts[name] = Host(name, self.settings)
            self._selector.register(host.output, selectors.EVENT_READ, host)
        return self._hosts[name]

    def _start(self, worker: Worker, variables: Mapping[str, str]) -> None:
        env = {**self._environ, **self.settings.variables, **variables}
        if self.settings.interfaces:
            env["FUSEDPG_SOCKET_IFNAME"] = env["GLOO_SOCKET_IFNAME"] = self.settings.interfaces[0]
        if not worker.host.local:
            env = {k: v for k, v in env.items() if k not in OF_A_HOST}
            env = {k: v for k, v in env.items() if not k.startswith(OF_A_LOGIN)}
        worker.host.send(
            {
                "start": worker.number,
                "argv": list(self.settings.command),
                "env": env,
                "cwd": os.getcwd(),
                "input": base64.b64encode(self._input).decode(),
            }
        )

    def _turn(self) -> None:
        """Takes in what the agents say, for at most a tick."""
        self._not_serving = [s for s in self._not_serving if not s.serve_when_due()]
        writers = [host for host in self._hosts.values() if host.flush()]
        for host in writers:
            self._selector.register(host.input, selectors.EVENT_WRITE, host)
        events = self._selector.select(TICK_SECONDS)
        for host in writers:
            self._selector.unregister(host.input)
        for host in self._listen(events):
            self._lose(host, "its agent has ended")
        now = time.monotonic()
        for host in list(self._hosts.values()):
            if not host.ready and now >= host.deadline:
                self._lose(host, f"no answer within {self.settings.start_timeout:g} s")

    def _listen(self, events: list[tuple[selectors.SelectorKey, int]]) -> Iterator[Host]:
        """Takes in what agents have sent, and yields each host whose agent has ended."""
        for key, _ in events:
            host: Host = key.data
            if key.fileobj is host.output:
                messages = host.read()
                if messages is None:
                    yield host
                for message in messages or ():
                    self._take(host, message)

    def _take(self, host: Host, message: Message) -> None:
        if "hello" in message:
            host.ready = True
        elif "output" in message:
            worker = self._workers[message["output"]]
            data = message["data"].encode("utf-8", "surrogateescape")
            if message["stream"] == "result":
                self._results.setdefault(worker.number, bytearray()).extend(data)
            else:
                name = f"{host.name}:{worker.slot}" if worker.rank is None else str(worker.rank)
                self._output.write(worker.number, name, message["stream"], data)
        else:
            worker = self._workers[message["exit"]]
            worker.code = message["code"]
            self._note(self._said(worker))

    def _lose(self, host: Host, reason: str) -> None:
        self._selector.unregister(host.output)
        del self._hosts[host.name]
        host.close_input()
        host.kill()
        host.output.close()
        text = f"host {host.name}: {reason}"
        if not self.settings.elastic:
            raise JobFailed(text, 1)
        self._note(text, always=True)
        used = self._slots_in_use()  # their workers count as failed
        for slot in range(self._slots.get(host.name, 0)):
            if (host.name, slot) not in used:
                self._block(host.name, slot)
        for worker in self._workers:
            if worker.host is host and worker.running:
                worker.code = 1

    def _said(self, worker: Worker) -> str:
        assert worker.code is not None
        how = f"was ended by signal {-worker.code}" if worker.code < 0 else f"ended: {worker.code}"
        return f"{worker} {how}"

    def _note(self, text: str, always: bool = False) -> None:
        if always or self.settings.verbose:
            print(f"fusedpg-run: {text}", file=sys.stderr, flush=True)

    def _end(self) -> None:
        """No worker and no agent is left after it."""
        if self._discovery is not None:
            self._discovery.close()
        deadline = time.monotonic() + END_SECONDS
        for host in self._hosts.values():
            host.close_input()
        while self._hosts and time.monotonic() < deadline:
            for host in self._listen(self._selector.select(TICK_SECONDS)):
                self._selector.unregister(host.output)
                del self._hosts[host.name]
                host.process.wait(timeout=END_SECONDS)
                host.output.close()
        for host in self._hosts.values():
            host.kill()
        self._output.close()
        self._selector.close()

    # -- elastic jobs: which workers there are

    def _slots_in_use(self) -> set[tuple[str, int]]:
        return {(w.host.name, w.slot) for w in self._workers if w.running}

    def _fill_slots(self) -> None:
        """Starts a worker in each free slot of a host that has answered."""
        if any(worker.code == 0 and not worker.leaving for worker in self._workers):
            return
        used = self._slots_in_use()
        room = self.settings.max_num_proc
        running = sum(worker.running and not worker.leaving for worker in self._workers)
        now = time.monotonic()
        for name, slots in self._slots.items():
            for slot in range(slots):
                blocked = self._blocked.get((name, slot))
                if blocked is not None and (blocked.until is None or now < blocked.until):
                    continue
                if (name, slot) in used or (room is not None and running >= room):
                    continue
                host = self._host(name)
                if host.ready:
                    worker = Worker(len(self._workers), host, slot)
                    self._workers.append(worker)
                    where_to_ask_for_a_place = {
                        _membership.STORE: f"{self._address}:{self._control.port}",
                        _membership.WORKER: str(worker.number),
                        "HOROVOD_ELASTIC": "1",
                    }
                    self._start(worker, where_to_ask_for_a_place)
                    running += 1

    def _look_for_hosts(self) -> None:
        if self._discovery is None:
            return
        new, problem = self._discovery.poll()
        if problem is not None:
            self._note(f"host discovery script: {problem}", always=True)
        if new is None or new == self._slots:
            return
        self._note(f"hosts are now {new}")
        self._slots = new
        removed = False
        for worker in self._workers:
            gone = worker.slot >= new.get(worker.host.name, 0)
            if worker.running and gone and not worker.leaving:
                worker.leaving = True
                removed |= worker.generation == self._generation >= 0
                if worker.generation < 0:  # it has no part in the job yet
                    worker.host.send({"stop": worker.number})
        if removed:
            self._publish_updates(removed=1)

    def _block(self, name: str, slot: int) -> None:
        low, high = self.settings.cooldown or (0.0, 0.0)
        before = self._blocked.get((name, slot))
        seconds = low if before is None else min(2 * before.seconds, high)
        until = None if self.settings.cooldown is None else time.monotonic() + seconds
        self._blocked[name, slot] = Blocked(until, seconds)

    def _look_at_exits(self) -> None:
        """Counts workers that failed since the last look."""
        for worker in self._workers:
            if worker.running or worker.counted:
                continue
            worker.counted = True
            if not worker.code or worker.leaving:
                continue
            self._note(self._said(worker), always=True)
            self._block(worker.host.name, worker.slot)
            self._last_failure = shell_code(worker.code)
            if worker.generation == self._generation:
                self._lost_at = self._lost_at or time.monotonic()
                self._lost_in_generation += 1
            if any(w.code == 0 and w.generation == self._generation for w in self._workers):
                raise JobFailed(f"{self._said(worker)} after others had finished", 1)

    # -- elastic jobs: generations

    def _publish_updates(self, added: int = 0, removed: int = 0) -> None:
        self._updates[0] += added
        self._updates[1] += removed
        self._control.set(_membership.UPDATES_KEY, f"{self._updates[0]},{self._updates[1]}")

    def _look_who_waits(self, running: list[Worker]) -> None:
        for worker in running:
            if not worker.waiting and self._control.has(
                _membership.waiting_key(worker.number, worker.meeting)
            ):
                worker.waiting = True
        newcomers = [w for w in running if w.generation < 0 and not w.leaving]
        ready = [w for w in newcomers if w.waiting and not w.announced]
        if self._generation < 0 or not ready:
            self._ready_since = None
            return
        now = time.monotonic()
        self._ready_since = self._ready_since or now
        if all(w.waiting for w in newcomers) or now - self._ready_since > TOGETHER_SECONDS:
            for worker in ready:
                worker.announced = True
            self._publish_updates(added=len(ready))

    def _refuse(self, running: list[Worker], reason: str) -> None:
        for worker in running:
            if worker.waiting:
                newcomer = worker.generation < 0
                self._answer(worker, {"leave": True} if newcomer else {"ended": reason})

    def _answer(self, worker: Worker, place: Mapping[str, object]) -> None:
        self._control.set(_membership.place_key(worker.number, worker.meeting), json.dumps(place))
        worker.meeting += 1
        worker.waiting = False

    def _form_generation(self, running: list[Worker]) -> None:
        """Gives places to all that wait, if the last generation is over."""
        first = self._generation < 0
        needed = self.settings.num_proc if first else self.settings.least
        candidates = [w for w in running if not w.leaving]
        short = len(candidates) < needed
        if short and not self._others_may_come():
            raise JobFailed(
                f"{len(candidates)} ranks are left, fewer than {needed}", self._last_failure
            )
        members = candidates if first else [w for w in running if w.generation == self._generation]
        if not first and not members and self._had_state | self._synced():
            raise JobFailed("no rank that has the state of the job is left", self._last_failure)
        late = [w for w in members if not w.waiting]
        if not first and members and len(late) == len(members) and not short:
            self._stuck_since = None  # it works
            return
        waiting = [w for w in candidates if w.waiting]
        if late or len(waiting) < needed:
            self._check_patience(late, needed - len(waiting))
            return
        self._stuck_since = None
        limit = self.settings.reset_limit
        if limit is not None and self._generation + 1 > limit:
            raise JobFailed(f"the ranks changed more often than --reset-limit {limit}", 1)
        self._look_who_has_the_state()
        if self._had_state and not any(w.number in self._had_state for w in waiting):
            raise JobFailed("no rank that has the state of the job is left", self._last_failure)
        for worker in running:
            if worker.waiting and worker.leaving:
                self._answer(worker, {"leave": True})
        self._generation += 1
        self._lost_in_generation, self._lost_at = 0, None
        self._serve_generation()
        for worker, place in self._places(waiting):
            self._answer(worker, {**place, "updates": self._updates})
        self._note(f"generation {self._generation} has {len(waiting)} ranks")

    def _others_may_come(self) -> bool:
        slots = [(name, slot) for name, many in self._slots.items() for slot in range(many)]
        gone = [slot for slot in slots if slot in self._blocked]
        return (
            # A program that has failed in all slots of all hosts will on others, too.
            (self._discovery is not None and (not slots or len(gone) < len(slots)))
            or any(blocked.until is not None for blocked in self._blocked.values())
            or any(not host.ready for host in self._hosts.values())
        )

    def _check_patience(self, late: list[Worker], missing: int) -> None:
        now, patience = time.monotonic(), self.settings.elastic_timeout
        if self._stuck_since is None:
            self._stuck_since = now
        if now - self._stuck_since >= patience:
            who = ", ".join(map(str, late)) or f"{missing} more ranks"
            raise JobFailed(f"{who} did not come within {patience:g} s", 1)

    def _synced(self) -> set[int]:
        """Workers of this generation that got the state."""
        members = [w.number for w in self._workers if w.generation == self._generation]
        keys = {number: _membership.synced_key(self._generation, number) for number in members}
        return {number for number, key in keys.items() if self._control.has(key)}

    def _look_who_has_the_state(self) -> None:
        if self._generation < 0:
            return
        got_it = self._synced()
        self._had_state |= got_it
        fruitless = not got_it and not self._lost_in_generation
        self._fruitless = self._fruitless + 1 if fruitless else 0
        if self._fruitless >= MAX_FRUITLESS:
            raise JobFailed(f"{MAX_FRUITLESS} generations in a row did not begin to work", 1)

    def _serve_generation(self) -> None:
        """A store of its own, so that nothing of an earlier generation is found there."""
        self._stores = [*self._stores[-1:], self._new_store(self.settings.elastic_timeout)]

    def _new_store(self, *timeout_seconds: float) -> Store:
        store = Store(self._address, *timeout_seconds)
        self._not_serving.append(store)
        return store

    def _free_who_meets(self) -> None:
        """Members that still meet would wait for one that was lost: without a store they fail."""
        if self._lost_at is not None and time.monotonic() - self._lost_at >= MEETING_SECONDS:
            self._lost_at = None
            self._stores.clear()

    def _places(self, workers: list[Worker]) -> list[tuple[Worker, dict[str, object]]]:
        """Ranks: hosts one after another; the first worker has the state, if anybody has."""

        def age(worker: Worker) -> tuple[bool, int]:
            return (worker.number not in self._had_state, worker.number)

        by_host: dict[str, list[Worker]] = {}
        for worker in sorted(workers, key=age):
            by_host.setdefault(worker.host.name, []).append(worker)
        places = []
        rank = 0
        for host_number, (_, members) in enumerate(by_host.items()):
            local_rank_of = {
                w.number: n for n, w in enumerate(sorted(members, key=attrgetter("slot")))
            }
            for worker in members:
                worker.rank, worker.generation = rank, self._generation
                local_rank = local_rank_of[worker.number]
                same = [ws for ws in by_host.values() if len(ws) > local_rank]
                place = {
                    "rank": rank,
                    "size": len(workers),
                    "local_rank": local_rank,
                    "local_size": len(members),
                    "cross_rank": same.index(members),
                    "cross_size": len(same),
                    "hostname": worker.host.name,
                    "host": host_number,
                    "hosts": len(by_host),
                    "address": self._address,
                    "port": self._stores[-1].port,
                    "generation": self._generation,
                }
                places.append((worker, place))
                rank += 1
        return places
