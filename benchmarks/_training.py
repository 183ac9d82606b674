"""Models that benchmarks train, and arms: a model, a way to synchronise, an optimizer each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import _harness as harness
from _harness import Row
from _words import BEST, KEPT

LR, WEIGHT_DECAY = 1e-4, 1e-2
MAX_NORM = 1e-3  # clips in every step
NO_SYNC = "no_sync + step"

# ---------------------------------------------------------------------------------------------
# Models


def make_mlp() -> nn.Module:
    width, layers = 2240, 5
    hidden = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def make_cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, 10))


class Transformer(nn.Module):
    """About 10 million parameters; predicts one of ten classes."""

    def __init__(self) -> None:
        super().__init__()
        width = 512
        self.embedding = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(
            width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layers(self.embedding(x)).mean(1))
        return y


class Small(nn.Module):
    """1,000 parameters of 64 elements: what is done for each of them is all that costs."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(64)) for _ in range(1000))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (torch.stack(list(self.weights)) * x).reshape(len(x), 10, -1).sum(2) / 8
        return y


class Vectors(nn.Module):
    """A chain of products with 1,000 vectors of 256 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.ones(256) for _ in range(1000))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return x


def images(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(shape, generator=generator)


@dataclass(frozen=True)
class Model:
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Tensor]  # one rank's


MODELS = {
    "mlp": Model(make_mlp, images(4, 2240)),
    "transformer": Model(
        Transformer, lambda generator: torch.randint(256, (4, 32), generator=generator)
    ),
    "cnn": Model(make_cnn, images(32, 3, 32, 32)),
    "small": Model(Small, images(4, 1000, 64)),
    "vectors": Model(Vectors, images(2, 256)),
}
OF_OPTIMIZERS = ("mlp", "transformer", "cnn", "small")


def parameter_bytes(name: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() * p.element_size() for p in MODELS[name].make().parameters())


# ---------------------------------------------------------------------------------------------
# Arms

Optimizer = torch.optim.Optimizer
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def adamw(params: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)


class Arm:
    """A model, its optimizer, and a fixed batch of this rank; under DDP where there is a group."""

    optimizer: Optimizer

    def __init__(
        self, model: str, group: dist.ProcessGroup | None, of_torch: MakeOptimizer = adamw
    ) -> None:
        torch.manual_seed(0)
        self.group, self.of_torch = group, of_torch
        self.module = MODELS[model].make()
        generator = torch.Generator().manual_seed(1 + dist.get_rank(group))
        self.x = MODELS[model].batch(generator)
        self.y = torch.randint(10, self.x.shape[:1], generator=generator)
        self.model: nn.Module = self.wrap()
        self.make_optimizer()

    def wrap(self) -> nn.Module:
        if self.group is None:
            return self.module
        return DistributedDataParallel(
            self.module, process_group=self.group, gradient_as_bucket_view=True
        )

    def make_optimizer(self) -> None:
        self.optimizer = self.of_torch(self.model.parameters())

    def without_communication(self) -> Arm:
        """DDP with a hook that communicates nothing."""
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(None, keep_bucket)
        return self

    def forward(self) -> Tensor:
        return F.cross_entropy(self.model(self.x), self.y)

    def backward(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.forward()
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        loss = self.backward()
        self.optimizer.step()
        return loss

    def parameters(self) -> Tensor:
        """All of them, flat."""
        return torch.cat([_whole(p).flatten() for p in self.module.parameters()])


def _whole(param: Tensor) -> Tensor:
    full = getattr(param, "full_tensor", None)
    return (param if full is None else full()).detach()


class ZeroArm(Arm):
    def make_optimizer(self) -> None:
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(),
            optimizer_class=torch.optim.AdamW,
            process_group=self.group,
            lr=LR,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )


def fully_sharded(module: nn.Module, group: dist.ProcessGroup, least: int) -> nn.Module:
    """`fully_shard` on a model and on each of its parts that has more than so many parameters."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(group, "cpu")
    layers = getattr(module, "layers", None)
    parts = list(layers.layers) if layers is not None else list(module.children())
    for part in parts:
        if sum(p.numel() for p in part.parameters()) > least:
            fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


class Fsdp2Arm(Arm):
    def wrap(self) -> nn.Module:
        assert self.group is not None
        return fully_sharded(self.module, self.group, 1 << 20)


class FusedArm(Arm):
    options: ClassVar[dict[str, Any]] = {}

    def make_optimizer(self) -> None:
        import fusedpg

        assert isinstance(self.model, DistributedDataParallel)
        self.optimizer = fusedpg.optim.AdamW(
            self.model.parameters(),
            lr=LR,
            weight_decay=WEIGHT_DECAY,
            ddp=self.model,
            **self.options,
        )


class UnfusedArm(FusedArm):
    """The same reduce-scatter in backward; then torch's AdamW on the slices, then all-gathers."""

    def make_optimizer(self) -> None:
        import fusedpg

        super().make_optimizer()
        params = list(self.module.parameters())
        world_size = dist.get_world_size(self.group)
        self._pieces = []
        for p in params:
            flat = p.detach().view(-1)
            ranges = [fusedpg.shard_range(p.numel(), world_size, r) for r in range(world_size)]
            self._pieces.append([flat[begin : begin + length] for begin, length in ranges])
        rank = dist.get_rank(self.group)
        self._slices = [nn.Parameter(pieces[rank]) for pieces in self._pieces]
        self._unfused = adamw(self._slices)

    def step(self) -> Tensor:
        loss = self.backward()
        for p, own in zip(self.module.parameters(), self._slices, strict=True):
            assert p.grad is not None
            own.grad = p.grad.local()  # type: ignore[attr-defined]
        self._unfused.step()
        for pieces, own in zip(self._pieces, self._slices, strict=True):
            dist.all_gather(pieces, own.detach(), group=self.group)
        return loss


class OverlapArm(FusedArm):
    options: ClassVar[dict[str, Any]] = {"overlap": True}


class ClippingArm(FusedArm):
    options: ClassVar[dict[str, Any]] = {"max_grad_norm": MAX_NORM}


class SharedArm(FusedArm):
    options: ClassVar[dict[str, Any]] = {"share_parameters": True}


class ManualArm(Arm):
    """No DDP: `step()` reduces the gradients where backward left them."""

    def wrap(self) -> nn.Module:
        return self.module

    def make_optimizer(self) -> None:
        import fusedpg

        self.optimizer = fusedpg.optim.AdamW(
            self.model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, process_group=self.group
        )


class NoSyncArm(FusedArm):
    """The limit: backward under no_sync(), then the fused step on one flat buffer of the size."""

    def make_optimizer(self) -> None:
        import fusedpg

        numel = sum(p.numel() for p in self.module.parameters())
        self.flat = fusedpg.empty(numel, group=self.group).zero_().requires_grad_()
        self.flat.grad = fusedpg.empty(numel, group=self.group).zero_()
        self.optimizer = fusedpg.optim.AdamW(
            [self.flat], lr=LR, weight_decay=WEIGHT_DECAY, process_group=self.group
        )

    def step(self) -> Tensor:
        assert isinstance(self.model, DistributedDataParallel)
        for p in self.module.parameters():
            p.grad = None
        with self.model.no_sync():
            loss = self.forward()
            loss.backward()
        self.optimizer.step()
        return loss.detach()


@dataclass(frozen=True)
class Kind:
    make: Callable[[str, dist.ProcessGroup], Arm]
    backend: str


ARMS = {  # in words: _words.py
    "a": Kind(Arm, "gloo"),
    "b": Kind(ZeroArm, "gloo"),
    "c": Kind(Fsdp2Arm, "gloo"),
    "d": Kind(Arm, "fused"),
    "e": Kind(UnfusedArm, "fused"),
    "f": Kind(FusedArm, "fused"),
    "g": Kind(OverlapArm, "fused"),
    "h": Kind(SharedArm, "fused"),
    "m": Kind(ManualArm, "fused"),
    NO_SYNC: Kind(NoSyncArm, "fused"),
}
CLIPPING = {"f, max_grad_norm": Kind(ClippingArm, "fused")}  # whose step clips


def same_losses(
    name: str, steps: Mapping[str, Callable[[], Tensor]], count: int, atol: float = 1e-5
) -> Tensor:
    """Requires them of all arms' steps on the same batches; of this rank."""
    losses = {arm: torch.stack([step() for _ in range(count)]) for arm, step in steps.items()}
    first, *others = losses.values()
    for other in others:
        same = torch.allclose(first, other, rtol=1e-4, atol=atol)
        harness.require(same, f"{name}: losses differ: {losses}")
    return first


def keep_bucket(state, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations by identity
    """A communication hook that communicates nothing."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def best(rows: Sequence[Row]) -> list[Row]:
    """Our optimizer's row in its faster mode, once more by another name; none without ours."""
    ours = [row for row in rows if row.arm.removesuffix(KEPT) in ("f", "g")]
    if not ours:
        return []
    fastest = min(ours, key=lambda row: row.median)
    return [dataclasses.replace(fastest, arm=BEST + fastest.arm[1:])]
