"""Row-parallel layers with a norm behind the sum."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed

import harness
from checks.compiled import compiles
from checks.compiled import done as operations
from checks.fusion import reference_dropout
from checks.tensor_parallel import draw as rand
from fusedpg import tensor_parallel
from fuzz import core
from fuzz.core import Choices, Pair, done
from fuzz.layers import without_compiler
from harness import Context, on_ranks
from test_sequence_parallel import close, norm_of

pytestmark = pytest.mark.fused_only


WHERE = ("2", "1", "3")
EXAMPLES = 3
make = tensor_parallel.RowParallelLinear.from_linear


def draw(choose: Choices, where: str) -> SimpleNamespace:
    case, size = SimpleNamespace(), int(where)
    case.dtype = choose.choice([torch.float64, torch.float32, torch.bfloat16])
    case.lead = [choose.choice([1, 2, 3]), choose.choice([1, 4, 40])]
    case.dim = choose.choice([0, 1])
    case.lead[case.dim] *= size
    case.out = choose.choice([32, 64, 96, 2048])
    case.bias = choose.random() < 0.6
    case.residual = choose.random() < 0.6
    case.p = choose.choice([0.0, 0.3])
    case.affine = choose.random() < 0.8
    case.frozen = choose.choice([(), (), ("norm.weight",), ("bias", "weight"), ("x", "r")])
    case.again = choose.random() < 0.2
    return case


def norm_in(case: SimpleNamespace) -> Any:
    if case.affine:
        return norm_of("rms", case.out, case.dtype)
    return nn.RMSNorm(case.out, eps=1e-5, dtype=case.dtype, elementwise_affine=False)


def reference(
    case: SimpleNamespace, model: nn.ModuleDict, x: torch.Tensor, r: torch.Tensor
) -> dict[str, Any]:
    x, r = (t.clone().requires_grad_(n not in case.frozen) for n, t in (("x", x), ("r", r)))
    y = model["linear"](x)
    y = reference_dropout(y, case.p, 5) if case.p else y
    y = r + y if case.residual else y
    z = model["norm"](y)
    loss = (z.double() * rand(*z.shape, seed=5)).sum() + (y.double() * rand(*y.shape, seed=6)).sum()
    if loss.requires_grad:
        loss.backward()
    found = {"norm": z, "sum": y, "gradient of x": x.grad, "gradient of r": r.grad}
    return found | {f"gradient of {name}": p.grad for name, p in model.named_parameters()}


def run(case: SimpleNamespace, context: Context) -> Iterator[Pair]:
    with compiles(context):
        compare(context, case)
    yield done("values and gradients")


def compare(context: Context, case: SimpleNamespace) -> None:
    size, rank, dim = context.world_size, context.rank, case.dim
    torch.manual_seed(3)
    linear = nn.Linear(4 * size, case.out, case.bias, dtype=case.dtype)
    whole = nn.ModuleDict({"linear": linear, "norm": norm_in(case)})
    for name, parameter in whole.named_parameters():
        plain = name.removeprefix("linear.")
        parameter.requires_grad_(plain not in case.frozen)
    x = rand(*case.lead, 4 * size, seed=1).to(case.dtype)
    r = rand(*case.lead, case.out, seed=2).to(case.dtype)
    usual = reference(case, copy.deepcopy(whole), x, r)
    row = make(
        copy.deepcopy(linear),
        dropout=case.p,
        norm=copy.deepcopy(whole["norm"]),
        sequence_dim=dim,
        overlap=False,
    )
    want = reference(case, whole.double(), x.double(), r.double())

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(size, dim)[rank]

    mine = x.chunk(size, -1)[rank].clone().requires_grad_("x" not in case.frozen)
    residual = cut(r).clone().requires_grad_("r" not in case.frozen)

    def ours(x: torch.Tensor) -> Any:
        return row(x, residual if case.residual else None, seed=5)

    before = operations()
    z, y = recomputed(ours, mine, use_reentrant=False) if case.again else ours(mine)
    assert operations() == before + (case.p > 0), "dropout is one operation with the sum"
    weights = (cut(rand(*want["sum"].shape, seed=n)) for n in (5, 6))
    loss = sum((t.double() * w).sum() for t, w in zip((z, y), weights))
    if loss.requires_grad:
        loss.backward()
    got = {"norm": z, "sum": y, "gradient of x": mine.grad, "gradient of r": residual.grad}
    for title, layer in (("linear", row), ("norm", row.norm)):
        for name, parameter in layer.named_parameters():
            if not name.startswith("norm."):
                got[f"gradient of {title}.{name}"] = parameter.grad
    assert got.keys() == want.keys()
    for what, tensor in got.items():
        expected, plain = want[what], usual[what]
        assert (tensor is None) == (expected is None), what
        if expected is None:
            continue
        if what == "gradient of x":
            expected, plain = (t.chunk(size, -1)[rank] for t in (expected, plain))
        elif "." not in what:
            expected, plain = cut(expected), cut(plain)
        close(tensor, expected, what, case.dtype, plain)
    with torch.no_grad():
        for a, b in zip(ours(mine), (z, y)):
            assert torch.equal(a, b), "another without gradients"


@on_ranks(2)
def test_hooks(context: Context) -> None:
    """Hooks see the norm's input and output, on one rank as on all; and may change them."""
    size, rank = context.world_size, context.rank
    x, seen = rand(4 * size, 4 * size, seed=1).chunk(size, -1)[rank], []
    norm = nn.RMSNorm(64)
    row = make(nn.Linear(4 * size, 64), norm=norm, sequence_dim=0)
    with compiles(context):
        z, y = row(x)
        if rank == 0:
            norm.register_forward_hook(lambda module, given, got: seen.append((given[0], got)))
        assert torch.equal(row(x)[0], z)
        assert len(seen) == (rank == 0)
        for given, got in seen:
            assert torch.equal(given, y) and torch.equal(got, z)
        norm.register_forward_pre_hook(lambda module, given: (given[0] + 1,))
        torch.testing.assert_close(row(x)[0], norm.forward(y + 1))
        assert "forward" not in norm.__dict__


@pytest.mark.long
@on_ranks(2)
def test_norms_behind_the_operation(context: Context) -> None:
    """Any module may be the norm, and computes it."""
    size, rank = context.world_size, context.rank

    class Own(nn.RMSNorm):
        pass

    def check(norm: nn.Module, features: int = 64, dtype: Any = torch.float32, **more: Any) -> None:
        linear = nn.Linear(4 * size, features, dtype=dtype)
        x = rand(3 * size, 4 * size, seed=1).to(dtype).chunk(size, -1)[rank]
        residual = rand(3 * size, features, seed=2).to(dtype)
        for dim in (None, 0):
            row = make(linear, norm=norm, sequence_dim=dim, **more)
            part = residual if dim is None else residual.chunk(size)[rank]
            z, y = row(x, part)
            assert torch.equal(z, norm(y))

    with compiles(context):
        check(Own(64))
        check(nn.RMSNorm(64, dtype=torch.bfloat16), dtype=torch.bfloat16)
        check(nn.RMSNorm((1, 64)[1:]), overlap=True)
        check(nn.Identity())
        check(nn.LayerNorm(64))
        check(nn.RMSNorm(33), features=33)
        check(nn.RMSNorm(1 << 15), features=1 << 15)
        patched = nn.RMSNorm(64)
        patched.forward = lambda x: x * 2  # type: ignore[method-assign]
        check(patched)
        row = make(nn.Linear(4 * size, 64), norm=nn.RMSNorm(64))
        z, y = row(rand(4, 4, seed=1))
        assert torch.equal(z, row.norm(y))
        with without_compiler(rank == size - 1):
            check(nn.RMSNorm(96), features=96)
        options: dict[str, Any] = {"norm": nn.RMSNorm(64), "sequence_dim": 0}
        row = make(nn.Linear(4 * size, 64), group=context.oracle, **options)
        z, y = row(rand(4 * size, 4, seed=1))
        assert torch.equal(z, row.norm(y))
        with torch.autocast("cpu", torch.bfloat16):
            row = make(nn.Linear(4 * size, 64), **options)
            z, y = row(rand(4 * size, 4, seed=1))
            assert y.dtype == torch.bfloat16 and torch.equal(z, row.norm(y))
    dist.barrier(group=context.oracle)


def between_hosts(context: Context) -> None:
    """A part's rows are those of the whole, whose norm is computed behind."""
    size, rank = context.world_size, context.rank
    x = rand(8 * size, 4 * size, seed=1).chunk(size, -1)[rank]
    linear = nn.Linear(4 * size, 96)
    results = []
    with compiles(context):
        for dim in (None, 0):
            row = make(linear, norm=nn.RMSNorm(96, eps=1e-5), sequence_dim=dim, overlap=False)
            results.append(row(x))
    for whole, part in zip(*results):
        torch.testing.assert_close(part, whole.chunk(size)[rank])


@pytest.mark.parametrize("seed", [0, *map(harness.slow, range(1, 40))])
@pytest.mark.parametrize("where", ["2", *map(harness.slow, "13")])
def test_random_cases(where: str, seed: int) -> None:
    core.search("norms", where, core.seed(seed))


def test_between_hosts() -> None:
    harness.pool_of_hosts("two and one").run(between_hosts)
