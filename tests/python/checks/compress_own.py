"""Compressors and memories of the user's, as they are written for GRACE.

No postponed annotations here: DDP inspects those of its hooks.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from checks.compress import Given
from fusedpg.compress import Compressor, Memory, from_params, hook
from harness import Context

SHAPES = ((3, 5), (40,), (17, 8), (1,), (300,), (6, 4, 5))


class Loud(Compressor):
    """Large elements, as many as there are, and an index for each."""

    def __init__(self, bound: float) -> None:
        super().__init__(tensors_size_are_same=False)
        self.bound = bound

    def compress(self, tensor: Tensor, name: str) -> Any:
        flat = tensor.flatten()
        (places,) = torch.where(flat.abs() > self.bound)
        return (flat[places], places), (tensor.numel(), tensor.size())

    def decompress(self, tensors: Any, ctx: Any) -> Tensor:
        values, places = tensors
        return torch.zeros(ctx[0], dtype=values.dtype).scatter_(0, places, values).view(ctx[1])


class Vote(Compressor):
    """Says itself what becomes of all ranks' tensors."""

    def __init__(self) -> None:
        super().__init__(average=False)

    def compress(self, tensor: Tensor, name: str) -> Any:
        return [(tensor >= 0).type(torch.uint8)], tensor.size()

    def decompress(self, tensors: Any, ctx: Any) -> Tensor:
        return (tensors[0].type(torch.float32) * 2 - 1).view(ctx)

    def aggregate(self, tensors: Any) -> Tensor:
        return (sum(tensors) >= 0) * 6.0 - 3.0


class Median(Vote):
    """Its mean is taken, too."""

    def __init__(self) -> None:
        Compressor.__init__(self)

    def aggregate(self, tensors: Any) -> Tensor:
        return torch.stack(list(tensors)).sort(0).values[len(tensors) // 2]


class Running(Vote):
    """Keeps the very tensor that it was given, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}

    def compress(self, tensor: Tensor, name: str) -> Any:
        if name in self.kept:
            tensor = 0.5 * tensor + 0.5 * self.kept[name]
        self.kept[name] = tensor
        return super().compress(tensor, name)


class Factors(Compressor):
    """Asks for the shape of what it gets, and sends more than one type."""

    def compress(self, tensor: Tensor, name: str) -> Any:
        if tensor.dim() == 1:
            return [tensor], None
        matrix = tensor.view(tensor.shape[0], -1)
        rows = matrix.mean(1)
        return [rows.double(), (matrix - rows[:, None]).mean(0).bfloat16()], tensor.shape

    def decompress(self, tensors: Any, ctx: Any) -> Tensor:
        if ctx is None:
            return tensors[0]
        return (tensors[0].float()[:, None] + tensors[1].float()[None]).view(ctx)


class Lossy(Memory):
    """Error feedback by names, from what it is told."""

    def __init__(self) -> None:
        self.residuals: dict[str, Tensor] = {}

    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        if name in self.residuals:
            tensor = self.residuals[name] + tensor
        return tensor

    def update(self, tensor: Tensor, name: str, compressor: Any, sent: Any, ctx: Any) -> None:
        self.residuals[name] = tensor - compressor.decompress(sent, ctx)


class Sum(Memory):
    """Gives out what it keeps."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}

    def compensate(self, tensor: Tensor, name: str) -> Tensor:
        if name in self.sums:
            self.sums[name] += tensor
        else:
            self.sums[name] = tensor
        return self.sums[name]


class Whole(Compressor):
    def compress(self, tensor: Tensor, name: str) -> Any:
        return [tensor], None

    def decompress(self, tensors: Any, ctx: Any) -> Tensor:
        return tensors[0]


PAIRS = {
    "loud": (lambda: Loud(1.0), Lossy), "vote": (Vote, Memory), "median": (Median, Memory),
    "running": (Running, Memory), "factors": (Factors, Lossy), "sum": (Whole, Sum),
}  # fmt: skip


def gradients(step: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def by_graces_steps(context: Context, pair: str, schedule: Any, communicator: str) -> None:
    """What GRACE's definition of a step gives: compensate, compress, update; decompress all ranks'
    tensors by one's own context, aggregate, and divide by their number."""
    make_compressor, make_memory = PAIRS[pair]
    size = context.world_size
    ranks = [(make_compressor(), make_memory()) for _ in range(size)]
    model = Given(SHAPES)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    params = {
        "compressor": make_compressor(), "memory": make_memory(), "communicator": communicator,
    }  # fmt: skip
    names = model.named_parameters()
    ddp.register_comm_hook(from_params(params, schedule=schedule, named_parameters=names), hook)
    for step in range(5):
        ddp.zero_grad()
        ddp(gradients(step, context.rank)).backward()
        everyone = [gradients(step, rank) for rank in range(size)]
        for n, (name, parameter) in enumerate(model.named_parameters()):
            sent, contexts = [], []
            for (compressor, memory), grads in zip(ranks, everyone):
                v = memory.compensate(grads[n], name)
                tensors, ctx = compressor.compress(v, name)
                memory.update(v, name, compressor, tensors, ctx)
                sent.append([tensor.clone() for tensor in tensors])
                contexts.append(ctx)
            own = ranks[context.rank][0]
            wanted = own.aggregate([own.decompress(t, contexts[context.rank]) for t in sent])
            if own.average:
                wanted = wanted / size
            assert torch.equal(parameter.grad, wanted), (pair, step, name)


class Broken(Whole):
    """Its functions return what they must not, on some ranks or on all of them."""

    def __init__(self, what: str, rank: int) -> None:
        super().__init__()
        self.what, self._rank, self.linear = what, rank, True

    def compress(self, tensor: Tensor, name: str) -> Any:
        if self.what == "a tensor":
            return tensor, None
        if self.what == "no context":
            return [tensor]
        if self.what == "a number":
            return [tensor, 1.0], None
        if self.what == "other sizes" and self._rank == 1:
            return [tensor[: tensor.numel() // 2]], None
        if self.what == "other types" and self._rank == 1:
            return [tensor.view(torch.int32)], None
        if self.what == "other count" and self._rank == 1:
            return [tensor, tensor], None
        return [tensor], None

    def decompress(self, tensors: Any, ctx: Any) -> Any:
        if self.what == "too few":
            return tensors[0][:1]
        return 1.0 if self.what == "scalar" else tensors[0]

    def aggregate(self, tensors: Any) -> Any:
        return tensors if self.what == "no sum" else super().aggregate(tensors)


BROKEN = (
    "a tensor", "no context", "a number", "other sizes", "other types", "other count", "too few",
    "scalar", "no sum",
)  # fmt: skip


def broken(context: Context, what: str, communicator: str) -> str:
    model = Given([(64,)])
    ddp = DistributedDataParallel(model)
    params = {"compressor": Broken(what, context.rank), "communicator": communicator}
    ddp.register_comm_hook(from_params(params, named_parameters=model.named_parameters()), hook)
    with pytest.raises(RuntimeError) as raised:
        ddp([torch.ones(64)]).backward()
    return str(raised.value)


def mixed_processors(context: Context, params: dict[str, Any], dtype: torch.dtype) -> Any:
    """Results of ranks whose processors have other instructions."""
    model = Given([(4099,), (64, 33)], dtype)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(from_params(params), hook)
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + context.rank)
        ddp.zero_grad()
        ddp(
            [torch.randn(p.shape, generator=generator, dtype=dtype) for p in model.parts]
        ).backward()
        found += [p.grad.numpy().copy() for p in model.parts]
    return torch.backends.cpu.get_cpu_capability(), found
