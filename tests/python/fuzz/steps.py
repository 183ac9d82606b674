"""Fused optimizer steps."""

from __future__ import annotations

from typing import Any

import torch

from checks.cases import same
from fuzz import oracle
from fuzz.calls import Call, Env, Wrong, builder


@builder
def fused_step(env: Env) -> Call:
    import fusedpg

    args, shapes = dict(env.args), env.args["shapes"]
    args["nesterov"] = args["nesterov"] and args["momentum"] > 0
    rule = args["rule"]
    compute = torch.float64 if env.dtype == torch.float64 else torch.float32
    start_with = [env.contents(0, ("param", i), shape).clone() for i, shape in enumerate(shapes)]
    model = oracle.Optimizer(args, start_with)
    halted = args["found_inf"] is not None
    params = [
        # What comes out is compared with a tolerance, and bitwise between members.
        env.result(shape, lambda: None, start=start, equal=True, dense=True)
        for shape, start in zip(shapes, start_with)
    ]
    guarded = [env.slots.pop() for _ in params][::-1]

    def shard() -> list[torch.Tensor]:
        lengths = [fusedpg.shard_range(p.numel(), env.size, env.me)[1] for p in params]
        return [torch.zeros(n, dtype=compute) for n in lengths]

    masters: list[torch.Tensor] = []
    if args["masters"] and env.dtype != compute:
        for p in params:
            begin, n = fusedpg.shard_range(p.numel(), env.size, env.me)
            masters.append(p.flatten()[begin : begin + n].to(compute))
    moments = [shard() for _ in range(3)]
    counters = [torch.tensor(0.0) for _ in params]
    weights = [float(1 + index) for index in range(env.size)] if args["weights"] else None
    inf = torch.tensor(1.0 if args["found_inf"] == env.me else 0.0) if halted else None
    grads = [[env.given((k, i), s) for i, s in enumerate(shapes)] for k in range(args["steps"])]
    lr: Any = torch.tensor(args["lr"], dtype=torch.float64) if args["tensor_lr"] else args["lr"]
    common = {
        "lr": lr,
        "weight_decay": args["weight_decay"],
        "maximize": args["maximize"],
        "grad_scale": torch.tensor(args["scale"]) if args["scale"] else None,
        "found_inf": inf,
        "master_params": masters,
        "reduce": args["reduce"],
        "weight": weights[env.me] if weights and args["reduce"] == "mean" else None,
        "group": env.group,
    }
    if rule != "lamb":
        common["block_skip"] = args["block_skip"]

    def one(turn: int, async_op: bool) -> Any:
        if rule == "sgd":
            return fusedpg.fused_sgd_(
                params,
                grads[turn],
                moments[0] if args["momentum"] else [],
                momentum=args["momentum"],
                dampening=0.0,
                nesterov=args["nesterov"],
                is_first_step=turn == 0,
                async_op=async_op,
                **common,
            )
        lists = [params, grads[turn], moments[0], moments[1]]
        betas = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-3}
        if rule == "lamb":
            return fusedpg.fused_lamb_(*lists, counters, async_op=async_op, **betas, **common)
        function = fusedpg.fused_adam_ if rule == "adam" else fusedpg.fused_adamw_
        largest = moments[2] if args["amsgrad"] else []
        betas["amsgrad"] = args["amsgrad"]
        return function(*lists, largest, counters, async_op=async_op, **betas, **common)

    def start(async_op: bool) -> Any:
        return [work for k in range(args["steps"]) if (work := one(k, async_op)) is not None]

    def check() -> None:
        env.slots.extend(guarded)
        if halted:
            if inf is not None and float(inf) != 1:
                raise Wrong(f"found_inf is {float(inf)} and not 1")
            if any(float(counter) for counter in counters):
                raise Wrong("a counter moved though an infinity was found")
            return
        for k in range(args["steps"]):
            every = [
                [env.contents(p, (k, i), s) for i, s in enumerate(shapes)] for p in range(env.size)
            ]
            model.step(every, weights)
        for index, (param, (slot, _, equal)) in enumerate(zip(params, guarded)):
            text = model.wrong(index, param)
            if text is not None:
                raise Wrong(text)
            # The memory around it; the tensor itself is as good as it must be.
            found = param.clone()
            env.slots[len(env.slots) - len(guarded) + index] = (slot, lambda f=found: f, equal)
            if masters:
                begin, n = fusedpg.shard_range(param.numel(), env.size, env.me)
                if not same(param.flatten()[begin : begin + n], masters[index].to(env.dtype)):
                    raise Wrong(f"parameter {index} is not its rounded master")

    return Call(start, check)
