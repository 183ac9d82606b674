"""The four fused steps against one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from checks.cases import digest, distance, flat, randn, same
from checks.faults import works
from checks.optim_script import in_one_process
from harness import Context

SHAPES: tuple[tuple[int, ...], ...] = ((1021,), (7,), (31, 33), (2, 3, 4, 5), (4099,), (1,))
CLASSES = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW", "lamb": "LAMB"}
OPS = tuple(CLASSES)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
# Of the relative norm. Half types: rounding of a sum in another order, now and then.
TOLERANCE = {FP32: 1e-6, FP64: 1e-13, BF16: 2e-3, FP16: 3e-4}
# NCCL's ring rounds sums of half gradients at every hop.
WIRE = {BF16: 1.5e-2, FP16: 2e-3}
HYPERS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "dampening": 0.0, "nesterov": False},
    "adam": {"lr": 1e-2, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-7},
    "adamw": {"lr": 1e-2, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-7},
    "lamb": {"lr": 1e-2, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-6},
}
STATES = {
    "sgd": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "lamb": ("exp_avg", "exp_avg_sq"),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """A training run of some tensors; types are taken in turn over the tensors."""

    op: str = "adamw"
    hyper: tuple[tuple[str, Any], ...] = ()
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    steps: int = 8
    dtypes: tuple[torch.dtype, ...] = (FP32,)
    grad_dtypes: tuple[torch.dtype, ...] = ()  # default: the parameters'
    half_state: bool = False  # state in the parameters' type, as torch
    master: bool = False
    memory: str = "ordinary"  # or arena, mixed
    layout: str = "contiguous"  # or channels_last, transposed
    reduce: str = "mean"
    weighted: bool = False
    scale: float | None = None
    lr_tensor: bool = False
    async_op: bool = False
    seed: int = 0
    ring: bool = False  # gradients are summed by NCCL
    present: float = 1.0  # of the gradients' blocks of 256; the others are zero, and skipped

    def hypers(self) -> dict[str, Any]:
        return HYPERS[self.op] | dict(self.hyper)

    def dtype(self, i: int) -> torch.dtype:
        return self.dtypes[i % len(self.dtypes)]

    def compute(self, i: int) -> torch.dtype:
        return FP64 if self.dtype(i) == FP64 else FP32

    def grad_dtype(self, i: int) -> torch.dtype:
        types = self.grad_dtypes or self.dtypes
        return types[i % len(types)]

    def state_dtype(self, i: int) -> torch.dtype:
        return self.dtype(i) if self.half_state and self.op != "lamb" else self.compute(i)

    def state_names(self) -> tuple[str, ...]:
        names, hyper = STATES[self.op], self.hypers()
        if self.op == "sgd":
            return names if hyper["momentum"] else ()
        return names if hyper.get("amsgrad") else names[:2]


# Options of Run: of all steps alike, and of single ones.
RUNS: dict[str, dict[str, Any]] = {
    "channels_last": {"layout": "channels_last"},
    "transposed": {"layout": "transposed"},
    "sum": {"reduce": "sum"},
    "scaled": {"scale": 1024.0},
    "weighted": {"weighted": True},
    "weighted scaled": {"weighted": True, "scale": 8.0},
    "tensor lr": {"lr_tensor": True},
    "async": {"async_op": True},
    "async tensor lr": {"async_op": True, "lr_tensor": True, "scale": 2.0},
    "maximize": {"hyper": (("maximize", True),)},
    "no decay": {"hyper": (("weight_decay", 0.0),)},
    "fp64": {"dtypes": (FP64,)},
    "bf16": {"dtypes": (BF16,)},
    "fp16": {"dtypes": (FP16,)},
    "fp32 with bf16 gradients": {"grad_dtypes": (BF16,)},
    "bf16 with fp32 gradients": {"dtypes": (BF16,), "grad_dtypes": (FP32,)},
    "bf16 with masters": {"dtypes": (BF16,), "master": True},
    "fp16 with masters": {"dtypes": (FP16,), "master": True},
    "masters weighted": {"dtypes": (BF16,), "master": True, "weighted": True},
    "bf16 state": {"dtypes": (BF16,), "half_state": True},
    "fp16 state": {"dtypes": (FP16,), "half_state": True},
    "types mixed": {"dtypes": (FP32, BF16, FP64, FP16)},
    "empty tensors": {"shapes": ((0,), (100,), (0, 4), (5,), (33,), (97,))},
}
OWN_RUNS: dict[str, dict[str, Any]] = {
    "sgd without momentum": {"op": "sgd", "hyper": (("momentum", 0.0),)},
    "sgd dampening": {"op": "sgd", "hyper": (("dampening", 0.3),)},
    "sgd nesterov": {"op": "sgd", "hyper": (("nesterov", True),)},
    "adam amsgrad": {"op": "adam", "hyper": (("amsgrad", True),)},
    "adamw amsgrad bf16 state": {
        "op": "adamw",
        "hyper": (("amsgrad", True),),
        "dtypes": (BF16,),
        "half_state": True,
    },
    "lamb trust_clip": {"op": "lamb", "hyper": (("trust_clip", True), ("weight_decay", 0.01))},
    "lamb always_adapt": {"op": "lamb", "hyper": (("always_adapt", True), ("weight_decay", 0.0))},
}


def torch_optimizer(op: str, params: list[torch.Tensor], hyper: dict[str, Any]) -> Any:
    """The oracle."""
    hyper = dict(hyper)
    if op != "sgd":
        hyper["betas"] = hyper.pop("beta1"), hyper.pop("beta2")
    return in_one_process(CLASSES[op], params, **hyper)


class Model:
    """Parameters, gradients and this rank's slices of the state."""

    def __init__(self, context: Context, run: Run) -> None:
        import fusedpg

        self.context, self.run = context, run
        rank, size = context.rank, context.world_size
        shapes = list(enumerate(run.shapes))
        self.params = [self.place(i, shape, run.dtype(i)) for i, shape in shapes]
        self.grads = [self.place(i + 1, shape, run.grad_dtype(i)) for i, shape in shapes]
        for i, param in enumerate(self.params):
            param.copy_(self.initial(i))
        self.ranges = [fusedpg.shard_range(param.numel(), size, rank) for param in self.params]
        self.states = {
            name: [
                torch.zeros(length, dtype=run.state_dtype(i))
                for i, (_, length) in enumerate(self.ranges)
            ]
            for name in run.state_names()
        }
        for buffer in self.states.get("momentum_buffer", []):
            buffer.fill_(torch.nan)  # the first step must not read it
        self.masters = [
            flat(param)[begin : begin + length].float()
            for param, (begin, length) in zip(self.params, self.ranges, strict=True)
            if run.master
        ]
        self.steps = [torch.tensor(0.0) for _ in self.params if run.op != "sgd"]
        self.calls = 0

    def place(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the memory and layout of the run."""
        arena = self.run.memory == "arena" or (
            self.run.memory == "mixed" and (index + self.context.rank) % 2 == 0
        )
        empty = self.context.empty
        if self.run.layout == "channels_last" and len(shape) == 4:
            a, b, c, d = shape
            return empty(a, c, d, b, dtype=dtype, arena=arena).permute(0, 3, 1, 2)
        if self.run.layout == "transposed" and len(shape) == 2:
            return empty(*shape[::-1], dtype=dtype, arena=arena).t()
        return empty(*shape, dtype=dtype, arena=arena)

    def initial(self, i: int) -> torch.Tensor:
        shape = self.run.shapes[i]
        values = randn(self.run.seed, i, numel=torch.Size(shape).numel()).reshape(shape)
        return values.to(self.run.dtype(i))

    def gradient(self, step: int, rank: int, i: int) -> torch.Tensor:
        shape = self.run.shapes[i]
        numel = torch.Size(shape).numel()
        values = randn(self.run.seed, i, step, rank, numel=numel)
        if self.run.present < 1:
            chance = torch.special.ndtr(randn(self.run.seed, i, step, rank, 1, numel=numel))
            present = (chance[::256] < self.run.present).repeat_interleave(256)[:numel]
            values = torch.where(present, values, 0)  # not a product: -0.0 is present
        return values.reshape(shape).to(self.run.grad_dtype(i))

    def weight(self, rank: int) -> float:
        """A rank without data is among them."""
        return float(rank) + (self.context.world_size == 1)

    def reduced(self, step: int, i: int) -> torch.Tensor:
        """What the ranks' gradients amount to."""
        ranks = range(self.context.world_size)
        total = torch.zeros(self.run.shapes[i], dtype=FP64)
        for rank in ranks:
            share = self.weight(rank) if self.run.weighted else 1.0
            total += share * self.gradient(step, rank, i).double()
        if self.run.weighted:
            total /= sum(self.weight(rank) for rank in ranks)
        elif self.run.reduce == "mean":
            total /= len(ranks)
        return total.to(self.run.compute(i))

    def set_gradients(self, step: int) -> None:
        for i, grad in enumerate(self.grads):
            grad.copy_(self.gradient(step, self.context.rank, i) * (self.run.scale or 1))

    def options(self) -> dict[str, Any]:
        run = self.run
        hyper = run.hypers()
        if run.lr_tensor:
            hyper["lr"] = torch.tensor(hyper["lr"], dtype=FP64)
        if run.op == "sgd":
            hyper["is_first_step"] = self.calls == 0
        hyper |= {"reduce": run.reduce, "async_op": run.async_op, "master_params": self.masters}
        if run.present < 1:
            hyper["block_skip"] = True
        if run.weighted:
            hyper["weight"] = self.weight(self.context.rank)
        if run.scale is not None:
            hyper |= {"grad_scale": torch.tensor(run.scale), "found_inf": torch.tensor(0.0)}
        return hyper

    def lists(self) -> list[list[torch.Tensor]]:
        """The positional arguments."""
        lists = [self.params, self.grads]
        names = STATES[self.run.op]
        lists += [self.states.get(name, []) for name in names]
        if self.run.op != "sgd":
            lists.append(self.steps)
        return lists

    def start(self, **override: Any) -> Any:
        """One call of the op on what the gradients hold; its Work, if asynchronous."""
        import fusedpg

        options = self.options() | override
        work = getattr(fusedpg, f"fused_{self.run.op}_")(*self.lists(), **options)
        assert (work is not None) == options["async_op"]
        self.calls += 1
        return work

    def step(self, **override: Any) -> None:
        work = self.start(**override)
        if work is not None:
            work.wait()

    def state(self) -> list[torch.Tensor]:
        slices = [one for name in self.states for one in self.states[name]]
        return [*self.params, *slices, *self.masters, *self.steps]


class Oracle:
    """The run in one process: arithmetic in float32 or float64, storage in the run's types."""

    def __init__(self, model: Model) -> None:
        self.model, self.run = model, model.run
        indices = range(len(self.run.shapes))
        self.params = [model.initial(i).to(self.run.compute(i)).requires_grad_() for i in indices]
        self.optimizer = torch_optimizer(self.run.op, self.params, self.run.hypers())

    def step(self, number: int) -> None:
        for i, param in enumerate(self.params):
            param.grad = self.model.reduced(number, i)
        self.optimizer.step()
        for i, param in enumerate(self.params):
            if not self.run.master:
                param.data.copy_(param.detach().to(self.run.dtype(i)))
            for name in self.run.state_names():
                value = self.optimizer.state[param][name]
                value.copy_(value.to(self.run.state_dtype(i)))


def compare(model: Model, oracle: Oracle) -> None:
    """Parameters, masters, state and counters within the tolerance of their types."""
    run = model.run
    for i, want in enumerate(oracle.params):
        where = (i, run)
        exact = want.detach()
        tolerance = TOLERANCE[run.dtype(i)]
        wire = WIRE.get(model.grads[i].dtype, 0.0) if run.ring else 0.0
        tolerance = max(tolerance, wire)
        assert distance(model.params[i].to(exact.dtype), exact) <= tolerance * 4 ** (run.master), (
            where
        )
        offset, length = model.ranges[i]
        if run.op != "sgd":
            assert float(model.steps[i]) == run.steps
        pairs = [(name, model.states[name][i]) for name in run.state_names()]
        wants = [oracle.optimizer.state[want][name] for name in run.state_names()]
        if run.master:
            pairs.append(("master", model.masters[i]))
            wants.append(exact)
        # The state of a half parameter has that parameter's own noise in it.
        limit = 2 * (max(TOLERANCE[FP32], wire) if run.master else tolerance)
        for (name, mine), full in zip(pairs, wants, strict=True):
            laid_out = torch.empty_strided(
                full.shape, model.params[i].stride(), dtype=full.dtype
            ).copy_(full.detach())
            shard = flat(laid_out)[offset : offset + length]
            assert mine.shape == shard.shape
            if length:
                # Gradients are about 1: few of them may cancel, and only their error is left.
                error = float((mine.to(shard.dtype) - shard).norm())
                assert error <= limit * max(1.0, float(shard.norm())), (name, *where)


def train(model: Model, oracle: Oracle | None) -> None:
    for step in range(model.run.steps):
        model.set_gradients(step)
        kept = [grad.clone() for grad in model.grads]
        versions = [param._version for param in model.params]
        model.step()
        for grad, before in zip(model.grads, kept, strict=True):
            assert same(grad, before), "a gradient was written"
        for param, version in zip(model.params, versions, strict=True):
            assert param._version > version, "autograd was not told about the update"
        if oracle is not None:
            oracle.step(step)


def parity(context: Context, run: Run) -> str:
    """A run against its oracle; the digest of the parameters."""
    model = Model(context, run)
    oracle = Oracle(model)
    train(model, oracle)
    compare(model, oracle)
    return digest(model.params)


def digests(context: Context, run: Run) -> tuple[str, str]:
    """A run without oracle; digests of parameters and of all state."""
    model = Model(context, run)
    train(model, None)
    return digest(model.params), digest(model.state())


def bert(hidden: int = 64, layers: int = 24, vocabulary: int = 1907) -> tuple[tuple[int, ...], ...]:
    """The shapes of BERT-large with narrower layers: 397 tensors."""
    h, f = hidden, 4 * hidden
    shapes: list[tuple[int, ...]] = [(vocabulary, h), (32, h), (2, h), (h,), (h,)]
    for _ in range(layers):
        shapes += [(h, h), (h,)] * 4 + [(h,), (h,), (f, h), (f,), (h, f), (h,), (h,), (h,)]
    shapes += [(h, h), (h,), (vocabulary,), (h, h), (h,), (h,), (h,), (1,)]
    return tuple(shapes)


def like_flat(
    context: Context,
    op: str,
    shapes: tuple[tuple[int, ...], ...],
    memory: str,
    kind: type[Model] = Model,
) -> None:
    """Many tensors in one call, and their elements as one tensor: the same bits."""
    shapes = tuple(shapes)
    model = kind(context, Run(op, shapes=shapes, memory=memory))
    numel = sum(param.numel() for param in model.params)
    whole = kind(context, Run(op, shapes=((numel,),), memory=memory))
    whole.params[0].copy_(torch.cat([param.flatten() for param in model.params]))
    for step in range(3):
        gradient = randn(step, context.rank, numel=numel).to(whole.params[0].device)
        whole.grads[0].copy_(gradient)
        pieces = gradient.split([grad.numel() for grad in model.grads])
        for grad, piece in zip(model.grads, pieces, strict=True):
            grad.copy_(piece.view_as(grad))
        model.step()
        whole.step()
    assert same(torch.cat([param.flatten() for param in model.params]), whole.params[0])
    assert all(float(step) == 3 for step in model.steps)


def overflow(context: Context, run: Run, kind: type[Model] = Model) -> None:
    """An overflow that one rank has seen stops all of them and nothing moves."""
    model = kind(context, dataclasses.replace(run, scale=4.0))
    model.set_gradients(0)
    model.step()
    before = [one.clone() for one in model.state()]
    last = context.rank == context.world_size - 1
    if last:
        model.grads[0].view(-1)[3] = torch.inf
    found = torch.tensor(float(last), device=model.params[0].device)
    model.step(found_inf=found)
    assert float(found) == 1.0, "found_inf is not global"
    for now, old in zip(model.state(), before, strict=True):
        assert same(now, old), "a skipped step changed something"
    model.set_gradients(1)
    found = torch.zeros_like(found)
    model.step(found_inf=found)
    assert float(found) == 0.0
    assert all(float(step) == 2 for step in model.steps)
    assert not same(model.params[0], before[0])


def unmoved(context: Context, run: Run) -> None:
    """Nothing to learn moves nothing; moments and counters advance."""
    model = Model(context, run)
    before = [param.clone() for param in model.params]
    model.set_gradients(0)
    model.step()
    for param, old in zip(model.params, before, strict=True):
        assert same(param, old)
    assert all(float(step) == 1 for step in model.steps)
    if any(length for _, length in model.ranges):
        for name in run.state_names():
            values = torch.cat([state.flatten() for state in model.states[name]])
            assert bool(values.any()) and not bool(values.isnan().any()), name


def sparse(context: Context, op: str) -> None:
    """A sparse gradient is refused, by torch's dispatcher or by us, and changes nothing."""
    model = Model(context, Run(op, shapes=((1021,), (64, 3))))
    model.set_gradients(0)
    model.grads[0] = model.grads[0].to_sparse()
    kept = [one.clone() for one in model.state()]
    for async_op in (False, True):
        with pytest.raises((ValueError, RuntimeError), match=r"(?i)sparse"):
            model.step(async_op=async_op)
    for now, old in zip(model.state(), kept, strict=True):
        assert same(now, old), "a refused call changed something"
    works()


# --- groups that span hosts ----------------------------------------------------


def manual(context: Context, op: str, options: tuple[tuple[str, Any], ...] = ()) -> str:
    """An optimizer class in manual mode against its oracle."""
    import fusedpg

    run = Run(op, hyper=options)
    model = Model(context, run)
    oracle = Oracle(model)
    # Only rank 0's values count.
    params = [torch.nn.Parameter(model.initial(i) + context.rank) for i in range(len(run.shapes))]
    hyper = run.hypers()
    if op != "sgd":
        hyper["betas"] = hyper.pop("beta1"), hyper.pop("beta2")
    optimizer = getattr(fusedpg.optim, CLASSES[op])(params, **hyper)
    for step in range(run.steps):
        for i, param in enumerate(params):
            param.grad = model.gradient(step, context.rank, i)
        optimizer.step()
        optimizer.zero_grad()
        oracle.step(step)
    for param, want in zip(params, oracle.params, strict=True):
        assert distance(param.detach(), want.detach()) <= 1e-6, run
    held = {key for state in optimizer.state.values() for key in state}
    assert held == {*run.state_names()} | ({"step"} if op != "sgd" else set())
    return digest([param.detach() for param in params])
