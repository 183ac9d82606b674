"""Steps that only move data."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fuzz import oracle
from fuzz.calls import Call, Env, Wrong, builder, manager


@builder
def broadcast(env: Env) -> Call:
    shape, root = env.args["shape"], env.args["root"]
    if env.me == root:
        tensor = env.given(0, shape)
    else:
        tensor = env.result(shape, lambda: env.contents(root, 0, shape))

    def start(async_op: bool) -> Any:
        return dist.broadcast(tensor, env.root(), group=env.group, async_op=async_op)

    return Call(start)


@builder
def all_gather(env: Env) -> Call:
    shapes = env.args["shapes"]
    given = env.given(0, shapes[env.me])
    outputs = [
        env.result(shape, lambda p=p, shape=shape: env.contents(p, 0, shape))
        for p, shape in enumerate(shapes)
    ]

    def start(async_op: bool) -> Any:
        return dist.all_gather(outputs, given, group=env.group, async_op=async_op)

    return Call(start)


@builder
def all_gather_into_tensor(env: Env) -> Call:
    pairs = []
    for i, shape in enumerate(env.args["shapes"]):
        whole = (shape[0] * env.size, *shape[1:])

        def gathered(i: int = i, shape: Any = shape) -> torch.Tensor:
            return torch.cat(env.everybody(i, shape))

        if env.args["inplace"]:
            start_with = torch.zeros(whole, dtype=env.dtype)
            own = env.contents(env.me, i, shape)
            start_with.narrow(0, env.me * shape[0], shape[0]).copy_(own)
            output = env.result(whole, gathered, start=start_with, dense=True)
            pairs.append((output, output.narrow(0, env.me * shape[0], shape[0])))
        else:
            pairs.append((env.result(whole, gathered), env.given(i, shape)))

    def each() -> None:
        for output, given in pairs:
            dist.all_gather_into_tensor(output, given, group=env.group)

    def start(async_op: bool) -> Any:
        if len(pairs) > 1:
            return manager(env, async_op, each)
        output, given = pairs[0]
        return dist.all_gather_into_tensor(output, given, group=env.group, async_op=async_op)

    return Call(start)


@builder
def gather(env: Env) -> Call:
    shape, root = env.args["shape"], env.args["root"]
    given = env.given(0, shape)
    outputs = None
    if env.me == root:
        outputs = [
            env.result(shape, lambda p=p: env.contents(p, 0, shape)) for p in range(env.size)
        ]

    def start(async_op: bool) -> Any:
        return dist.gather(given, outputs, env.root(), group=env.group, async_op=async_op)

    return Call(start)


@builder
def scatter(env: Env) -> Call:
    shape, root = env.args["shape"], env.args["root"]
    inputs = None
    if env.me == root:
        inputs = [env.given(p, shape) for p in range(env.size)]
    output = env.result(shape, lambda: env.contents(root, env.me, shape))

    def start(async_op: bool) -> Any:
        return dist.scatter(output, inputs, env.root(), group=env.group, async_op=async_op)

    return Call(start)


@builder
def all_to_all(env: Env) -> Call:
    splits = env.args["splits"]
    inputs = [env.given((env.me, p), (splits[env.me][p],)) for p in range(env.size)]
    outputs = [
        env.result(
            (splits[p][env.me],),
            lambda p=p: env.contents(p, (p, env.me), (splits[p][env.me],)),
        )
        for p in range(env.size)
    ]

    def start(async_op: bool) -> Any:
        return dist.all_to_all(outputs, inputs, group=env.group, async_op=async_op)

    return Call(start)


@builder
def all_to_all_single(env: Env) -> Call:
    form, row = env.args["form"], env.args["row"]
    splits = env.args["splits"]
    if form == "even":
        splits = [[env.args["rows"]] * env.size for _ in range(env.size)]
    shapes = [(sum(own), *row) for own in splits]
    columns = [own[env.me] for own in splits]

    def expected() -> torch.Tensor:
        inputs = [env.contents(p, 0, shapes[p]) for p in range(env.size)]
        return torch.cat(oracle.exchanged(inputs, splits, env.me))

    given = env.given(0, shapes[env.me])
    output = env.result((sum(columns), *row), expected)
    sizes = (columns, splits[env.me]) if form == "uneven" else (None, None)

    def start(async_op: bool) -> Any:
        return dist.all_to_all_single(output, given, *sizes, group=env.group, async_op=async_op)

    return Call(start)


@builder
def barrier(env: Env) -> Call:
    return Call(lambda async_op: dist.barrier(group=env.group, async_op=async_op))


@builder
def objects(env: Env) -> Call:
    what, lengths = env.args["what"], env.args["lengths"]

    def thing(index: int) -> Any:
        return {"from": index, "seed": env.step.seed, "text": "x" * lengths[index]}

    got: list[Any] = []
    is_root = env.me == env.args["root"]

    def start(async_op: bool) -> Any:
        mine, everything = thing(env.me), [thing(p) for p in range(env.size)]
        got[:] = [None] * env.size
        if what == "all_gather":
            dist.all_gather_object(got, mine, group=env.group)
        elif what == "gather":
            dist.gather_object(mine, got if is_root else None, env.root(), group=env.group)
        elif what == "broadcast":
            got[:] = everything if is_root else got
            dist.broadcast_object_list(got, env.root(), group=env.group)
        else:
            del got[1:]
            dist.scatter_object_list(
                got, everything if is_root else None, env.root(), group=env.group
            )
        return None

    def check() -> None:
        want = [thing(p) for p in range(env.size)]
        if what == "scatter":
            want = [thing(env.me)]
        elif what == "gather" and not is_root:
            want = [None] * env.size
        if got != want:
            raise Wrong(f"{what} of objects gave {got!r:.300}")

    return Call(start, check)
