"""Point to point."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from checks.cases import same
from fuzz.calls import Call, Env, Wrong, builder


@builder
def messages(env: Env) -> Call:
    form, shapes = env.args["form"], env.args["shapes"]
    pairs = list(enumerate(env.args["pairs"]))
    ranks = env.spec.ranks
    tag = env.step.number % 1000
    if form == "any source":
        # One message from every sender, all of one size, to one receiver.
        receiver = pairs[0][1][1] if pairs else 0
        return _any_source(env, receiver, shapes[0] if shapes else (1,), tag)
    # Between hosts they are Gloo's, which takes contiguous tensors alone.
    mine: list[tuple[int, bool, int, torch.Tensor]] = []
    for number, (source, target) in pairs:
        if env.me == source:
            tensor = env.given(number, shapes[number], dense=env.hosts)
            mine.append((number, True, ranks[target], tensor))
        elif env.me == target:
            tensor = env.result(
                shapes[number],
                lambda s=source, n=number: env.contents(s, n, shapes[n]),
                dense=env.hosts,
            )
            mine.append((number, False, ranks[source], tensor))
    # Messages of one pair and tag arrive in order; between pairs there is none.
    functions: Any = {
        "blocking": (dist.send, dist.recv),
        "immediate": (dist.isend, dist.irecv),
        "batch": (dist.isend, dist.irecv),
    }[form]

    def start(async_op: bool) -> Any:
        if form == "batch":
            operations = [
                dist.P2POp(functions[0] if sends else functions[1], t, peer, env.group)
                for _, sends, peer, t in mine
            ]
            return dist.batch_isend_irecv(operations) if operations else None
        works = []
        for _, sends, peer, tensor in mine:
            if sends:
                works.append(functions[0](tensor, peer, env.group, tag))
            else:
                works.append(functions[1](tensor, peer, env.group, tag))
        return works if form == "immediate" else None

    return Call(start)


def _any_source(env: Env, receiver: int, shape: Any, tag: int) -> Call:
    if env.size == 1:
        return Call(lambda async_op: None)
    senders = [index for index in range(env.size) if index != receiver]
    if env.me != receiver:
        tensor = env.given(0, shape, dense=env.hosts)

        def start(async_op: bool) -> Any:
            dist.send(tensor, env.spec.ranks[receiver], env.group, tag)

        return Call(start)
    came: list[tuple[int, torch.Tensor]] = []

    def receive(async_op: bool) -> Any:
        for _ in senders:
            buffer = torch.empty(tuple(shape), dtype=env.dtype)
            source = dist.recv(buffer, None, env.group, tag)
            came.append((env.spec.ranks.index(source), buffer))

    def check() -> None:
        if sorted(source for source, _ in came) != senders:
            raise Wrong(f"messages came from {[source for source, _ in came]}, not {senders}")
        for source, buffer in came:
            if not same(buffer, env.contents(source, 0, shape).contiguous()):
                raise Wrong(f"a message from member {source} differs")

    return Call(receive, check)
