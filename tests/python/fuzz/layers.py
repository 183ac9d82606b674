"""Subject: models of parallel layers, trained beside the same model of plain torch.

With `sequence_dim` ranks have parts of the rows between layers, otherwise all have all of them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint as recomputed

import fusedpg
from checks.compiled import compiles
from checks.compiled import done as operations
from fusedpg import tensor_parallel
from fusedpg.fusion import compile as compiling
from fuzz.core import Choices, Pair, Tape, done, draw_tape
from harness import Context

WHERE = ("2", "3", "1", "4", "two and one")
EXAMPLES = 4
BOUNDS = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
LEADS = [(), (0,), (1,), (3,), (2, 0), (5, 1), (2, 7), (33,), (4, 3, 2), (700,)]
ACTIVATIONS = [F.gelu, F.silu, torch.tanh, None]
# Parts of the names of parameters without gradients.
FROZEN: list[tuple[str, ...]] = [(), (), ("up.",), ("down.",), ("weight",), ("bias",)]
FROZEN += [("up.weight", "norm.bias"), ("down.weight", "norm.weight"), ("up.bias", "down.bias")]


class Block(nn.Module):
    """What is parallel in one of the models, and whole in the other."""

    def __init__(self, spec: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.up = nn.Linear(spec["width"], spec["hidden"], spec["up_bias"], dtype=dtype)
        self.down = nn.Linear(spec["hidden"], spec["out"], spec["down_bias"], dtype=dtype)
        self.norm: nn.Module | None = None
        if spec["norm"] is not None:
            kind = nn.LayerNorm if spec["norm"] == "layer" else nn.RMSNorm
            affine = spec["norm"] != "bare"
            self.norm = kind(spec["out"], 1e-5, affine, dtype=dtype)
            for parameter in self.norm.parameters():  # not as they begin
                parameter.data += torch.randn_like(parameter)
        self.seed: int | None = None
        self.mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, r: torch.Tensor | None) -> Any:
        act = self.spec["activation"] or (lambda y: y)
        if isinstance(self.down, fusedpg.RowParallelLinear):
            y = self.up(x)
            if not self.spec["inside"]:
                y = act(y)
            return self.down(y, r, seed=self.seed)
        y = self.down(act(self.up(x)))
        if self.mask is not None:
            y = y * self.mask
        y = y if r is None else r + y
        return y if self.norm is None else (self.norm(y), y)


class Model(nn.Module):
    def __init__(self, specs: list[dict[str, Any]], dtype: torch.dtype, again: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(spec, dtype) for spec in specs)
        self.again = again

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The result, and what norms have been taken of."""
        sums = []
        for block in self.blocks:
            spec = block.spec
            r = None
            if spec["residual"] == "input":
                r = x
            elif spec["residual"] == "strange":  # of other strides
                r = x.movedim(0, -1).contiguous().movedim(-1, 0) if x.dim() > 1 else x
            if self.again and torch.is_grad_enabled():
                y = recomputed(block, x, r, use_reentrant=False)
            else:
                y = block(x, r)
            if spec["norm"]:
                y, before = y
                sums.append(before)
            x = y
        return [x, *sums]


def draw_specs(chosen: Choices, size: int) -> list[dict[str, Any]]:
    specs = []
    width = chosen.choice([1, 3, 8, 17, 40, 64])
    for _ in range(chosen.randint(1, 3)):
        residual = chosen.choice([None, "input", "strange"])
        # A norm of rows of whole lines is computed by the operation that adds up.
        out = width if residual else chosen.choice([1, 5, 16, 33, 32, 96, 2048])
        specs.append(
            {
                "width": width,
                "hidden": size * chosen.choice([1, 2, 5, 16]),
                "out": out,
                "up_bias": chosen.random() < 0.6,
                "down_bias": chosen.random() < 0.6,
                "activation": chosen.choice(ACTIVATIONS),
                "inside": chosen.random() < 0.5,
                "p": chosen.choice([0.0, 0.0, 0.1, 0.6, 1.0]),
                "norm": chosen.choice([None, None, "rms", "layer", "bare"]),
                "residual": residual,
                "overlap": chosen.choice([None, True, False]),
            }
        )
        width = out
    return specs


def parallel(
    whole: Model, how: str, group: dist.ProcessGroup, dim: int | None, dtype: torch.dtype
) -> Model:
    """The model in the other way, from the same weights; `dim`: of the rows that are parted."""
    model = copy.deepcopy(whole).to(dtype)
    model.again = False
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.blocks:
        spec = block.spec
        both = {"overlap": spec["overlap"], "sequence_dim": dim}
        row = {"dropout": spec["p"], "norm": block.norm, **both}
        column = {"activation": spec["activation"] if spec["inside"] else None, **both}
        up, down = block.up, block.down
        block.norm = None
        if how == "styles":
            layout = Replicate() if dim is None else Shard(dim)
            plan = {
                "up": tensor_parallel.ColwiseParallel(input_layouts=layout),
                "down": tensor_parallel.RowwiseParallel(output_layouts=layout),
            }
            parallelize_module(block, mesh, plan)
            block.down._set(**row)
            block.up._set(**column)
            continue
        if how == "from_linear":
            block.up = fusedpg.ColumnParallelLinear.from_linear(up, group=group, **column)
            block.down = fusedpg.RowParallelLinear.from_linear(down, group=mesh, **row)
        else:
            block.up = fusedpg.ColumnParallelLinear(
                spec["width"], spec["hidden"], spec["up_bias"], dtype=dtype, group=group, **column
            )
            block.down = fusedpg.RowParallelLinear(
                spec["hidden"], spec["out"], spec["down_bias"], dtype=dtype, group=group, **row
            )
            with torch.no_grad():
                for mine, given in ((block.up, up), (block.down, down)):
                    for name, parameter in mine.named_parameters(recurse=False):
                        source = getattr(given, name).detach()
                        parameter.copy_(
                            distribute_tensor(
                                source, mesh, parameter.placements, src_data_rank=None
                            )
                        )
    return model


def masks(model: Model, lead: tuple[int, ...], group: dist.ProcessGroup, seed: int) -> list[Any]:
    """What dropout keeps: of a layer whose product is 1 everywhere, as it says itself."""
    found: list[Any] = []
    for number, block in enumerate(model.blocks):
        p = block.spec["p"]
        if not p:
            found.append(None)
            continue
        twin = nn.Linear(dist.get_world_size(group), block.spec["out"], dtype=torch.float64)
        with torch.no_grad():
            twin.weight.zero_()
            twin.bias.fill_(1.0)
        probe = fusedpg.RowParallelLinear.from_linear(twin, dropout=p, group=group, overlap=False)
        with torch.no_grad():
            found.append(probe(torch.ones(*lead, 1, dtype=torch.float64), seed=seed + number))
        kept = found[-1]
        share = (kept != 0).double().mean() if kept.numel() else 1 - p
        assert abs(share - (1 - p)) <= 5 * (p * (1 - p) / max(kept.numel(), 1)) ** 0.5 + 1e-9
        assert bool(((kept == 0) | ((kept - 1 / (1 - p if p < 1 else 1)).abs() < 1e-12)).all())
    return found


@contextlib.contextmanager
def without_compiler(here: bool) -> Iterator[None]:
    kept = compiling.function
    if here:
        compiling.function = lambda text, name: 0
    try:
        yield
    finally:
        compiling.function = kept


def whole_of(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Failure(AssertionError):
    pass


def agree(got: Any, want: Any, plain: Any, bound: float, what: str) -> None:
    """`plain`: what torch makes of the same numbers in one process in the type of `got`."""
    assert got.shape == want.shape, f"{what}: {got.shape}, {want.shape}"
    if not want.numel():
        return
    scale = max(float(want.abs().max()), 1e-2)
    worst, usual = (float((x.double() - want.double()).abs().max()) / scale for x in (got, plain))
    if not worst <= bound + 5 * usual:
        raise Failure(f"{what}: {worst} of the largest value\n{got}\n{want}")


def same_everywhere(group: dist.ProcessGroup, tensor: torch.Tensor, what: str) -> None:
    tensor = tensor.detach().contiguous()
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, tensor, group=group)
    for other in found:
        if not torch.equal(other, tensor) and not bool(tensor.isnan().any()):
            raise Failure(f"{what}: ranks differ: {(other.double() - tensor.double()).abs().max()}")


def draw(choose: Choices, where: str) -> Tape:
    return draw_tape(choose, 60, 120)


@dataclasses.dataclass
class Steps:
    """A model of parallel layers, the same in one process, and that in the type of the former."""

    context: Context
    chosen: Choices
    dtype: torch.dtype
    group: Any
    dim: int | None  # of the rows of which each rank has a part
    dims: int
    counted: bool  # each dropout is generated code
    models: list[Model]
    runs: list[Any]
    what: str

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part."""
        if self.dim is None or not tensor.shape[self.dim]:
            return tensor
        return tensor.chunk(self.context.world_size, self.dim)[self.context.rank]

    def lead(self) -> tuple[int, ...]:
        """Sizes of what is before the features."""
        if self.dim is None:
            return self.chosen.choice(LEADS)
        lead = [self.chosen.choice([1, 2, 3, 5, 8]) for _ in range(self.dims)]
        lead[self.dim] = self.context.world_size * self.chosen.choice([0, 1, 2, 5, 40, 130])
        return tuple(lead)


def run(program: Tape, context: Context) -> Iterator[Pair]:
    """Some steps of a model."""
    chosen = program.choices()
    torch.manual_seed(chosen.getrandbits(24))
    size = context.world_size
    specs = draw_specs(chosen, size)
    dtype = chosen.choice([torch.float64, torch.float64, torch.float32, torch.bfloat16])
    again = chosen.random() < 0.25
    how = chosen.choice(["styles", "from_linear", "made"])
    mode = chosen.choice(["compiled", "compiled", "eager", "no compiler", "gloo"])
    graph = chosen.random() < 0.15
    frozen = chosen.choice(FROZEN)
    momentum = chosen.choice([0.0, 0.9])
    dims = chosen.choice([1, 2, 2, 3])
    dim = chosen.choice([None, *range(dims)])
    given = dim if dim is None or chosen.random() < 0.7 else dim - dims - 1
    what = f"{dtype}, {how}, {mode}, again {again}, graph {graph}, {frozen}, dim {given}, {specs}"
    group = context.oracle if mode == "gloo" else dist.group.WORLD
    whole = Model(specs, torch.float64, False)
    if dtype != torch.float64:  # the same numbers
        for parameter in whole.parameters():
            parameter.data = parameter.data.to(dtype).double()
    mine, plain = parallel(whole, how, group, given, dtype), copy.deepcopy(whole).to(dtype)
    mine.again = again
    models = [whole, mine, plain]
    for model in models:
        for name, parameter in model.named_parameters():
            name = name.replace("down.norm", "norm")
            parameter.requires_grad_(not any(part in name for part in frozen))
    runs = [whole, torch.compile(mine, backend="aot_eager") if graph else mine, plain]
    counted = mode == "compiled" and not graph and all(spec["overlap"] is False for spec in specs)
    broken = chosen.randrange(size)
    env = compiles(context) if mode != "eager" else contextlib.nullcontext()
    steps = Steps(context, chosen, dtype, group, dim, dims, counted, models, runs, what)
    with env, without_compiler(mode == "no compiler" and context.rank == broken):
        yield from _steps(steps, momentum)


def _steps(s: Steps, momentum: float) -> Iterator[Pair]:
    chosen, (whole, mine, plain), bound = s.chosen, s.models, BOUNDS[s.dtype]
    optimizers = []
    for model in s.models:
        given = [p for p in model.parameters() if p.requires_grad]
        optimizers.append(torch.optim.SGD(given, 0.02, momentum) if given else None)
    lead = s.lead()
    for step in range(3):
        yield done(f"step {step}")
        if chosen.random() < 0.3:
            lead = s.lead()
        seed = chosen.randrange(1 << 62)
        training = chosen.random() < 0.85
        kept = masks(mine, lead, s.group, seed)
        for model in s.models:
            model.train(training)
            for number, block in enumerate(model.blocks):
                block.seed = seed + number
                block.mask = kept[number] if training else None
                if block.mask is not None and model is plain:
                    block.mask = block.mask.to(s.dtype)
        generator = torch.Generator().manual_seed(seed)
        width = whole.blocks[0].spec["width"]
        x = torch.randn(*lead, width, generator=generator, dtype=torch.float64).to(s.dtype)
        if chosen.random() < 0.3 and x.dim() > 1:
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        wants = chosen.random() < 0.7
        xs = [x.double().clone(), s.cut(x).clone(), x.clone()]
        for given in xs:
            given.requires_grad_(wants)
        kind = chosen.choice(["sum", "weighted", "square"])
        weights = torch.randn(*lead, whole.blocks[-1].spec["out"], generator=generator).double()
        note = f"step {step}, {lead}, {kind}, training {training}, {x.stride()}\n{s.what}"
        results = []
        before = operations() if s.counted else 0
        for model, run, given in zip(s.models, s.runs, xs):
            part = s.cut if model is mine else lambda tensor: tensor
            found = run(given)
            if s.counted and model is mine and x.numel() and s.context.world_size > 1:
                dropouts = sum(mask is not None and training for mask in kept)
                assert operations() == before + dropouts, f"a dropout by itself, {note}"
            results.append([y.detach() for y in found])
            y, *sums = (t if t.dtype == torch.float64 else t.float() for t in found)
            if kind == "sum":
                loss = y.sum()
            elif kind == "weighted":
                loss = (y * part(weights).to(y.dtype)).sum()
            else:
                loss = (y * y).sum() / max(weights.numel(), 1)
            for t in sums:
                loss = loss + (t * t).sum() / max(math.prod(lead) * t.shape[-1], 1)
            if loss.requires_grad:
                loss.backward()
        assert results[1][0].dtype == s.dtype, note
        for number, (want, got, usual) in enumerate(zip(*results, strict=True)):
            agree(got, s.cut(want), s.cut(usual), bound, f"value {number}, {note}")
            if s.dim is None:
                same_everywhere(s.context.oracle, got, f"value {number}, {note}")
        if dist.get_backend(s.group) == "fused":
            with torch.no_grad():
                for got, want in zip(mine(xs[1]), results[1], strict=True):
                    assert torch.equal(got, want), f"another without gradients, {note}"
        if wants:
            assert (xs[0].grad is None) == (xs[1].grad is None), note
            if xs[0].grad is not None:
                want, usual = s.cut(xs[0].grad), s.cut(xs[2].grad)
                agree(xs[1].grad, want, usual, 3 * bound, f"input, {note}")
                if s.dim is None:
                    same_everywhere(s.context.oracle, xs[1].grad, f"input, {note}")
        theirs = [p for b in whole.blocks for p in _ordered(b)]
        ours = [p for b in mine.blocks for p in _ordered(b)]
        usual = [p for b in plain.blocks for p in _ordered(b)]
        assert len(theirs) == len(ours)
        for number, (p, q, u) in enumerate(zip(theirs, ours, usual)):
            assert (p.grad is None) == (q.grad is None), f"gradient {number}, {note}"
            if p.grad is not None:
                agree(whole_of(q.grad), p.grad, u.grad, 5 * bound, f"gradient {number}, {note}")
        if chosen.random() < 0.7:
            for optimizer in optimizers:
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()
            if s.dtype != torch.float64:  # go on from the same numbers
                with torch.no_grad():
                    for p, q, u in zip(theirs, ours, usual):
                        agree(whole_of(q), p, u, 5 * bound, f"parameter, {note}")
                        p.copy_(whole_of(q))
                        u.copy_(whole_of(q))
        if chosen.random() < 0.2:
            _saved(mine)


def _ordered(block: Block) -> list[torch.Tensor]:
    norm = block.norm if block.norm is not None else getattr(block.down, "norm", None)
    found = [block.up.weight, block.up.bias, block.down.weight, block.down.bias]
    found += list(norm.parameters()) if norm is not None else []
    return [p for p in found if p is not None]


def _saved(model: Model) -> None:
    """Written and read back: nothing changes."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    before = {name: whole_of(value).clone() for name, value in state.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state)
    for name, value in model.state_dict().items():
        assert torch.equal(whole_of(value), before[name]), name
