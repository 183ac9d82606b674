"""Subject: models of parallel layers, trained beside the same model of plain torch."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint as recomputed

import fusedpg
from checks.compiled import compiles
from fusedpg import tensor_parallel
from fusedpg.fusion import compile as compiling
from fuzz.core import Choices, Pair, Tape, done, draw_tape
from harness import Context

WHERE = ("2", "3")
EXAMPLES = 7
BOUNDS = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
LEADS = [(), (0,), (1,), (3,), (2, 0), (5, 1), (2, 7), (33,), (4, 3, 2), (700,)]
ACTIVATIONS = [F.gelu, F.silu, torch.tanh, None]


class Block(nn.Module):
    """What is parallel in one of the models, and whole in the other."""

    def __init__(self, spec: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        self.up = nn.Linear(spec["width"], spec["hidden"], spec["up_bias"], dtype=dtype)
        self.down = nn.Linear(spec["hidden"], spec["out"], spec["down_bias"], dtype=dtype)
        norms = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}
        kind = norms.get(spec["norm"])
        self.norm = None if kind is None else kind(spec["out"], eps=1e-5, dtype=dtype)
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side: Any = 0
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
                side = side + (before * before).mean() if before.numel() else side
            x = y
        return x if isinstance(side, int) else x + side


def draw_specs(chosen: Choices, size: int) -> list[dict[str, Any]]:
    specs = []
    width = chosen.choice([1, 3, 8, 17, 40])
    for _ in range(chosen.randint(1, 3)):
        residual = chosen.choice([None, "input", "strange"])
        out = width if residual else chosen.choice([1, 5, 16, 33])
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
                "norm": chosen.choice([None, None, "rms", "layer"]),
                "residual": residual,
                "overlap": chosen.choice([None, True, False]),
            }
        )
        width = out
    return specs


def parallel(
    whole: Model, how: str, group: dist.ProcessGroup, chosen: Choices, dtype: torch.dtype
) -> Model:
    """The model in the other way, from the same weights."""
    model = copy.deepcopy(whole).to(dtype)
    model.again = False
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model.blocks:
        spec = block.spec
        row = {"dropout": spec["p"], "norm": block.norm, "overlap": spec["overlap"]}
        column = {"activation": spec["activation"] if spec["inside"] else None}
        up, down = block.up, block.down
        block.norm = None
        if how == "styles":
            plan = {
                "up": tensor_parallel.ColwiseParallel(),
                "down": tensor_parallel.RowwiseParallel(),
            }
            parallelize_module(block, mesh, plan)
            block.down._set(**row)
            block.up._set(**column)
        elif how == "from_linear":
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


def run(program: Tape, context: Context) -> Iterator[Pair]:
    """Some steps of a model."""
    chosen = program.choices()
    torch.manual_seed(chosen.getrandbits(24))
    size = context.world_size
    specs = draw_specs(chosen, size)
    dtype = chosen.choice([torch.float64, torch.float64, torch.float32, torch.bfloat16])
    again = chosen.random() < 0.25
    how = chosen.choice(["styles", "from_linear", "made"])
    mode = chosen.choice(["compiled", "compiled", "eager", "no compiler"])
    graph = chosen.random() < 0.15
    frozen = chosen.choice([None, None, "up", "down", "weights"])
    momentum = chosen.choice([0.0, 0.9])
    what = f"{dtype}, {how}, {mode}, again {again}, graph {graph}, {frozen}, {specs}"
    group = dist.group.WORLD
    whole = Model(specs, torch.float64, False)
    if dtype != torch.float64:  # the same numbers
        for parameter in whole.parameters():
            parameter.data = parameter.data.to(dtype).double()
    mine, plain = parallel(whole, how, group, chosen, dtype), copy.deepcopy(whole).to(dtype)
    mine.again = again
    for model in (whole, mine, plain):
        for name, parameter in model.named_parameters():
            if frozen and "norm" not in name and (frozen in name or frozen == name[-6:] + "s"):
                parameter.requires_grad_(False)
    broken = chosen.randrange(size)
    env = compiles(context) if mode != "eager" else contextlib.nullcontext()
    with env, without_compiler(mode == "no compiler" and context.rank == broken):
        yield from _steps(context, chosen, whole, mine, plain, dtype, momentum, graph, what, group)


def _steps(
    context: Context,
    chosen: Choices,
    whole: Model,
    mine: Model,
    plain: Model,
    dtype: torch.dtype,
    momentum: float,
    graph: bool,
    what: str,
    group: Any,
) -> Iterator[Pair]:
    bound = BOUNDS[dtype]
    optimizers = []
    for model in (whole, mine, plain):
        given = [p for p in model.parameters() if p.requires_grad]
        optimizers.append(torch.optim.SGD(given, 0.02, momentum) if given else None)
    runs: list[Any] = [whole, torch.compile(mine, backend="aot_eager") if graph else mine, plain]
    lead = chosen.choice(LEADS)
    for step in range(3):
        yield done(f"step {step}")
        if chosen.random() < 0.3:
            lead = chosen.choice(LEADS)
        seed = chosen.randrange(1 << 62)
        training = chosen.random() < 0.85
        kept = masks(mine, lead, group, seed)
        for model in (whole, mine, plain):
            model.train(training)
            for number, block in enumerate(model.blocks):
                block.seed = seed + number
                block.mask = kept[number] if training else None
                if block.mask is not None and model is plain:
                    block.mask = block.mask.to(dtype)
        generator = torch.Generator().manual_seed(seed)
        width = whole.blocks[0].spec["width"]
        x = torch.randn(*lead, width, generator=generator, dtype=torch.float64).to(dtype)
        if chosen.random() < 0.3 and x.dim() > 1:
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        wants = chosen.random() < 0.7
        xs = [x.double().clone(), x.clone(), x.clone()]
        for given in xs:
            given.requires_grad_(wants)
        kind = chosen.choice(["sum", "weighted", "square"])
        weights = torch.randn(*lead, whole.blocks[-1].spec["out"], generator=generator).double()
        note = f"step {step}, {lead}, {kind}, training {training}, {x.stride()}\n{what}"
        results = []
        for run, given in zip(runs, xs):
            y = run(given)
            if y.requires_grad:
                z = y if y.dtype == torch.float64 else y.float()
                if kind == "sum":
                    z.sum().backward()
                elif kind == "weighted":
                    (z * weights.to(z.dtype)).sum().backward()
                else:
                    (z * z).mean().backward() if z.numel() else z.sum().backward()
            results.append(y.detach())
        assert results[1].dtype == dtype, note
        agree(results[1], results[0], results[2], bound, f"value, {note}")
        same_everywhere(group, results[1], f"value, {note}")
        if wants:
            assert (xs[0].grad is None) == (xs[1].grad is None), note
            if xs[0].grad is not None:
                agree(xs[1].grad, xs[0].grad, xs[2].grad, 3 * bound, f"input, {note}")
                same_everywhere(group, xs[1].grad, f"input, {note}")
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
            if dtype != torch.float64:  # go on from the same numbers
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
