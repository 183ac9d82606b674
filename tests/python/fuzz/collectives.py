"""Subject: collectives, messages, objects and optimizers' steps on random groups, from threads.

What must come out of a call stands beside the call (`Call`, `Env`), which looks at all the memory
around its tensors; so the trace says for each lane what was wrong, and the oracle that nothing is.
"""

from __future__ import annotations

import collections
import threading
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fuzz import messages, mistakes, moves, reductions, steps
from fuzz.calls import BUILDERS, Call, Env, Wrong, works_of
from fuzz.core import Entry, Trace, harm
from fuzz.programs import LEFT_OUT, Program, Step, draw
from harness import Context

__all__ = ["draw", "messages", "mistakes", "moves", "reductions", "steps"]
WHERE = ("1", "2", "3", "4", "two", "two and one", "2, faults", "4, faults")
EXAMPLES = 4
TIMEOUT = timedelta(seconds=10)
SHORT = timedelta(seconds=3)  # of groups that may have to wait for a rank that has stopped
HISTORY = 12


class Lane:
    """The steps that one thread of this rank takes."""

    def __init__(
        self, program: Program, index: int, rank: int, groups: list[Any], flip: int | None
    ) -> None:
        self.program, self.index, self.rank, self.groups = program, index, rank, groups
        self.flip = flip
        self.history: collections.deque[str] = collections.deque(maxlen=HISTORY)
        self.wrong: list[str] = []
        self.digests: dict[int, str] = {}
        self.pending: list[tuple[int, Step, Env, Call, list[Any], Any]] = []
        self.count = 0

    def run(self) -> None:
        try:
            for turn, step in enumerate(self.program.lanes[self.index]):
                self._finish([one for one in self.pending if one[0] <= turn])
                if self.index == 0:
                    mine = [g for g in self.groups if g != dist.GroupMember.NON_GROUP_MEMBER]
                    harm(self.program.fault, self.rank, turn, mine)
                spec = self.program.groups[step.group]
                if self.rank in spec.ranks:
                    self._take(turn, step)
            self._finish(list(self.pending))
        except BaseException as error:
            if self.program.fault is not None and self.program.fault.explains(error):
                return
            text = f"{type(error).__name__}: {error}"
            if not isinstance(error, dist.DistBackendError | Wrong):
                text = "".join(traceback.format_exception(error))
            self.wrong.append(f"{text}\n{self.where()}")

    def where(self) -> str:
        return f"lane {self.index} of rank {self.rank}, last steps:\n  " + "\n  ".join(self.history)

    def _take(self, turn: int, step: Step) -> None:
        spec = self.program.groups[step.group]
        env = Env(step, spec, self.groups[step.group], self.rank, self.program.hosts)
        call = BUILDERS[step.kind](env)
        layouts = " ".join(slot.layout for slot, _, _ in env.slots)
        self.history.append(f"{step} [{layouts}]")
        works = works_of(call.start(step.mode != "sync"))
        self.count += 1
        future = None
        if step.mode == "future" and len(works) == 1 and isinstance(works[0], dist.Work):
            future = self._chain(env, works[0])
        entry = (turn + step.delay, step, env, call, works, future)
        if step.mode == "sync" or future is not None:
            # What a callback starts has its place in the group's order before the next step.
            self._finish([entry])
        else:
            self.pending.append(entry)

    def _chain(self, env: Env, work: Any) -> Any:
        """A callback that starts a collective and waits for it."""
        extra = torch.full((1 + env.step.seed % 3000,), float(env.me + 1))

        def callback(future: Any) -> Any:
            future.wait()
            work = dist.all_reduce(extra, group=env.group, async_op=True)
            if env.step.seed % 2:
                work.wait()
                return extra
            return work.get_future()

        then = work.get_future().then(callback)

        def check() -> None:
            result = then.wait()
            if not env.step.seed % 2:
                result.wait()
            expected = env.size * (env.size + 1) / 2
            if not bool((extra == expected).all()):
                raise Wrong(f"a callback's sum is {extra[0]} and not {expected}")

        return check

    def _finish(self, entries: list[Any]) -> None:
        for entry in entries:
            _, step, env, call, works, future = entry
            if entry in self.pending:
                self.pending.remove(entry)
            for work in works:
                self._wait(work, step)
            try:
                if future is not None:
                    future()
                if step.number == self.flip:
                    env.flip()
                call.check()
                for text in env.verify():
                    raise Wrong(text)
            except Wrong as error:
                self.wrong.append(f"{step}: {error}\n{self.where()}")
            self.digests[step.number] = env.digest()

    def _wait(self, work: Any, step: Step) -> None:
        """Waits, in one of the ways there are."""
        if not isinstance(work, dist.Work):  # all_reduce_coalesced gives a Future
            work.wait()
            return
        # Between hosts messages are Gloo's, whose Works have none.
        able = not (self.program.hosts and step.kind == "messages") and "future" not in LEFT_OUT
        early = work.get_future() if able and step.seed % 3 == 0 else None
        work.wait()
        if not work.is_completed():
            raise Wrong("a Work is not complete after wait()")
        if early is not None and not (early.done() and work.get_future().done()):
            self.wrong.append(f"a future is not done after the Work's wait()\n{self.where()}")


def run(program: Program, context: Context, flip: int | None = None) -> Trace:
    """`flip` is a step after which one bit of a result is turned over, to test the test."""
    import fusedpg

    fatal = program.fault is not None and program.fault.fatal
    small = program.fault is not None and program.fault.kind == "no memory"
    groups = [
        dist.new_group(
            list(spec.ranks),
            timeout=SHORT if fatal else TIMEOUT,
            pg_options=fusedpg.Options(
                block_skip=spec.block_skip,
                threads=spec.threads,
                block_size=spec.block_size,
                **({"arena_bytes": 4 << 20} if small else {}),
            ),
        )
        for spec in program.groups
    ]
    lanes = [
        Lane(program, index, context.rank, groups, flip) for index in range(len(program.lanes))
    ]
    threads = [threading.Thread(target=lane.run, daemon=True) for lane in lanes[1:]]
    for thread in threads:
        thread.start()
    lanes[0].run()
    for thread in threads:
        thread.join()
    for lane in lanes:
        yield Entry(f"lane {lane.index}", lane.wrong)
    for lane in lanes:
        for number in sorted(lane.digests):
            yield Entry(f"step {number}", None, alike=lane.digests[number])
    for spec, group in zip(program.groups, groups, strict=True):
        if context.rank in spec.ranks and not fatal:
            dist.destroy_process_group(group)


def oracle(program: Program, world: int, rank: int) -> Trace:
    for index in range(len(program.lanes)):
        yield Entry(f"lane {index}", [])
    for lane in program.lanes:
        for step in lane:
            if rank in program.groups[step.group].ranks:
                yield Entry(f"step {step.number}", None)
