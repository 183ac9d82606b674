"""Fused optimizers and DistributedDataParallel: the life of a training script."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from checks.cases import digest, distance, same
from checks.ddp import Net
from checks.optim import Run, Trainer, fused, grouped, unchanged
from checks.refused import refused
from harness import Context

Batch = tuple[torch.Tensor, torch.Tensor]


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 11)
        self.hidden = nn.Linear(11, 11)
        self.out = nn.Linear(11, 23, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.out(torch.tanh(self.hidden(self.embed(x))))
        return y


def network(kind: str) -> nn.Module:
    torch.manual_seed(3)
    if kind == "tied":
        return Tied()
    if kind == "small":
        return nn.Sequential(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 3))
    net: Any = Net()
    return net.to(memory_format=torch.channels_last) if kind == "channels_last" else net


def batch(kind: str, step: int, rank: int, samples: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if kind == "tied":
        tokens = torch.randint(0, 23, (samples, 2), generator=generator)
        return tokens[:, 0], tokens[:, 1]
    shape = (samples, 5) if kind == "small" else (samples, 1, 8, 8)
    classes = 3 if kind == "small" else 10
    x = torch.randn(shape, generator=generator)
    return x, torch.randint(0, classes, (samples,), generator=generator)


def loss_of(net: nn.Module, data: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(net(data[0]), data[1])


class Training:
    """A network on the fused backend and its twin in one process."""

    def __init__(self, context: Context, kind: str, run: Run, **ddp: Any) -> None:
        self.context, self.kind, self.run = context, kind, run
        self.module = network(kind)
        self.twin = copy.deepcopy(self.module)
        self.params = list(self.module.parameters())
        self.net: Any = self.module
        if run.mode != "manual":
            self.net = DistributedDataParallel(self.module, bucket_cap_mb=0.005, **ddp)
        wrapped = None if run.mode == "manual" else self.net
        self.optimizer = fused(run, grouped(run, self.params), ddp=wrapped)
        groups = grouped(run, list(self.twin.parameters()))
        self.oracle = getattr(torch.optim, run.optimizer)(groups, foreach=False)

    def step(self, step: int, samples: int = 6) -> None:
        self.optimizer.zero_grad()
        loss_of(self.net, batch(self.kind, step, self.context.rank, samples)).backward()
        self.optimizer.step()

    def oracle_step(self, data: list[Batch], divisor: float) -> None:
        self.oracle.zero_grad()
        for one in data:
            (loss_of(self.twin, one) / divisor).backward()
        self.oracle.step()

    def everyone(self, step: int) -> list[Batch]:
        return [batch(self.kind, step, rank) for rank in range(self.context.world_size)]

    def both(self, step: int) -> None:
        self.step(step)
        self.oracle_step(self.everyone(step), self.context.world_size)

    def agree(self, tolerance: float = 2e-5) -> str:
        for i, (mine, want) in enumerate(zip(self.params, self.twin.parameters(), strict=True)):
            assert distance(mine.detach(), want.detach()) <= tolerance, i
        return digest(self.params)


def trains(context: Context, kind: str, run: Run, ddp: dict[str, Any]) -> str:
    """Real networks; weights move in the very first step and survive the buckets' rebuild."""
    training = Training(context, kind, run, **ddp)
    before = [param.detach().clone() for param in training.params]
    training.both(0)
    for param, old in zip(training.params, before, strict=True):
        assert not same(param.detach(), old), "the first step moved nothing"
    training.agree()
    for step in range(1, run.steps):
        training.both(step)
    return training.agree()


def rebuild(context: Context, run: Run) -> str:
    """State belongs to parameters: DDP may change its buckets between steps."""
    trainer = Trainer(context, run)
    seen: list[tuple[int, ...]] = []
    bridge: Any = trainer.ddp._fusedpg_bridge
    inner = bridge._reduce_taken

    def reduce(bucket: Any, *arguments: Any) -> Any:
        seen.append(tuple(parameter.numel() for parameter in bucket.parameters()))
        return inner(bucket, *arguments)

    bridge._reduce_taken = reduce
    history = []
    for step in range(6):
        trainer.both(step)
        history.append(list(seen))
        seen.clear()
        trainer.agree()
    assert len({str(one) for one in history}) == 2, "the buckets were not rebuilt"
    return digest(trainer.params)


def two_optimizers(context: Context, mode: str) -> str:
    """Two optimizers of different kinds on one module, and a parameter of neither."""
    trainer = Trainer(context, Run("SGD", mode, groups=False))
    bag = copy.deepcopy(trainer.bag)
    trainer.ddp = DistributedDataParallel(bag, bucket_cap_mb=0.004)
    params, twins = list(bag.parameters()), list(trainer.twin.parameters())
    pairs = []
    for name, where in (("SGD", slice(0, 2)), ("AdamW", slice(2, 4))):
        run = Run(name, mode, groups=False)
        mine = fused(run, grouped(run, params[where]), ddp=trainer.ddp)
        want = getattr(torch.optim, name)(grouped(run, twins[where]), foreach=False)
        pairs.append((mine, want))
    for step in range(5):
        trainer.ddp.zero_grad()
        trainer.ddp(trainer.gradients(step)).backward()
        trainer.prepare(step)
        grad = params[4].grad
        assert type(grad) is torch.Tensor
        assert twins[4].grad is not None
        assert distance(grad, twins[4].grad) <= 1e-6, "not all-reduced"
        for mine, want in pairs:
            mine.step()
            want.step()
    for i, (param, twin) in enumerate(zip(params, twins, strict=True)):
        assert distance(param.detach(), twin.detach()) <= 1e-6, i
    return digest(params)


def without_optimizer(context: Context, view: bool) -> str:
    """Parameters that no fused optimizer has are all-reduced, and torch's can take them."""
    run = Run("SGD", "ddp", groups=False)
    trainer = Trainer(context, run)
    bag = copy.deepcopy(trainer.bag)
    ddp = DistributedDataParallel(bag, bucket_cap_mb=0.004, gradient_as_bucket_view=view)
    params = list(bag.parameters())
    mine = fused(run, grouped(run, params[1::2]), ddp=ddp)
    rest = torch.optim.SGD(grouped(run, params[::2]))
    for step in range(5):
        mine.zero_grad()
        rest.zero_grad()
        ddp(trainer.gradients(step)).backward()
        mine.step()
        rest.step()
        trainer.prepare(step)
        trainer.oracle.step()
    trainer.params = params
    return trainer.agree(state=False)


def attach_later(context: Context, run: Run) -> str:
    """An optimizer made before the module was wrapped, as libraries do."""
    trainer = Trainer(context, run)
    bag = copy.deepcopy(trainer.bag)
    trainer.params = list(bag.parameters())
    trainer.optimizer = fused(run, grouped(run, list(trainer.params)))
    trainer.net = trainer.ddp = DistributedDataParallel(bag, bucket_cap_mb=0.004)
    trainer.optimizer.attach(trainer.ddp)
    for step in range(6):
        trainer.both(step)
    return trainer.agree()


def retained_graph(context: Context, mode: str) -> None:
    """Autograd notices that saved weights have changed."""
    training = Training(context, "small", Run(mode=mode, groups=False))
    loss = loss_of(training.net, batch("small", 0, context.rank))
    loss.backward(retain_graph=True)
    training.optimizer.step()
    with refused("modified by an inplace operation"):
        loss.backward()
    dist.barrier()


def checkpoint_of_fresh(context: Context, run: Run, alone: bool) -> str:
    """get_optimizer_state_dict() on a fresh optimizer: no collective, no moved weight."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    trainer = Trainer(context, run)
    before = [param.detach().clone() for param in trainer.params]
    if not alone or context.rank == 0:
        found = get_optimizer_state_dict(trainer.net, trainer.optimizer)
        assert len(found["param_groups"]) == 2
    unchanged([param.detach() for param in trainer.params], before)
    dist.barrier()
    for step in range(3):
        trainer.both(step)
    return trainer.agree()


def joined(context: Context, run: Run, zero_last: bool, divide: bool) -> str:
    """Ranks that run out of data contribute zeros to the others' steps."""
    training = Training(context, "small", run)
    size, rank = context.world_size, context.rank
    lengths = [2 + (2 * other) % 5 for other in range(size)]
    who = [training.optimizer] if run.mode == "manual" else [training.net, training.optimizer]
    with Join(who, divide_by_initial_world_size=divide):
        for step in range(lengths[rank]):
            if not zero_last:
                training.optimizer.zero_grad()
            loss_of(training.net, batch("small", step, rank)).backward()
            training.optimizer.step()
            if zero_last:
                training.optimizer.zero_grad()
    for step in range(max(lengths)):
        active = [other for other in range(size) if step < lengths[other]]
        data = [batch("small", step, other) for other in active]
        training.oracle_step(data, size if divide else len(active))
    training.agree()
    training.both(100)
    return training.agree()


def weighted(context: Context, run: Run, uneven: bool) -> str:
    """Batches of different sizes: the gradient is that of the mean over all samples."""
    training = Training(context, "small", run)
    size, rank = context.world_size, context.rank
    lengths = [3 + (other if uneven else 0) for other in range(size)]

    def samples(step: int, other: int) -> int:
        return 2 + (3 * other + step) % 7

    who = [training.optimizer] if run.mode == "manual" else [training.net, training.optimizer]
    with Join(who, enable=uneven):
        for step in range(lengths[rank]):
            training.optimizer.set_local_batch_size(samples(step, rank))
            training.step(step, samples(step, rank))
    for step in range(max(lengths)):
        parts = [
            batch("small", step, other, samples(step, other))
            for other in range(size)
            if step < lengths[other]
        ]
        whole = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
        training.oracle_step([whole], 1)
    training.agree()
    training.optimizer.set_local_batch_size(None)
    training.both(100)
    return training.agree()


def continues(context: Context, run: Run) -> str:
    """from_torch() in the middle of a training takes over where torch's optimizer stands."""
    import fusedpg

    trainer = Trainer(context, run)
    bag = copy.deepcopy(trainer.bag)
    net: Any = bag
    if run.mode != "manual":
        net = trainer.ddp = DistributedDataParallel(bag, bucket_cap_mb=0.004)
    trainer.params, trainer.net = list(bag.parameters()), net
    kind = getattr(torch.optim, run.optimizer)
    old = kind(grouped(run, list(trainer.params)), foreach=False)
    decays = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in (old, trainer.oracle)]
    for step in range(5):
        if run.mode == "manual":
            for i, param in enumerate(trainer.params):
                param.grad = trainer.averaged(step, i).to(param.dtype)
        else:
            net.zero_grad()
            net(trainer.gradients(step)).backward()
        old.step()
        trainer.prepare(step)
        trainer.oracle.step()
        for decay in decays:
            decay.step()
    kept = copy.deepcopy(old.state_dict())
    net.zero_grad()
    trainer.optimizer = fusedpg.optim.from_torch(old, trainer.ddp, overlap=run.mode == "overlap")
    trainer.agree()
    for step in range(5, 10):
        trainer.both(step)
        for decay in decays:
            decay.step()
    assert trainer.optimizer.param_groups[0]["lr"] == trainer.oracle.param_groups[0]["lr"]
    now = old.state_dict()["state"]
    for number, state in kept["state"].items():
        for key, value in state.items():
            assert value is None or same(torch.as_tensor(value), torch.as_tensor(now[number][key]))
    return trainer.agree()


def fuse_refuses(context: Context) -> None:
    """Optimizers that have no fused form."""
    import fusedpg

    with refused("RMSprop", TypeError):
        fusedpg.optim.from_torch(torch.optim.RMSprop([nn.Parameter(torch.zeros(3))]))
