"""Calls that must be refused, on all members, and leave the group usable."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fuzz.calls import Call, Env, Wrong, builder

REFUSED = (dist.DistBackendError, ValueError)
# Found before a call has its place in the group's order: the peers are in another call than the
# next one of the member that was refused, which all of them hear.
LOCAL = ("types", "count", "root", "splits")


def _raises(env: Env, call: Callable[[], Any], what: str, behind: bool = False) -> Call:
    """The call must raise, and the next one work."""

    def start(async_op: bool) -> Any:
        try:
            work = call()
            if work is not None:
                work.wait()
        except REFUSED as error:
            text = str(error)
            if not text.startswith("fused:") and not isinstance(error, ValueError):
                raise Wrong(f"the error of {what} is {text!r}") from error
        else:
            raise Wrong(f"{what} raised nothing on member {env.me}")
        if behind:
            with contextlib.suppress(dist.DistBackendError):
                dist.all_reduce(torch.ones(7), group=env.group)
                raise Wrong(f"nobody noticed {what}")
        for numel in (2, 50_000):
            tensor = torch.ones(numel)
            dist.all_reduce(tensor, group=env.group)
            if not bool((tensor == env.size).all()):
                raise Wrong(f"a sum is wrong after {what}")

    return Call(start)


@builder
def disagreement(env: Env) -> Call:
    what, odd, numel = env.args["what"], env.me == env.args["odd"], env.args["numel"]
    if env.size == 1:
        return Call(lambda async_op: None)
    group, ranks = env.group, env.spec.ranks
    async_op = env.step.seed % 2 == 0
    tensor = torch.ones(numel)

    def call() -> Any:
        if what == "op":
            if odd:
                return dist.all_reduce(tensor, group=group, async_op=async_op)
            return dist.broadcast(tensor, ranks[0], group=group, async_op=async_op)
        if what == "dtype":
            mine = tensor.double() if odd else tensor
            return dist.all_reduce(mine, group=group, async_op=async_op)
        if what == "numel":
            mine = torch.ones(numel + 1) if odd else tensor
            return dist.all_reduce(mine, group=group, async_op=async_op)
        if what == "root":
            root = ranks[0 if odd else 1]
            return dist.broadcast(tensor, root, group=group, async_op=async_op)
        if what == "redop":
            op = dist.ReduceOp.MIN if odd else dist.ReduceOp.MAX
            return dist.all_reduce(tensor, op, group=group, async_op=async_op)
        if what == "split":
            sizes = [2] * env.size
            out = torch.empty(2 * env.size + odd)
            give = torch.ones(2 * env.size + odd)
            more = [2 + odd, *sizes[1:]]
            return dist.all_to_all_single(out, give, more, more, group=group, async_op=async_op)
        return _step(env, numel, 0.1 if odd else 0.2)

    if what == "split" and env.args["odd"] == 0:
        # A change of what a member keeps for itself is no disagreement.
        return Call(lambda async_op: None)
    return _raises(env, call, f"a disagreement about {what}")


def _step(env: Env, numel: int, lr: float) -> Any:
    import fusedpg

    n = fusedpg.shard_range(numel, env.size, env.me)[1]
    state = [[torch.zeros(n)], [torch.zeros(n)], [], [torch.tensor(0.0)]]
    hyper = {"lr": lr, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    fusedpg.fused_adamw_([torch.ones(numel)], [torch.ones(numel)], *state, **hyper, group=env.group)


@builder
def refusal(env: Env) -> Call:
    what, odd, numel = env.args["what"], env.args["odd"], env.args["numel"]
    if env.size == 1:
        return Call(lambda async_op: None)
    wrong = odd is None or odd == env.me
    group = env.group
    fine = torch.ones(numel)
    several = [torch.ones(numel) for _ in range(env.size)]

    def call() -> Any:
        if what == "expanded":
            # An input may be, and what is reduced in place.
            total = numel * env.size
            out = torch.ones(1).expand(total) if wrong else torch.ones(total)
            return dist.all_gather_into_tensor(out, fine, group=group)
        if what == "types":
            kept = [t.double() if wrong else t for t in several]
            return group.allgather([kept], [fine])
        if what == "count":
            kept = several[1:] if wrong else several
            return group.allgather([kept], [fine])
        if what == "root":
            options = dist.BroadcastOptions()
            options.rootRank = 99 if wrong else 0
            return group.broadcast([fine], options)
        if what == "redop":
            op = dist.ReduceOp.BAND if wrong else dist.ReduceOp.SUM
            return dist.all_reduce(fine, op, group=group)
        sizes = [numel] * env.size
        out, give = torch.empty(numel * env.size), torch.ones(numel * env.size)
        sizes[0] += wrong
        return dist.all_to_all_single(out, give, sizes, sizes, group=group)

    return _raises(env, call, f"a wrong argument ({what})", odd == env.me and what in LOCAL)


@builder
def refusal_of_one(env: Env) -> Call:
    return refusal(env)
