"""fused_adamw_ against torch.optim.AdamW on averaged gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from checks.cases import digest, same
from harness import Context

SHAPES: tuple[tuple[int, ...], ...] = ((1021,), (7,), (31, 33), (2, 3, 4, 5), (4099,), (1,))


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run of some tensors."""

    shapes: tuple[tuple[int, ...], ...] = SHAPES
    steps: int = 100
    memory: str = "ordinary"  # or arena, mixed
    layout: str = "contiguous"  # or channels_last, transposed
    lr: float = 1e-2
    betas: tuple[float, float] = (0.8, 0.95)
    eps: float = 1e-7
    weight_decay: float = 0.1
    amsgrad: bool = False
    maximize: bool = False
    lr_tensor: bool = False
    reduce: str = "mean"
    async_op: bool = False
    scale: float | None = None
    seed: int = 0


def randn(*key: int, numel: int) -> torch.Tensor:
    seed = 0
    for part in key:
        seed = seed * 1_000_003 + part + 1
    generator = torch.Generator().manual_seed(seed % (1 << 62))
    return torch.randn(numel, generator=generator)


class Model:
    """Parameters, gradients and this rank's slices of the state."""

    def __init__(self, context: Context, run: Run) -> None:
        import fusedpg

        self.context = context
        self.run = run
        rank, size = context.rank, context.world_size
        self.params = [self.place(i, shape) for i, shape in enumerate(run.shapes)]
        self.grads = [self.place(i + 1, shape) for i, shape in enumerate(run.shapes)]
        for i, param in enumerate(self.params):
            param.copy_(self.initial(i))
        self.ranges = [fusedpg.shard_range(param.numel(), size, rank) for param in self.params]
        self.exp_avgs, self.exp_avg_sqs, self.max_exp_avg_sqs = (
            [torch.zeros(length) for _, length in self.ranges] for _ in range(3)
        )
        self.steps = [torch.tensor(0.0) for _ in self.params]

    def place(self, index: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor in the memory and layout of the run."""
        arena = self.run.memory == "arena" or (
            self.run.memory == "mixed" and (index + self.context.rank) % 2 == 0
        )
        empty = self.context.empty
        if self.run.layout == "channels_last" and len(shape) == 4:
            a, b, c, d = shape
            return empty(a, c, d, b, arena=arena).permute(0, 3, 1, 2)
        if self.run.layout == "transposed" and len(shape) == 2:
            return empty(*shape[::-1], arena=arena).t()
        return empty(*shape, arena=arena)

    def initial(self, i: int) -> torch.Tensor:
        shape = self.run.shapes[i]
        return randn(self.run.seed, i, numel=torch.Size(shape).numel()).reshape(shape)

    def gradient(self, step: int, rank: int, i: int) -> torch.Tensor:
        shape = self.run.shapes[i]
        numel = torch.Size(shape).numel()
        return randn(self.run.seed, i, step, rank, numel=numel).reshape(shape)

    def averaged(self, step: int, i: int) -> torch.Tensor:
        ranks = range(self.context.world_size)
        total = torch.zeros(self.run.shapes[i], dtype=torch.float64)
        for rank in ranks:
            total += self.gradient(step, rank, i)
        return (total / len(ranks) if self.run.reduce == "mean" else total).float()

    def step(self, **override: Any) -> Any:
        """One call of the op on what the gradients hold."""
        import fusedpg

        run = self.run
        lr = torch.tensor(run.lr) if run.lr_tensor else run.lr
        options: dict[str, Any] = {
            "lr": lr,
            "beta1": run.betas[0],
            "beta2": run.betas[1],
            "weight_decay": run.weight_decay,
            "eps": run.eps,
            "amsgrad": run.amsgrad,
            "maximize": run.maximize,
            "reduce": run.reduce,
            "async_op": run.async_op,
        }
        work = fusedpg.fused_adamw_(
            self.params,
            self.grads,
            self.exp_avgs,
            self.exp_avg_sqs,
            self.max_exp_avg_sqs if run.amsgrad else [],
            self.steps,
            **(options | override),
        )
        if (options | override)["async_op"]:
            work.wait()
        return work

    def set_gradients(self, step: int) -> None:
        for i, grad in enumerate(self.grads):
            grad.copy_(self.gradient(step, self.context.rank, i) * (self.run.scale or 1))

    def state(self) -> list[torch.Tensor]:
        return [
            *self.params,
            *self.exp_avgs,
            *self.exp_avg_sqs,
            *self.max_exp_avg_sqs,
            *self.steps,
        ]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in the order of memory."""
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    return tensor.permute(order).contiguous().flatten()


def distance(mine: torch.Tensor, want: torch.Tensor) -> float:
    return float((mine - want).norm() / want.norm().clamp(min=1e-30))


def parity(context: Context, run: Run) -> tuple[str, str]:
    """A run against torch; digests of the parameters and of all state."""
    model = Model(context, run)
    oracle = [model.initial(i).clone().requires_grad_() for i in range(len(run.shapes))]
    torch_adamw = torch.optim.AdamW(
        oracle,
        lr=run.lr,
        betas=run.betas,
        eps=run.eps,
        weight_decay=run.weight_decay,
        amsgrad=run.amsgrad,
        maximize=run.maximize,
        foreach=False,
        fused=False,
    )
    extra: dict[str, Any] = {}
    if run.scale is not None:
        extra["grad_scale"] = torch.tensor(run.scale)
        extra["found_inf"] = torch.tensor(0.0)
    for step in range(run.steps):
        model.set_gradients(step)
        kept = [grad.clone() for grad in model.grads]
        versions = [param._version for param in model.params]
        with torch.no_grad():
            model.step(**extra)
        for grad, before in zip(model.grads, kept, strict=True):
            assert same(grad, before), "a gradient was written"
        for param, version in zip(model.params, versions, strict=True):
            assert param._version > version, "autograd was not told about the update"
        for i, param in enumerate(oracle):
            param.grad = model.averaged(step, i)
        torch_adamw.step()
    names = {"exp_avg": model.exp_avgs, "exp_avg_sq": model.exp_avg_sqs}
    if run.amsgrad:
        names["max_exp_avg_sq"] = model.max_exp_avg_sqs
    for i, want in enumerate(oracle):
        assert distance(model.params[i], want.detach()) <= 1e-6, (i, run)
        assert float(model.steps[i]) == run.steps
        offset, length = model.ranges[i]
        for name, mine in names.items():
            full = torch.empty_strided(want.shape, model.params[i].stride())
            full.copy_(torch_adamw.state[want][name])
            shard = flat(full)[offset : offset + length]
            assert mine[i].shape == shard.shape
            if length:
                assert distance(mine[i], shard) <= 2e-6, (i, name, run)
    return digest(model.params), digest(model.state())


def unmoved(context: Context) -> None:
    """lr=0 and no decay move nothing; the moments and counters still advance."""
    model = Model(context, Run(lr=0.0, weight_decay=0.0))
    before = [param.clone() for param in model.params]
    model.set_gradients(0)
    model.step()
    for param, old in zip(model.params, before, strict=True):
        assert same(param, old)
    assert all(float(step) == 1 for step in model.steps)
    if any(length for _, length in model.ranges):
        assert any(bool(one.any()) for one in model.exp_avgs)


def overflow(context: Context, memory: str) -> None:
    """An overflow seen by one rank stops all of them and nothing moves."""
    model = Model(context, Run(memory=memory))
    model.set_gradients(0)
    scale = torch.tensor(4.0)
    model.step(grad_scale=scale, found_inf=torch.tensor(0.0))
    before = [one.clone() for one in model.state()]
    last = context.world_size - 1
    if context.rank == last:
        model.grads[0].view(-1)[3] = torch.inf
    found = torch.tensor(1.0 if context.rank == last else 0.0)
    model.step(grad_scale=scale, found_inf=found)
    assert float(found) == 1.0, "found_inf is not global"
    for now, old in zip(model.state(), before, strict=True):
        assert same(now, old), "a skipped step changed something"
    model.set_gradients(1)
    model.step(grad_scale=scale, found_inf=torch.tensor(0.0))
    assert all(float(step) == 2 for step in model.steps)
    assert not same(model.params[0], before[0])


def many_steps_in_flight(context: Context) -> None:
    """Asynchronous calls on different tensors, waited for at the end."""
    models = [Model(context, Run(seed=seed)) for seed in range(8)]
    twins = [Model(context, Run(seed=seed)) for seed in range(8)]
    import fusedpg

    works = []
    for model in models:
        model.set_gradients(0)
        run = model.run
        works.append(
            fusedpg.fused_adamw_(
                model.params,
                model.grads,
                model.exp_avgs,
                model.exp_avg_sqs,
                [],
                model.steps,
                lr=run.lr,
                beta1=run.betas[0],
                beta2=run.betas[1],
                weight_decay=run.weight_decay,
                eps=run.eps,
                async_op=True,
            )
        )
    for work in works:
        work.wait()
    for model, twin in zip(models, twins, strict=True):
        twin.set_gradients(0)
        twin.step()
        for mine, want in zip(model.state(), twin.state(), strict=True):
            assert same(mine, want)


def with_collectives_between(context: Context) -> None:
    """Fused steps and ordinary collectives on one queue, and in a subgroup."""
    model = Model(context, Run())
    for step in range(5):
        model.set_gradients(step)
        tensor = torch.ones(1000)
        work = dist.all_reduce(tensor, async_op=True)
        model.step()
        work.wait()
        assert bool((tensor == context.world_size).all())
    group = dist.new_group()
    model.step(group=group)
    dist.destroy_process_group(group)


def leaf_parameters(context: Context) -> None:
    """Parameters that require gradients work under no_grad."""
    model = Model(context, Run(shapes=((1021,),)))
    model.params[0].requires_grad_()
    model.params[0].pow(2).sum().backward()
    assert model.params[0].grad is not None
    model.grads[0] = model.params[0].grad
    before = model.params[0].detach().clone()
    with torch.no_grad():
        model.step()
    assert not same(model.params[0].detach(), before)
    assert model.params[0].requires_grad


def other_layout(context: Context) -> None:
    """A gradient whose strides are not the parameter's is understood or refused."""
    model, twin = (Model(context, Run(shapes=((64, 3), (9, 31)))) for _ in range(2))
    for one in (model, twin):
        one.set_gradients(0)
    model.grads[0] = model.grads[0].t().contiguous().t()
    twin.step()
    try:
        model.step()
    except (ValueError, RuntimeError) as error:
        assert "grads" in str(error)
    else:
        for mine, want in zip(model.state(), twin.state(), strict=True):
            assert same(mine, want)


def wrong(context: Context, what: str) -> str:
    """A call with one wrong argument; the text of the exception."""
    model = Model(context, Run(shapes=((1021,), (64, 3))))
    model.set_gradients(0)
    override: dict[str, Any] = {}
    if what == "fewer gradients":
        model.grads.pop()
    elif what == "fewer moments":
        model.exp_avgs.pop()
    elif what == "fewer steps":
        model.steps.pop()
    elif what == "gradient shape":
        model.grads[0] = torch.zeros(1020)
    elif what == "moment length":
        model.exp_avg_sqs[0] = torch.zeros(model.ranges[0][1] + 1)
    elif what == "param dtype":
        model.params[0] = model.params[0].double()
    elif what == "gradient dtype":
        model.grads[0] = model.grads[0].double()
    elif what == "step dtype":
        model.steps[0] = torch.tensor(0)
    elif what == "gaps":
        model.params[0] = torch.zeros(2042)[::2]
    elif what == "sparse":
        model.grads[0] = model.grads[0].to_sparse()
    elif what == "amsgrad":
        override["amsgrad"] = True
        model.max_exp_avg_sqs = []
        model.run = dataclasses.replace(model.run, amsgrad=True)
    elif what == "reduce":
        override["reduce"] = "max"
    elif what == "beta":
        override["beta1"] = 1.5
    else:
        raise AssertionError(what)
    kept = [one.clone() for one in model.params]
    try:
        model.step(**override)
    except (ValueError, RuntimeError, TypeError) as error:
        text = str(error)
    else:
        raise AssertionError(f"{what}: accepted")
    for now, old in zip(model.params, kept, strict=True):
        assert same(now, old)
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    assert bool((tensor == context.world_size).all()), "the group is broken"
    return text
