"""The fused optimizers on a GPU: the life of a training script."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from checks.cases import digest, distance, flat, same
from checks.optim import Bag, Run, Trainer, fused, grouped, unsharded
from gpu_checks.device import DEVICE, FAKE, group_of, synchronize, to_host
from harness import Context

BF16 = torch.bfloat16


class GpuTrainer(Trainer):
    """A run on the device, beside torch's optimizer on averaged gradients there."""

    def __init__(
        self, context: Context, run: Run, device: torch.device = DEVICE, **options: Any
    ) -> None:
        self.context, self.run, self.device = context, run, device
        self.group = group_of(context, **options) if device == DEVICE else dist.group.WORLD
        self.bag = Bag(run).to(device)
        self.twin = copy.deepcopy(self.bag)
        self.net: nn.Module = self.bag
        wrapped = None
        if run.mode != "manual":
            ddp = {"bucket_cap_mb": 0.004, **run.ddp}
            self.net = wrapped = DistributedDataParallel(self.bag, process_group=self.group, **ddp)
        self.ddp: Any = wrapped
        self.params = list(self.bag.parameters())
        # With a module the group is its own.
        place = {"ddp": wrapped} if wrapped is not None else {"process_group": self.group}
        self.optimizer = fused(run, grouped(run, list(self.params)), **place)
        self.oracle = unsharded(run, list(self.twin.parameters()))

    def gradients(self, step: int) -> list[torch.Tensor | None]:
        return [one.to(self.device) for one in super().gradients(step) if one is not None]

    def averaged(self, step: int, i: int) -> torch.Tensor:
        return super().averaged(step, i).to(self.device)

    def agree(self, tolerance: float = 2e-6, state: bool = True) -> str:
        for i, (mine, want) in enumerate(zip(self.params, self.twin.parameters(), strict=True)):
            assert mine.device == self.device
            assert distance(mine.detach().double(), want.detach().double()) <= tolerance, i
            if state:
                self._agree_in_state(i, mine, want, 4 * tolerance)
        return digest(to_host(self.params))

    def _agree_in_state(
        self, i: int, mine: torch.Tensor, want: torch.Tensor, tolerance: float
    ) -> None:
        ours, theirs = self.optimizer.state[mine], self.oracle.state.get(want, {})
        offset, length = self.optimizer._context.shard(mine)
        for key, value in theirs.items():
            if key == "step" or value is None:
                continue
            assert ours[key].device == self.device
            whole = torch.empty_strided(mine.shape, mine.stride(), dtype=torch.float64)
            shard = flat(whole.copy_(value))[offset : offset + length]
            error = float((ours[key].cpu().double() - shard).norm())
            assert error <= tolerance * max(1.0, float(shard.norm())), (i, key, error)


def parity(context: Context, run: Run) -> str:
    trainer = GpuTrainer(context, run)
    for step in range(run.steps):
        trainer.both(step)
    return trainer.agree()


def with_fp32_twin(trainer: GpuTrainer) -> None:
    """The oracle of parameters with fp32 masters."""
    trainer.twin = trainer.twin.float()
    trainer.oracle = unsharded(trainer.run, list(trainer.twin.parameters()))


def masters(context: Context, run: Run) -> str:
    """bf16 parameters with fp32 masters follow a run in fp32, but for bf16 gradients."""
    trainer = GpuTrainer(context, run)
    with_fp32_twin(trainer)
    for step in range(run.steps):
        trainer.both(step)
    for param, want in zip(trainer.params, trainer.twin.parameters(), strict=True):
        assert param.dtype == BF16
        # A gradient of two ranks is rounded once on the wire, and once more behind it with DDP.
        assert distance(param.detach().float(), want.detach()) <= 6e-3
        own = trainer.optimizer._owned(param, param)
        assert same(trainer.optimizer.state[param]["master_param"].to(BF16), own)
    return digest(to_host(trainer.params))


def scaled_and_clipped(context: Context, run: Run, max_norm: float) -> str:
    """GradScaler, unscale_, clip_grad_norm_, an overflow on one rank."""
    trainer = GpuTrainer(context, run)
    kind = DEVICE.type
    scaler = torch.amp.GradScaler(kind, init_scale=128.0, growth_interval=1000)
    for step in range(run.steps):
        overflow = step == 3
        trainer.optimizer.zero_grad()
        gradients = trainer.gradients(step)
        if overflow and context.rank == context.world_size - 1:
            assert gradients[0] is not None
            gradients[0].view(-1)[0] = torch.inf
        before = to_host(trainer.params)
        scaler.scale(trainer.net(gradients)).backward()
        scaler.unscale_(trainer.optimizer)
        norm = nn.utils.clip_grad_norm_(trainer.params, max_norm)
        scaler.step(trainer.optimizer)
        old = scaler.get_scale()
        scaler.update()
        if overflow:
            assert scaler.get_scale() == old / 2
            for param, kept in zip(trainer.params, before, strict=True):
                assert same(param.detach().cpu(), kept), "stepped on an infinity"
            continue
        trainer.prepare(step)
        want = nn.utils.clip_grad_norm_(list(trainer.twin.parameters()), max_norm)
        assert abs(float(norm) - float(want)) <= 1e-5 * float(want)
        trainer.oracle.step()
    return trainer.agree(1e-5)


def clipped_inside(context: Context, run: Run, max_norm: float) -> str:
    """max_grad_norm of the constructor."""
    trainer = GpuTrainer(context, run)
    for step in range(run.steps):
        trainer.optimizer.zero_grad()
        trainer.backward(step)
        trainer.optimizer.step()
        trainer.prepare(step)
        nn.utils.clip_grad_norm_(list(trainer.twin.parameters()), max_norm)
        trainer.oracle.step()
    return trainer.agree(1e-5)


def accumulates(context: Context, run: Run) -> str:
    """Two micro-batches under no_sync()."""
    trainer = GpuTrainer(context, run)
    for step in range(0, 2 * run.steps, 2):
        trainer.optimizer.zero_grad()
        with trainer.ddp.no_sync():
            trainer.backward(step)
        trainer.backward(step + 1)
        trainer.optimizer.step()
        trainer.prepare(step, step + 1)
        trainer.oracle.step()
    return trainer.agree(4e-6)


def goes_on(first: GpuTrainer, second: GpuTrainer, tolerance: float, own: bool = False) -> str:
    """Steps of the first, then of the second from its checkpoint; `own`: each rank loads its part.

    The second one's oracle is the first one's, which sees no checkpoint.
    """
    for step in range(4):
        first.both(step)
    optimizer = first.optimizer
    saved = optimizer.local_state_dict() if own else optimizer.full_state_dict(rank0_only=False)
    weights = {key: value.cpu() for key, value in first.bag.state_dict().items()}
    synchronize()
    second.bag.load_state_dict(weights)
    second.optimizer.load_state_dict(saved)
    second.twin = copy.deepcopy(first.twin).to(second.device)
    second.oracle = unsharded(second.run, list(second.twin.parameters()))
    for mine, theirs in zip(second.twin.parameters(), first.twin.parameters(), strict=True):
        second.oracle.state[mine] = {
            key: value.to(second.device)
            if isinstance(value, torch.Tensor) and value.dim()
            else value
            for key, value in first.oracle.state[theirs].items()
        }
    for step in range(4, 8):
        second.both(step)
    return second.agree(tolerance)


def moves_between_devices(context: Context, run: Run, to_gpu: bool) -> str:
    """A checkpoint of one device goes on on the other."""
    cpu = torch.device("cpu")
    places = (cpu, DEVICE) if to_gpu else (DEVICE, cpu)
    first, second = (GpuTrainer(context, run, place) for place in places)
    return goes_on(first, second, 4e-6)


# --- real networks -----------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, 64),
        nn.LayerNorm(64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * (step % 4) + rank)
    x = torch.randn(16, 3, 16, 16, generator=generator)
    return x.to(DEVICE), torch.randint(0, 10, (16,), generator=generator).to(DEVICE)


def train(context: Context, group: Any, overlap: bool | None, steps: int, **ddp: Any) -> Any:
    """Losses of all ranks' mean; `overlap` None: torch's AdamW(fused=True)."""
    import fusedpg

    module = network().to(DEVICE)
    # Sums in one order, run after run.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    net = DistributedDataParallel(module, process_group=group, **ddp)
    options = {"lr": 1e-3, "weight_decay": 1e-2}
    optimizer: Any
    if overlap is None:
        optimizer = torch.optim.AdamW(net.parameters(), fused=True, **options)
    else:
        optimizer = fusedpg.optim.AdamW(net.parameters(), ddp=net, overlap=overlap, **options)
    losses = []
    for step in range(steps):
        x, y = batch(step, context.rank)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    total = torch.stack(losses)
    dist.all_reduce(total, group=group)
    synchronize()
    return (total / context.world_size).tolist(), digest(to_host(module.parameters()))


def like_nccl(context: Context, steps: int, ddp: dict[str, Any]) -> dict[str, Any]:
    """DDP on the fused backend against DDP on NCCL with torch's fused AdamW."""
    stock = dist.new_group(backend="gloo" if FAKE else "nccl")
    results = {"torch": train(context, stock, None, steps, **ddp)}
    results["torch on fused"] = train(context, group_of(context), None, steps, **ddp)
    for overlap in (False, True):
        results[f"overlap={overlap}"] = train(context, group_of(context), overlap, steps, **ddp)
    dist.destroy_process_group(stock)
    return results
