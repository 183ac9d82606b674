"""Calls that must be refused, on all members, and leave the group usable.

Where one member alone is wrong the others hear of it from that.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from checks.faults import fused_step
from fusedpg import fusion
from fuzz.calls import Call, Env, Wrong, builder

REFUSED = (dist.DistBackendError, ValueError, RuntimeError, TypeError)
# Seconds until all members have heard of it, on a busy machine; groups wait for longer.
SOON = 5.0


def _raises(env: Env, call: Callable[[], Any], what: str) -> Call:
    """The call must raise on all members, and the next one work."""

    def start(async_op: bool) -> Any:
        begun = time.monotonic()
        try:
            work = call()
            if isinstance(work, dist.Work):
                work.wait()
        except REFUSED as error:
            took = time.monotonic() - begun
            if isinstance(error, dist.DistBackendError) and not str(error).startswith("fused:"):
                raise Wrong(f"the error of {what} is {str(error)!r}") from error
            if took > SOON:
                raise Wrong(f"member {env.me} heard of {what} after {took:.1f} s") from error
        else:
            raise Wrong(f"{what} raised nothing on member {env.me}")
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
        return fused_step(numel, 0.1 if odd else 0.2, group=group)

    if what == "split" and env.args["odd"] == 0:
        # A change of what a member keeps for itself is no disagreement.
        return Call(lambda async_op: None)
    return _raises(env, call, f"a disagreement about {what}")


@builder
def refusal(env: Env) -> Call:
    what, odd = env.args["what"], env.args["odd"]
    if env.size == 1:
        return Call(lambda async_op: None)
    wrong = odd is None or odd == env.me

    def call() -> Any:
        return REFUSALS[what](env, wrong)

    refused = _raises(env, call, f"a wrong argument ({what})")

    def start(async_op: bool) -> None:
        right = REFUSALS[what](env, False)  # which may have to be compiled first
        if isinstance(right, dist.Work):
            right.wait()
        refused.start(async_op)

    return Call(start)


@builder
def refusal_of_one(env: Env) -> Call:
    return refusal(env)


# --- calls of which `wrong` ones are refused ---------------------------------------------------
# Not here is what torch refuses before it calls a backend, on the member that is wrong alone:
# tensors on the device meta or of a sparse layout that c10d does not know, no tensor at all,
# arguments that are no tensors or no lists of them, `scatter` and `gather` of torch.distributed
# with a list on a wrong member, tensors of several types in one call.

Refused = Callable[[Env, bool], Any]
REFUSALS: dict[str, Refused] = {}


def _refused(function: Refused) -> Refused:
    REFUSALS[function.__name__.strip("_")] = function
    return function


def _ones(env: Env, *more: int) -> torch.Tensor:
    return torch.ones(*more, env.args["numel"])


@_refused
def expanded(env: Env, wrong: bool) -> Any:
    # An input may be, and what is reduced in place.
    total = env.args["numel"] * env.size
    out = torch.ones(1).expand(total) if wrong else torch.ones(total)
    return dist.all_gather_into_tensor(out, _ones(env), group=env.group)


@_refused
def types(env: Env, wrong: bool) -> Any:
    kept = [t.double() if wrong else t for t in _ones(env, env.size)]
    return env.group.allgather([kept], [_ones(env)])


@_refused
def count(env: Env, wrong: bool) -> Any:
    kept = list(_ones(env, env.size))
    return env.group.allgather([kept[1:] if wrong else kept], [_ones(env)])


@_refused
def numel_of_output(env: Env, wrong: bool) -> Any:
    out = torch.empty(env.args["numel"] * env.size + wrong)
    return dist.all_gather_into_tensor(out, _ones(env), group=env.group)


@_refused
def numel_of_input(env: Env, wrong: bool) -> Any:
    given = torch.ones(env.args["numel"] * env.size + wrong)
    return dist.reduce_scatter_tensor(_ones(env), given, group=env.group)


@_refused
def type_of_output(env: Env, wrong: bool) -> Any:
    out = torch.empty(env.args["numel"] * env.size, dtype=torch.half if wrong else torch.float)
    return env.group._allgather_base(out, _ones(env))


@_refused
def root(env: Env, wrong: bool) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 99 if wrong else 0
    return env.group.broadcast([_ones(env)], options)


@_refused
def root_of_reduce(env: Env, wrong: bool) -> Any:
    options = dist.ReduceOptions()
    options.rootRank = -1 if wrong else 0
    return env.group.reduce([_ones(env)], options)


@_refused
def list_elsewhere(env: Env, wrong: bool) -> Any:
    """`gather` to member 0; who is wrong has no list there, or one elsewhere."""
    options = dist.GatherOptions()
    options.rootRank = 0
    some = (env.me == 0) != wrong
    return env.group.gather([list(_ones(env, env.size))] if some else [], [_ones(env)], options)


@_refused
def list_of_scatter(env: Env, wrong: bool) -> Any:
    """The list of the root is short; another member has one."""
    options = dist.ScatterOptions()
    options.rootRank = 0
    whole = [list(_ones(env, env.size))] if (env.me == 0 or wrong) else []
    if wrong and env.me == 0:
        whole[0].pop()
    return env.group.scatter([_ones(env)], whole, options)


@_refused
def redop(env: Env, wrong: bool) -> Any:
    op = dist.ReduceOp.BAND if wrong else dist.ReduceOp.SUM
    return dist.all_reduce(_ones(env), op, group=env.group)


@_refused
def redop_of_scatter(env: Env, wrong: bool) -> Any:
    op = dist.ReduceOp.BXOR if wrong else dist.ReduceOp.SUM
    return dist.reduce_scatter(_ones(env), list(_ones(env, env.size)), op, group=env.group)


@_refused
def types_of_sums(env: Env, wrong: bool) -> Any:
    given = [_ones(env), _ones(env).double() if wrong else _ones(env)]
    return env.group.allreduce_coalesced(given)


@_refused
def sparse_redop(env: Env, wrong: bool) -> Any:
    op = dist.ReduceOp.MAX if wrong else dist.ReduceOp.SUM
    return dist.all_reduce(_ones(env).to_sparse(), op, group=env.group)


@_refused
def freed(env: Env, wrong: bool) -> Any:
    given = _ones(env)
    if wrong:
        given.untyped_storage().resize_(0)
    return dist.all_reduce(given, group=env.group)


@_refused
def splits(env: Env, wrong: bool) -> Any:
    sizes = [env.args["numel"]] * env.size
    out, give = torch.empty(sum(sizes)), torch.ones(sum(sizes))
    sizes[0] += wrong
    return dist.all_to_all_single(out, give, sizes, sizes, group=env.group)


@_refused
def scalar_to_split(env: Env, wrong: bool) -> Any:
    given = torch.ones(()) if wrong else torch.ones(env.size)
    return dist.all_to_all_single(torch.empty(env.size), given, group=env.group)


@_refused
def list_of_all_to_all(env: Env, wrong: bool) -> Any:
    lists = [list(_ones(env, env.size)) for _ in range(2)]
    return env.group.alltoall(lists[0][wrong:], lists[1])


@_refused
def coalesced(env: Env, wrong: bool) -> Any:
    outs = [torch.empty(env.args["numel"] * env.size) for _ in range(3)]
    return env.group.allgather_into_tensor_coalesced(outs[wrong:], [_ones(env) for _ in outs])


def _fused(env: Env, rule: str, **changed: Any) -> Any:
    """A fused step, of which some arguments are wrong."""
    import fusedpg

    numel = env.args["numel"]
    part = fusedpg.shard_range(numel, env.size, env.me)[1]
    given: dict[str, Any] = {
        "params": [torch.ones(numel)],
        "grads": [torch.ones(numel)],
        "exp_avgs": [torch.zeros(part)],
        "exp_avg_sqs": [torch.zeros(part)],
        "state_steps": [torch.tensor(0.0)],
    }
    hyper = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    if rule == "fused_sgd_":
        given = {name: given[name] for name in ("params", "grads")}
        given["momentum_buffer_list"] = [torch.zeros(part)]
        hyper = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "dampening": 0.0}
        hyper |= {"nesterov": False, "is_first_step": True}
    elif rule != "fused_lamb_":
        given["max_exp_avg_sqs"] = []
    async_op = env.step.seed % 2 == 0
    return getattr(fusedpg, rule)(
        **{**given, **hyper, "async_op": async_op, **changed}, group=env.group
    )


def _rule(env: Env) -> str:
    return ("fused_sgd_", "fused_adam_", "fused_adamw_", "fused_lamb_")[env.step.seed // 2 % 4]


@_refused
def step_without_parameters(env: Env, wrong: bool) -> Any:
    return _fused(env, _rule(env), **({"params": []} if wrong else {}))


@_refused
def step_of_other_gradients(env: Env, wrong: bool) -> Any:
    grads = [torch.ones(env.args["numel"] + wrong)]
    return _fused(env, _rule(env), grads=grads)


@_refused
def step_with_whole_state(env: Env, wrong: bool) -> Any:
    name = "momentum_buffer_list" if _rule(env) == "fused_sgd_" else "exp_avgs"
    return _fused(
        env, _rule(env), **({name: [torch.zeros(env.args["numel"] + 1)]} if wrong else {})
    )


@_refused
def step_of_other_kind(env: Env, wrong: bool) -> Any:
    return _fused(env, _rule(env), **({"weight_decay": "much"} if wrong else {}))


@_refused
def step_that_reduces_otherwise(env: Env, wrong: bool) -> Any:
    return _fused(env, _rule(env), **({"reduce": "median"} if wrong else {}))


def _skipping(env: Env, **changed: Any) -> Any:
    import fusedpg

    return fusedpg.sparse_all_reduce(_ones(env), group=env.group, **changed)


@_refused
def threshold(env: Env, wrong: bool) -> Any:
    return _skipping(env, **({"threshold": -1.0} if wrong else {}))


@_refused
def block_size(env: Env, wrong: bool) -> Any:
    return _skipping(env, block_size=1 if wrong else 256)


@_refused
def residual(env: Env, wrong: bool) -> Any:
    return _skipping(env, threshold=0.5, residual=torch.zeros(env.args["numel"] + wrong))


@_refused
def bitmap(env: Env, wrong: bool) -> Any:
    return _skipping(env, **({"bitmap": torch.ones(99_999, dtype=torch.bool)} if wrong else {}))


@_refused
def skipping_redop(env: Env, wrong: bool) -> Any:
    return _skipping(env, op=dist.ReduceOp.MAX if wrong else dist.ReduceOp.SUM)


@_refused
def kind_of_block(env: Env, wrong: bool) -> Any:
    return _skipping(env, block_size="large" if wrong else 256)


@_refused
def quantized(env: Env, wrong: bool) -> Any:
    import fusedpg

    given = _ones(env).long() if wrong else _ones(env)
    return fusedpg.quantized_all_reduce(given, group=env.group)


@_refused
def quantized_block(env: Env, wrong: bool) -> Any:
    import fusedpg

    return fusedpg.quantized_all_reduce(_ones(env), 0 if wrong else 256, group=env.group)


def _fit(g: Any, w: Any, lr: float = 0.5) -> Any:
    return w - lr * fusion.all_reduce(g)


@functools.cache
def _program() -> Any:
    import fusedpg

    return fusedpg.fuse(_fit).scheduled()


def _function(env: Env, **changed: Any) -> Any:
    given = {"g": _ones(env), "w": _ones(env), "group": env.group}
    return _program()(**{**given, **changed})


@_refused
def function_of_other_shape(env: Env, wrong: bool) -> Any:
    return _function(env, w=torch.ones(env.args["numel"] + wrong))


@_refused
def function_of_other_kind(env: Env, wrong: bool) -> Any:
    return _function(env, **({"lr": "much"} if wrong else {}))


@_refused
def function_of_more(env: Env, wrong: bool) -> Any:
    return _function(env, **({"momentum": 0.9} if wrong else {}))


@_refused
def function_of_sparse(env: Env, wrong: bool) -> Any:
    return _function(env, g=_ones(env).to_sparse() if wrong else _ones(env))


@_refused
def function_with_schedule(env: Env, wrong: bool) -> Any:
    import fusedpg

    given = {"g": _ones(env), "w": _ones(env), "group": env.group}
    function = fusedpg.fuse(_fit).scheduled(*([fusion.Overlap()] if wrong else []))
    return function(**given)


@_refused
def function_into(env: Env, wrong: bool) -> Any:
    target = torch.ones(env.args["numel"] + wrong)
    return _program().into(target, _ones(env), _ones(env), group=env.group)


@_refused
def row_parallel(env: Env, wrong: bool) -> Any:
    from fusedpg.tensor_parallel import RowParallelLinear

    layer = RowParallelLinear(4 * env.size, 3, group=env.group)
    return layer(torch.ones(2, 4 + wrong))
