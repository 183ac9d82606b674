"""Steps that reduce."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives

from checks.cases import reduce_op
from fuzz import oracle
from fuzz.calls import Call, Env, builder, manager, works_of


def _summand(env: Env, label: object, shape: Any) -> torch.Tensor:
    """A tensor that becomes the reduction of everybody's."""
    return env.result(
        shape,
        lambda: oracle.reduced(env.args["redop"], env.everybody(label, shape)),
        start=env.contents(env.me, label, shape),
        equal=True,
    )


@builder
def all_reduce(env: Env) -> Call:
    import fusedpg

    name, shape = env.args["redop"], env.args["shape"]
    op, tensor = reduce_op(name), _summand(env, 0, shape)
    # The operator of its own fits dist.all_reduce, whichever of them other members call.
    operator = name != "PREMUL_SUM" and env.rng.random() < 0.5

    def start(async_op: bool) -> Any:
        if operator and not async_op:
            return fusedpg.all_reduce_(tensor, name.lower(), env.group)
        return dist.all_reduce(tensor, op, group=env.group, async_op=async_op)

    return Call(start)


@builder
def all_reduce_coalesced(env: Env) -> Call:
    op = reduce_op(env.args["redop"])
    tensors = [_summand(env, i, shape) for i, shape in enumerate(env.args["shapes"])]

    def each() -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, op, group=env.group)

    def start(async_op: bool) -> Any:
        if env.args["form"] == "manager":
            return manager(env, async_op, each)
        return dist.all_reduce_coalesced(tensors, op, group=env.group, async_op=async_op)

    return Call(start)


@builder
def reduce(env: Env) -> Call:
    op, shape = reduce_op(env.args["redop"]), env.args["shape"]
    mine = env.contents(env.me, 0, shape)
    is_root = env.me == env.args["root"]
    tensor = env.result(
        shape,
        lambda: oracle.reduced(env.args["redop"], env.everybody(0, shape)) if is_root else None,
        start=mine,
    )

    def start(async_op: bool) -> Any:
        return dist.reduce(tensor, env.root(), op, group=env.group, async_op=async_op)

    return Call(start)


@builder
def reduce_scatter(env: Env) -> Call:
    op, shapes = reduce_op(env.args["redop"]), env.args["shapes"]
    inputs = [env.given(i, shape) for i, shape in enumerate(shapes)]
    own = shapes[env.me]
    output = env.result(own, lambda: oracle.reduced(env.args["redop"], env.everybody(env.me, own)))

    def start(async_op: bool) -> Any:
        return dist.reduce_scatter(output, inputs, op, group=env.group, async_op=async_op)

    return Call(start)


@builder
def reduce_scatter_tensor(env: Env) -> Call:
    op = reduce_op(env.args["redop"])
    pairs = []
    for i, shape in enumerate(env.args["shapes"]):
        whole = (shape[0] * env.size, *shape[1:])

        def part(i: int = i, shape: Any = shape, whole: Any = whole) -> torch.Tensor:
            total = oracle.reduced(env.args["redop"], env.everybody(i, whole))
            return total.narrow(0, env.me * shape[0], shape[0])

        if env.args["inplace"]:

            def all_of_it(i: int = i, whole: Any = whole, shape: Any = shape) -> torch.Tensor:
                mine = env.contents(env.me, i, whole).clone()
                mine.narrow(0, env.me * shape[0], shape[0]).copy_(part(i, shape, whole))
                return mine

            given = env.result(whole, all_of_it, start=env.contents(env.me, i, whole), dense=True)
            pairs.append((given.narrow(0, env.me * shape[0], shape[0]), given))
        else:
            pairs.append((env.result(shape, part), env.given(i, whole)))

    def each() -> None:
        for output, given in pairs:
            dist.reduce_scatter_tensor(output, given, op, group=env.group)

    def start(async_op: bool) -> Any:
        if len(pairs) > 1:
            return manager(env, async_op, each)
        output, given = pairs[0]
        return dist.reduce_scatter_tensor(output, given, op, group=env.group, async_op=async_op)

    return Call(start)


@builder
def sparse_all_reduce(env: Env) -> Call:
    import fusedpg

    args, shape = env.args, env.args["shape"]
    block, threshold = args["block"], args["threshold"]
    residual = None
    if threshold:
        left = env.contents(env.me, "residual", shape)
        total = env.contents(env.me, 0, shape) + left
        residual = env.result(
            (total.numel(),),
            lambda: (total - oracle.above(total, block, threshold)).flatten(),
            start=left.flatten(),
            dense=True,
        )

    def expected() -> torch.Tensor:
        inputs = env.everybody(0, shape)
        if threshold:
            lefts = env.everybody("residual", shape)
            inputs = [oracle.above(x + r, block, threshold) for x, r in zip(inputs, lefts)]
        return oracle.reduced(args["redop"], inputs)

    tensor = env.result(
        shape, expected, start=env.contents(env.me, 0, shape), equal=True, dense=bool(threshold)
    )

    def start(async_op: bool) -> Any:
        return fusedpg.sparse_all_reduce(
            tensor,
            reduce_op(args["redop"]),
            env.group,
            async_op,
            block_size=block,
            threshold=threshold,
            residual=residual,
        )

    return Call(start)


@builder
def functional(env: Env) -> Call:
    """torch.distributed._functional_collectives: what torch.compile calls."""
    args, shapes, redop = env.args, env.args["shapes"], env.args["redop"].lower()
    what = args["what"]
    f = functional_collectives
    if redop == "premul_sum":
        redop, args = "sum", {**args, "redop": "SUM"}
    whole = [(shape[0] * env.size, *shape[1:]) for shape in shapes]
    given: list[torch.Tensor] = []
    want: list[torch.Tensor] = []
    splits = args["splits"]
    rows = [(sum(splits[index]), *shapes[0][1:]) for index in range(env.size)]
    for i, shape in enumerate(shapes):
        if what.startswith("reduce_scatter"):
            given.append(env.given(i, whole[i]))
            total = oracle.reduced(args["redop"], env.everybody(i, whole[i]))
            want.append(total.narrow(0, env.me * shape[0], shape[0]))
        elif what == "all_to_all":
            given.append(env.given(i, rows[env.me]))
            inputs = [env.contents(index, i, rows[index]) for index in range(env.size)]
            want.append(torch.cat(oracle.exchanged(inputs, splits, env.me)))
        else:
            given.append(env.given(i, shape))
            inputs = env.everybody(i, shape)
            if what.startswith("all_gather"):
                want.append(torch.cat(inputs))
            elif what == "broadcast":
                want.append(inputs[args["root"]])
            else:
                want.append(oracle.reduced(args["redop"], inputs))
    got: list[torch.Tensor] = []

    def start(async_op: bool) -> Any:
        g, one = env.group, given[0]
        columns = [row[env.me] for row in splits]
        result: Any = {
            "all_reduce": lambda: f.all_reduce(one, redop, g),
            "all_reduce_coalesced": lambda: f.all_reduce_coalesced(given, redop, g),
            "all_gather": lambda: f.all_gather_tensor(one, 0, g),
            "all_gather_coalesced": lambda: f.all_gather_into_tensor_coalesced(given, g),
            "reduce_scatter": lambda: f.reduce_scatter_tensor(one, redop, 0, g),
            "reduce_scatter_coalesced": lambda: f.reduce_scatter_tensor_coalesced(
                given, redop, [0] * len(given), g
            ),
            "all_to_all": lambda: f.all_to_all_single(one, columns, splits[env.me], g),
            "broadcast": lambda: f.broadcast(one, args["root"], g),
        }[what]()
        for tensor in works_of(result):
            got.append(f.wait_tensor(tensor))
        return None

    def check() -> None:
        from checks.cases import same
        from fuzz.calls import Wrong

        for i, (found, expected) in enumerate(zip(got, want, strict=True)):
            if not same(found.contiguous(), expected.contiguous()):
                raise Wrong(f"functional {what}: result {i} of {len(want)} differs")

    return Call(start, check)
