"""Operators: the units that a plan distributes. Each has declared inputs, outputs and weights.

An operator computes on the parts that one device holds. Values that the tensor-parallel ranks of
an operator hold alike have gradients that they hold alike; `_forward_sum` and `_backward_sum` are
the collectives that keep it so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fusedpg import _collectives
from fusedpg.plan.config import Facts, PlanError
from fusedpg.tensor_parallel._epilogue import Epilogue, Place
from fusedpg.tensor_parallel._sequence import Columns, Rows

Outputs = Tensor | tuple[Tensor, ...]
Splits = tuple["int | None", ...]
"""For each value the dimension that tensor-parallel ranks share, or None."""


@dataclass(frozen=True)
class Value:
    """A value that travels between operators; the dimension of samples, its first, is left out."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None  # None: the dtype of the weights
    high: int = 0  # of data that are integers: one more than the largest
    differentiable: bool = True


@dataclass(frozen=True)
class Weight:
    """A whole weight, the dimension that tensor-parallel ranks share, and how it begins."""

    shape: tuple[int, ...]
    split: int | None = None
    std: float = 0.0  # of a normal distribution
    mean: float = 0.0

    def whole(self, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
        """The values that it begins with; the same for every dtype, up to rounding."""
        value = torch.full(self.shape, self.mean, dtype=torch.float32)
        if self.std:
            value += torch.empty(self.shape).normal_(0.0, self.std, generator=generator)
        return value.to(dtype)

    def share(self, whole: Tensor, part: Part) -> Tensor:
        """This rank's part of it."""
        if self.split is None or part.tp == 1:
            return whole
        size = self.shape[self.split] // part.tp
        return whole.narrow(self.split, part.tp_rank * size, size)


@dataclass
class Part:
    """The part of an operator that a rank computes, and the groups that it computes it with."""

    tp: int = 1
    dp: int = 1
    tp_rank: int = 0
    dp_rank: int = 0
    tp_place: Place | None = None  # None where tp is 1
    dp_group: dist.ProcessGroup | None = None  # None where dp is 1
    algo: int = 0
    training: bool = True
    seed: int = 0  # of this operator's dropout in this micro-batch
    recomputing: bool = False


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One step of a model.

    Args:
        name: as in databases of profiles.
        inputs, outputs: names of values, unique in the model.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    ways: ClassVar[int] = 1
    """In how many ways (`algo`) tensor parallelism can split the weights."""

    def values(self) -> tuple[Value, ...]:
        """The outputs."""
        raise NotImplementedError

    def splits(self, algo: int) -> tuple[Splits, Splits]:
        """The splits of the inputs, and those of the outputs."""
        return (None,) * len(self.inputs), (None,) * len(self.outputs)

    def weights(self, algo: int) -> dict[str, Weight]:
        return {}

    def initial(
        self, name: str, weight: Weight, generator: torch.Generator, dtype: torch.dtype
    ) -> Tensor:
        """The whole weight before training."""
        return weight.whole(generator, dtype)

    def buffers(self) -> dict[str, Tensor]:
        return {}

    def compute(self, w: OperatorModule, x: Sequence[Tensor], part: Part) -> Outputs:
        """The output, or a tuple of outputs."""
        raise NotImplementedError

    def kind(self) -> tuple[object, ...]:
        """Equal for operators that compute the same, wherever they stand in the model."""
        skip = ("name", "inputs", "outputs")
        fields = tuple(f.name for f in dataclasses.fields(self) if f.name not in skip)
        return (type(self).__name__, len(self.inputs), *(getattr(self, name) for name in fields))

    def problem(self, tp: int, algo: int, inputs: Sequence[Value]) -> str | None:
        """Why these tensor-parallel degree and way are impossible, or None."""
        algo = min(algo, self.ways - 1)
        ins, outs = self.splits(algo)
        shapes = [(v.shape, None if s is None else s - 1) for v, s in zip(inputs, ins)]
        shapes += [(v.shape, None if s is None else s - 1) for v, s in zip(self.values(), outs)]
        shapes += [(weight.shape, weight.split) for weight in self.weights(algo).values()]
        for shape, split in shapes:
            if split is not None and shape[split] % tp:
                return f"{self.name}: size {shape[split]} is not divisible by tp {tp}"
        return None

    def module(self, part: Part, dtype: torch.dtype, seed: int) -> OperatorModule:
        """This rank's part, with weights that depend on the seed alone."""
        return OperatorModule(self, part, dtype, seed)


class OperatorModule(nn.Module):
    """A rank's part of an operator."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Tensor: ...

    def __init__(self, op: Operator, part: Part, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.op, self.part = op, part
        self.declared = op.weights(part.algo)
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.declared.items():
            # All ranks draw the whole weight, so that each one's part is of the same.
            share = weight.share(op.initial(name, weight, generator, dtype), part).clone()
            self.register_parameter(name, nn.Parameter(share))
        for name, buffer in op.buffers().items():
            self.register_buffer(name, buffer.to(dtype) if buffer.is_floating_point() else buffer)

    def forward(self, *inputs: Tensor) -> Outputs:
        return self.op.compute(self, inputs, self.part)


# --- collectives of tensor parallelism ----------------------------------------------------


def _forward_sum(x: Tensor, part: Part) -> Tensor:
    """The sum over tensor-parallel ranks."""
    return x if part.tp_place is None else _collectives.sum_(x, part.tp_place.group)


def _backward_sum(x: Tensor, part: Part) -> Tensor:
    """A value that the ranks hold alike and of which each computes a part of the gradient."""
    if part.tp_place is None:
        return x
    return _collectives.sum_gradients([x], part.tp_place.group)[0]


def _column(x: Tensor, weight: Tensor, bias: Tensor | None, part: Part) -> Tensor:
    """``x @ weight.T + bias``, of which each rank has features of the output."""
    if part.tp_place is None:
        return F.linear(x, weight, bias)
    y: Tensor = Columns.apply(x, weight, bias, part.tp_place, None, None)
    return y


def _row(x: Tensor, weight: Tensor, bias: Tensor | None, part: Part) -> Tensor:
    """``x @ weight.T + bias``, of which each rank has features of the input."""
    if part.tp_place is None:
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    y: Tensor = Rows.apply(rows, weight, None, None, part.tp_place, Epilogue())
    y = y.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def _dropout(x: Tensor, p: float, part: Part, same: bool) -> Tensor:
    """Dropout that depends on the operator, the step and the micro-batch.

    Args:
        same: whether all tensor-parallel ranks hold the value alike, and so drop alike.
    """
    if not p or not part.training:
        return x
    seed = hash((part.seed, part.dp_rank, 0 if same else part.tp_rank))
    generator = torch.Generator().manual_seed(seed & (2**63 - 1))
    kept = torch.empty(x.shape, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
    return x * kept / (1 - p)


def _checked(numbers: Tensor, count: int, name: str) -> Tensor:
    """Raises for numbers that no rank has a row for, of which a sum over ranks would be zero."""
    low, high = (int(end) for end in numbers.aminmax())
    if low < 0 or high >= count:
        raise IndexError(f"{name}: {low if low < 0 else high} is not between 0 and {count - 1}")
    return numbers


# --- transformers -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Embedding(Operator):
    """Tokens and positions; tensor-parallel ranks share the vocabulary."""

    vocabulary: int
    hidden: int
    length: int
    dropout: float = 0.0

    def values(self) -> tuple[Value, ...]:
        return (Value((self.length, self.hidden)),)

    def weights(self, algo: int) -> dict[str, Weight]:
        return {
            "word": Weight((self.vocabulary, self.hidden), split=0, std=0.02),
            "position": Weight((self.length, self.hidden), std=0.02),
        }

    def compute(self, w: OperatorModule, x: Sequence[Tensor], part: Part) -> Outputs:
        tokens = _checked(x[0], self.vocabulary, self.name)
        if part.tp == 1:
            rows = F.embedding(tokens, w.word)
        else:
            size = self.vocabulary // part.tp
            own = tokens - part.tp_rank * size
            elsewhere = (own < 0) | (own >= size)
            rows = F.embedding(own.masked_fill(elsewhere, 0), w.word)
            rows = _forward_sum(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), part)
        return _dropout(rows + w.position, self.dropout, part, same=True)


@dataclass(frozen=True, kw_only=True)
class _Hidden(Operator):
    """Gives a vector for each token, which all tensor-parallel ranks have."""

    length: int
    hidden: int

    def values(self) -> tuple[Value, ...]:
        return (Value((self.length, self.hidden)),)


@dataclass(frozen=True, kw_only=True)
class LayerNorm(_Hidden):
    def weights(self, algo: int) -> dict[str, Weight]:
        return {"weight": Weight((self.hidden,), mean=1.0), "bias": Weight((self.hidden,))}

    def compute(self, w: OperatorModule, x: Sequence[Tensor], part: Part) -> Outputs:
        return F.layer_norm(x[0], (self.hidden,), w.weight, w.bias)


@dataclass(frozen=True, kw_only=True)
class Linear(Operator):
    """A matrix product; `algo` 0 splits it as `column_first` says, 1 the other way."""

    length: int
    in_features: int
    out_features: int
    column_first: bool
    std: float = 0.02
    ways = 2

    def _column(self, algo: int) -> bool:
        return self.column_first == (algo == 0)

    def values(self) -> tuple[Value, ...]:
        return (Value((self.length, self.out_features)),)

    def splits(self, algo: int) -> tuple[Splits, Splits]:
        return ((None,), (2,)) if self._column(algo) else ((2,), (None,))

    def weights(self, algo: int) -> dict[str, Weight]:
        column = self._column(algo)
        shape = (self.out_features, self.in_features)
        return {
            "weight": Weight(shape, split=0 if column else 1, std=self.std),
            "bias": Weight((self.out_features,), split=0 if column else None),
        }

    def compute(self, w: OperatorModule, x: Sequence[Tensor], part: Part) -> Outputs:
        product = _column if self._column(part.algo) else _row
        return product(x[0], w.weight, w.bias, part)


@dataclass(frozen=True, kw_only=True)
class QKV(Operator):
    """Queries, keys and values of attention; keys and values of `memory` if that is an input."""

    length: int
    memory_length: int  # of keys and values
    hidden: int
    heads: int
    channels: int  # of each head
    ways = 2

    @property
    def crossed(self) -> bool:
        return len(self.inputs) == 2

    def values(self) -> tuple[Value, ...]:
        queries = Value((self.length, self.heads, self.channels))
        keys = Value((self.memory_length, self.heads, self.channels))
        return queries, keys, keys

    def splits(self, algo: int) -> tuple[Splits, Splits]:
        if algo == 0:
            return (None,) * len(self.inputs), (2, 2, 2)
        return (2,) * len(self.inputs), (None, None, None)

    def weights(self, algo: int) -> dict[str, Weight]:
        # A head's rows are together, so that a part of the rows is a part of the heads.
        found = {}
        for name, count in (("q", 1), ("kv", 2)) if self.crossed else (("qkv", 3),):
            rows = self.heads * count * self.channels
            found[name] = Weight((rows, self.hidden), split=algo, std=0.02)
            found[f"{name}_bias"] = Weight((rows,), split=0 if algo == 0 else None)
        return found

    def compute(self, w: OperatorModule, x: Sequence[Tensor], part: Part) -> Outputs:
        product = _column if part.algo == 0 else _row
        if self.crossed:
            q = product(x[0], w.q, w.q_bias, part).unflatten(-1, (-1, self.channels))
            kv = product(x[1], w.kv, w.kv_bias, part).unflatten(-1, (-1, 2, self.channels))
            return (q, *(t.contiguous() for t in kv.unbind(-2)))
        qkv = product(x[0], w.qkv, w.qkv_bias, part).unflatten(-1, (-1, 3, self.channels))
        return tuple(t.contiguous() for t in qkv.unbind(-2))


@dataclass(frozen=True, kw_only=True)
class _Attention(Operator):
    """Gives a number for each pair of tokens and each head; tensor parallelism splits heads."""

    length: int
    memory_length: int
    heads: int

    def values(self) -> tuple[Value, ...]:
        return (Value((self.heads, self.length, self.memory_length)),)

    def splits(self, algo: int) -> tuple[Splits, Splits]:
        return (1,), (1,)


@dataclass(frozen=True, kw_only=True)
class Score(_Attention):
    channels: int

    def splits(self, algo: int) -> tuple[Splits, Splits]:
        return (2, 2), (1,)

    def compute(self, w: OperatorModule, x: Sequence[Tensor], part: Part) -> Outputs:
        q, k = x
        return q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / math.sqrt(self.channels)


@functools.lru_cache(maxsize=8)
def _later(length: int, memory_length: int) -> Tensor:
    return torch.ones(length, memory_length, dtype=torch.bool).triu(1)


@dataclass(frozen=True, kw_only=True)
class Softmax(_Attention):
    causal: bool

    def compute(self, w: OperatorModule, x: Sequence[Tensor], part: Part) -> Outputs:
        scores = x[0]
        if self.causal:
            scores = scores.masked_fill(_later(self.length, self.memory_length), -math.inf)
        return scores.softmax(-1)


@dataclass(frozen=True, kw_only=True)
class AttentionDropout(_Attention):
    p: float

    def compute(self, w: OperatorModule, x: Sequence[Tensor], part: Part) -> Outputs:
        return _dropout(x[0], self.p, part, same=False)


@dataclass(frozen=True, kw_only=True)
class AttentionContext(_Attention):
    channels: int

    def values(self) -> tuple[Value, ...]:
        return (Value((self.length, self.heads * self.channels)),)

    def splits(self, algo: int) -> tuple[Splits, Splits]:
        return (1, 2), (2,)

    def compute(self, w: OperatorModule, x: Sequence[Tensor], part: Part) -> Outputs:
        probabilities, v = x
        return (probabilities @ v.transpose(1, 2)).transpose(1, 2).flatten(2)


@dataclass(frozen=True, kw_only=True)
class DropoutAdd(_Hidden):
    """``residual + dropout(x)``."""

    p: float

    def compute(self, w: OperatorModule, x: Sequence[Tensor], part: Part) -> Outputs:
        return x[1] + _dropout(x[0], self.p, part, same=True)


@dataclass(frozen=True, kw_only=True)
class Gelu(Operator):
    length: int
    features: int

    def values(self) -> tuple[Value, ...]:
        return (Value((self.length, self.features)),)

    def splits(self, algo: int) -> tuple[Splits, Splits]:
        return (2,), (2,)

    def compute(self, w: OperatorModule, x: Sequence[Tensor], part: Part) -> Outputs:
        return F.gelu(x[0])


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits of which each rank has a part of the classes."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, part: Part) -> Tensor:
        own = labels - part.tp_rank * logits.shape[-1]
        elsewhere = (own < 0) | (own >= logits.shape[-1])
        own = own.masked_fill(elsewhere, 0).unsqueeze(-1)
        top = logits.amax(-1, keepdim=True)
        if part.tp_place is not None:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=part.tp_place.group)
        shifted = logits - top
        chosen = shifted.gather(-1, own).squeeze(-1).masked_fill(elsewhere, 0.0)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(-1), chosen])
        if part.tp_place is not None:
            dist.all_reduce(sums, group=part.tp_place.group)
        exponentials /= sums[0].unsqueeze(-1)
        ctx.save_for_backward(exponentials, own, elsewhere)
        return sums[0].log() - sums[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        softmax, own, elsewhere = ctx.saved_tensors
        result = softmax.scatter_add(-1, own, -(~elsewhere).to(softmax.dtype).unsqueeze(-1))
        return result * gradient.unsqueeze(-1), None, None


@dataclass(frozen=True, kw_only=True)
class LanguageLoss(Operator):
    """Logits over the vocabulary, and of each sample the mean cross entropy with its labels."""

    length: int
    hidden: int
    vocabulary: int

    def values(self) -> tuple[Value, ...]:
        return (Value(()),)

    def weights(self, algo: int) -> dict[str, Weight]:
        return {"weight": Weight((self.vocabulary, self.hidden), split=0, std=0.02)}

    def compute(self, w: OperatorModule, x: Sequence[Tensor], part: Part) -> Outputs:
        labels = _checked(x[1], self.vocabulary, self.name)
        logits = _column(x[0], w.weight, None, part)
        return _VocabularyCrossEntropy.apply(logits, labels, part).mean(-1)


# --- convolutional networks: values are whole on every tensor-parallel rank ---------------


def _convolve(op: Convolution | Shortcut, w: OperatorModule, x: Tensor, part: Part) -> Tensor:
    if part.tp_place is None:
        return F.conv2d(x, w.weight, stride=op.stride, padding=op.padding)
    if part.algo == 0:
        x = _backward_sum(x, part)
        y = F.conv2d(x, w.weight, stride=op.stride, padding=op.padding)
        return _collectives.gather(y, 1, part.tp_place.group)
    x = _collectives.scatter(x, 1, part.tp_place.group)
    return _forward_sum(F.conv2d(x, w.weight, stride=op.stride, padding=op.padding), part)


def _kernel(op: Convolution | Shortcut, algo: int) -> Weight:
    fan = op.out_channels * op.kernel**2
    shape = (op.out_channels, op.in_channels, op.kernel, op.kernel)
    return Weight(shape, split=algo, std=math.sqrt(2.0 / fan))


@dataclass(frozen=True, kw_only=True)
class Convolution(Operator):
    """Without a bias; `algo` 0 splits output channels, 1 input channels."""

    in_channels: int
    out_channels: int
    width: int  # of the input
    kernel: int
    stride: int = 1
    padding: int = 0
    ways = 2

    def values(self) -> tuple[Value, ...]:
        width = (self.width + 2 * self.padding - self.kernel) // self.stride + 1
        return (Value((self.out_channels, width, width)),)

    def weights(self, algo: int) -> dict[str, Weight]:
        return {"weight": _kernel(self, algo)}

    def compute(self, w: OperatorModule, x: Sequence[Tensor], part: Part) -> Outputs:
        return _convolve(self, w, x[0], part)


@dataclass(frozen=True, kw_only=True)
class Shortcut(Operator):
    """``x + residual``, where the residual may need a 1x1 convolution to fit."""

    in_channels: int
    out_channels: int
    width: int  # of x
    stride: int
    convolves: bool
    kernel: int = 1
    padding: int = 0
    ways = 2

    def values(self) -> tuple[Value, ...]:
        return (Value((self.out_channels, self.width, self.width)),)

    def weights(self, algo: int) -> dict[str, Weight]:
        return {"weight": _kernel(self, algo)} if self.convolves else {}

    def compute(self, w: OperatorModule, x: Sequence[Tensor], part: Part) -> Outputs:
        return x[0] + (_convolve(self, w, x[1], part) if self.convolves else x[1])


@dataclass(frozen=True, kw_only=True)
class _Pixels(Operator):
    """Gives channels of an image, which all tensor-parallel ranks have."""

    channels: int
    width: int

    def values(self) -> tuple[Value, ...]:
        return (Value((self.channels, self.width, self.width)),)


@dataclass(frozen=True, kw_only=True)
class BatchNorm(_Pixels):
    """Statistics are of the whole micro-batch, over all data-parallel ranks."""

    relu: bool = False
    momentum: float = 0.1
    eps: float = 1e-5

    def weights(self, algo: int) -> dict[str, Weight]:
        return {"weight": Weight((self.channels,), mean=1.0), "bias": Weight((self.channels,))}

    def buffers(self) -> dict[str, Tensor]:
        return {"mean": torch.zeros(self.channels), "variance": torch.ones(self.channels)}

    def compute(self, w: OperatorModule, x: Sequence[Tensor], part: Part) -> Outputs:
        y = x[0]
        if not part.training:
            mean, variance = w.mean.to(y.dtype), w.variance.to(y.dtype)
            y = F.batch_norm(y, mean, variance, w.weight, w.bias, False, 0.0, self.eps)
            return F.relu(y) if self.relu else y
        count = y.numel() // self.channels * part.dp
        if part.dp_group is None:
            variance, mean = torch.var_mean(y, (0, 2, 3), correction=0)
        else:
            mean = _collectives.sum_both(y.sum((0, 2, 3)), part.dp_group) / count
            deviation = (y - mean.view(1, -1, 1, 1)).square().sum((0, 2, 3))
            variance = _collectives.sum_both(deviation, part.dp_group) / count
        if not part.recomputing:
            with torch.no_grad():
                unbiased = variance * (count / max(count - 1, 1))
                w.mean.lerp_(mean.to(w.mean.dtype), self.momentum)
                w.variance.lerp_(unbiased.to(w.variance.dtype), self.momentum)
        scale = w.weight * (variance + self.eps).rsqrt()
        shift = w.bias - mean * scale
        y = torch.addcmul(shift.view(1, -1, 1, 1), y, scale.view(1, -1, 1, 1))
        return F.relu(y) if self.relu else y


@dataclass(frozen=True, kw_only=True)
class Relu(_Pixels):
    def compute(self, w: OperatorModule, x: Sequence[Tensor], part: Part) -> Outputs:
        return F.relu(x[0])


@dataclass(frozen=True, kw_only=True)
class MaxPool(_Pixels):
    def values(self) -> tuple[Value, ...]:
        width = (self.width + 2 - 3) // 2 + 1
        return (Value((self.channels, width, width)),)

    def compute(self, w: OperatorModule, x: Sequence[Tensor], part: Part) -> Outputs:
        return F.max_pool2d(x[0], 3, 2, 1)


@dataclass(frozen=True, kw_only=True)
class AveragePool(Operator):
    channels: int

    def values(self) -> tuple[Value, ...]:
        return (Value((self.channels,)),)

    def compute(self, w: OperatorModule, x: Sequence[Tensor], part: Part) -> Outputs:
        return x[0].mean((2, 3))


@dataclass(frozen=True, kw_only=True)
class ClassLoss(Operator):
    """A linear layer to classes, and of each sample the cross entropy with its label."""

    features: int
    classes: int

    def values(self) -> tuple[Value, ...]:
        return (Value(()),)

    def weights(self, algo: int) -> dict[str, Weight]:
        std = 1 / math.sqrt(self.features)
        shape = (self.classes, self.features)
        return {"weight": Weight(shape, std=std), "bias": Weight((self.classes,))}

    def compute(self, w: OperatorModule, x: Sequence[Tensor], part: Part) -> Outputs:
        labels = _checked(x[1], self.classes, self.name)
        return F.cross_entropy(F.linear(x[0], w.weight, w.bias), labels, reduction="none")


# --- a model is a sequence of operators ---------------------------------------------------


@dataclass(frozen=True)
class Model:
    """Operators in order, and the data of a batch that they begin with.

    The last operator's only output is each sample's loss.
    """

    name: str
    size: str
    operators: tuple[Operator, ...]
    data: dict[str, Value]
    facts: Facts = field(default_factory=dict)  # keys of a plan that describe it

    @functools.cached_property
    def values(self) -> dict[str, Value]:
        """All values by their names."""
        found = dict(self.data)
        for op in self.operators:
            found.update(zip(op.outputs, op.values(), strict=True))
        return found

    @functools.cached_property
    def names(self) -> list[str]:
        return [op.name for op in self.operators]

    def check(self) -> Model:
        """This model, if every operator's inputs come before it.

        Raises:
            PlanError: otherwise.
        """
        known = set(self.data)
        for op in self.operators:
            if missing := [name for name in op.inputs if name not in known]:
                raise PlanError(f"{op.name} needs {', '.join(missing)}, which nothing gives")
            if again := [name for name in op.outputs if name in known]:
                raise PlanError(f"{op.name} gives {', '.join(again)} again")
            known.update(op.outputs)
        last = self.operators[-1]
        if [value.shape for value in last.values()] != [()]:
            raise PlanError(f"{last.name} does not give one loss for each sample")
        return self

    def random_batch(self, samples: int, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
        """Random data of the right shapes: the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        batch = {}
        for name, value in self.data.items():
            shape = (samples, *value.shape)
            if value.high:
                batch[name] = torch.randint(value.high, shape, generator=generator)
            else:
                batch[name] = torch.randn(shape, generator=generator).to(value.dtype or dtype)
        return batch
