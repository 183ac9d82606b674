"""Time row-parallel layers: what follows the product, overlap, and parts of sequences.

    python benchmarks/model_parallel.py --check-bars
    python benchmarks/model_parallel.py --parts epilogue --sizes 4K,16M
    python benchmarks/model_parallel.py --parts sequence --layers 2
    python benchmarks/model_parallel.py --parts hosts --rate 1gbit --check-bars

Parts:

    epilogue     residual + dropout(all_reduce(x) + bias), rows of 1024 features, fp32. The arms:
                 Gloo's all_reduce and torch's operations; ours and torch's operations; ours and the
                 same operations under torch.compile; all as one fused operation. Once more with
                 p = 0: torch draws dropout's numbers on one thread and takes long for them
    overlap      a product of 512 rows, then its all_reduce + residual: one after the other, and
                 rows summed while the next are multiplied. "auto" is what `overlap=None` chooses
                 here. The inner widths are chosen around where both take alike
    sequence     256 rows through 8 layers of width 1024, where each rank has a part of the rows
                 between the layers: torch's plan with SequenceParallel on Gloo, the same with
                 ours, and ours with whole rows
    hosts        "overlap" between two hosts of one rank each, which are network namespaces whose
                 links have a rate (needs root, `ip` and `tc`; exits with 2 where that cannot be),
                 and a core. By itself, not among the default parts

benchmarks/llm.py times a whole model. Results are compared with those of one process first.
Dropout of (a) to (c) is torch's own, which draws other elements, so with p = 0 they are compared,
and then timed with p = 0.1.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor import parallel as torch_styles

import _harness as harness
from _harness import Bar, Context, Hosts, Row

FEATURES, P = 1024, 0.1
WIDTH, HEADS, PREFILL = 1024, 16, 256
ROWS, OUT = 512, 1024
INNER = (32, 128, 1024)  # of the products in "overlap"
INNER_HOSTS = (512, 2048, 4096)  # in "hosts"
ALIKE = 2048  # where product and sum take as long there, at 1 Gbit/s
GLOO, OURS, COMPILED, FUSED = (
    "gloo, eager",
    "fused, eager",
    "fused, compile",
    "fused, one operation",
)
APART, OVERLAP, AUTO = "fused, apart", "fused, overlap", "fused, auto"
SEQUENCE_GLOO, SEQUENCE = "gloo DTensor, sequence", "fused styles, sequence"
STYLES = "fused styles"
PARTS = ("epilogue", "overlap", "sequence")
HOSTS = "hosts"
SIZES = ",".join(str(4 << n) for n in range(10, 25, 2))


def between(rate: str) -> str:
    return f"rows, 2 x 1, {rate}"


BARS = [
    Bar(2, "epilogue", FUSED, 16 << 20, GLOO, at_least=3),
    Bar(2, "epilogue", FUSED, 16 << 20, OURS, at_least=1.3),
    Bar(2, "epilogue", FUSED, 16 << 20, COMPILED, at_most=1),
    *(Bar(2, "rows", OVERLAP, 4 * inner * OUT, APART, at_least=1.15) for inner in INNER),
    *(Bar(2, "rows", AUTO, 4 * inner * OUT, APART, at_most=1.02) for inner in INNER),
    Bar(2, between("1gbit"), OVERLAP, 4 * ALIKE * OUT, APART, at_least=1.15),
    *(Bar(2, between("1gbit"), AUTO, 4 * n * OUT, APART, at_most=1.02) for n in INNER_HOSTS),
]


def main() -> int:
    parser = harness.Parser(__doc__, sizes=SIZES, rounds=21)
    parser.add_argument("--layers", type=int, default=8)
    parser.names("--parts", (*PARTS, HOSTS), default=",".join(PARTS))
    parser.add_argument("--rate", default="1gbit", help="of the link between hosts, as for `tc`")
    args = parser.parse_args()
    if HOSTS in args.parts and args.parts != [HOSTS]:
        parser.error(f"--parts are of {PARTS}, or {HOSTS}")
    if not {"fused", "gloo"} <= set(args.backends):
        parser.error("this compares fused with gloo: --backends has both")
    values = {"epilogue": args.sizes, "overlap": INNER, HOSTS: INNER_HOSTS}
    cases = [
        (part, value)
        for part in (*PARTS, HOSTS)
        if part in args.parts
        for value in values.get(part, (args.layers,))
    ]
    where = Hosts(2, 1, args.rate) if args.parts == [HOSTS] else None
    rows = harness.run(measure, args, cases, title="{0[0]} {0[1]}".format, hosts=where)
    name = "model_parallel" if len(args.parts) > 1 else f"model_parallel_{args.parts[0]}"
    return harness.finish(name, rows, args, bars=BARS)


@torch.no_grad()
def measure(context: Context, args: argparse.Namespace, case: tuple[str, int]) -> list[Row]:
    parts = {
        "epilogue": epilogue,
        "overlap": overlap,
        "sequence": sequence,
        HOSTS: between_hosts,
    }
    return parts[case[0]](context, args, case[1])


# --- what follows a product -----------------------------------------------------------------------


def after(y: Tensor, bias: Tensor, residual: Tensor, p: float) -> Tensor:
    return residual + F.dropout(y + bias, p)


def epilogue(context: Context, args: argparse.Namespace, size: int) -> list[Row]:
    from fusedpg.tensor_parallel._epilogue import Epilogue, Place

    rows = size // 4 // FEATURES
    features = FEATURES if rows else size // 4
    shape = (max(rows, 1), features)
    torch.manual_seed(0)
    everyone = torch.randn(context.world_size, *shape)
    bias, residual = torch.randn(features), torch.randn(shape)
    x = everyone[context.rank].clone()
    place = Place(context.groups["fused"])
    compiled = torch.compile(after, dynamic=False)
    # Sums are in place, and passes follow each other: zeros stay finite.
    contribution = x.clone()

    def summed(backend: str, finish: Callable[..., Tensor], p: float) -> Tensor:
        dist.all_reduce(contribution, group=context.groups[backend])
        return finish(contribution, bias, residual, p)

    want = residual + (everyone.sum(0) + bias)
    for arm, backend, finish in (
        (GLOO, "gloo", after), (OURS, "fused", after), (COMPILED, "fused", compiled)
    ):  # fmt: skip
        contribution.copy_(x)
        got = summed(backend, finish, 0.0)
        harness.require(torch.allclose(got, want, atol=1e-4), f"{arm}: {size} bytes")
    got = place.finish(x.clone(), Epilogue(bias, residual))
    harness.require(torch.allclose(got, want, atol=1e-4), f"{FUSED}: {size} bytes")
    dropped = place.finish(x.clone(), Epilogue(bias, residual, P, 7))
    scaled = residual + (everyone.sum(0) + bias) / (1 - P)
    masked = torch.where(dropped == residual, residual, scaled)
    harness.require(torch.allclose(dropped, masked, atol=1e-4), f"{FUSED}: dropout")
    harness.require(harness.same_on_all_ranks(dropped), f"{FUSED}: ranks differ")
    for tensor in (contribution, bias, residual):
        tensor.zero_()
    seeds = iter(range(1, 1 << 30))
    found: list[Row] = []
    for case, p in (("epilogue", P), ("epilogue, p = 0", 0.0)):
        arms: dict[str, Callable[[], object]] = {
            GLOO: partial(summed, "gloo", after, p),
            OURS: partial(summed, "fused", after, p),
            COMPILED: partial(summed, "fused", compiled, p),
            FUSED: lambda p=p: place.finish(  # type: ignore[misc]
                contribution, Epilogue(bias, residual, p, next(seeds))
            ),
        }
        found += harness.measure(context, arms, case=case, size=size, rounds=args.rounds)
    return found


# --- overlap -------------------------------------------------------------------------------


def between_hosts(context: Context, args: argparse.Namespace, inner: int) -> list[Row]:
    # The hosts are one machine, whose cores they would share: each has its own.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[context.rank % len(cores)]})
    return overlap(context, args, inner, between(args.rate))


def overlap(
    context: Context, args: argparse.Namespace, inner: int, case: str = "rows"
) -> list[Row]:
    from fusedpg.tensor_parallel import RowParallelLinear

    torch.manual_seed(0)
    whole = nn.Linear(inner * context.world_size, OUT, bias=False)
    x, residual = torch.randn(ROWS, whole.in_features), torch.randn(ROWS, OUT)
    mine = x.chunk(context.world_size, -1)[context.rank].contiguous()
    group = context.groups["fused"]
    arms: dict[str, Callable[[], object]] = {}
    for name, given in ((APART, False), (OVERLAP, True), (AUTO, None)):
        layer = RowParallelLinear.from_linear(whole, overlap=given, group=group)
        close = torch.allclose(layer(mine, residual), residual + whole(x), atol=1e-4)
        harness.require(close, f"{name}: {inner}")
        arms[name] = lambda layer=layer: layer(mine, residual)  # type: ignore[misc]
    layer = RowParallelLinear.from_linear(whole, group=group)
    weight, product = layer.weight.to_local(), torch.zeros(ROWS, OUT)
    arms["matmul alone"] = lambda: F.linear(mine, weight)
    arms["all_reduce alone"] = lambda: dist.all_reduce(product, group=group)
    size = 4 * inner * OUT
    return harness.measure(context, arms, case=case, size=size, rounds=args.rounds)


# --- parts of sequences ---------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.adds = False  # whether o and down take the residual

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        query, key, value = (
            part(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(0, 1)
            for part in (self.q, self.k, self.v)
        )
        count = query.shape[1]  # of x, or where that is a part of the rows, of all
        z = F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)
        z = z[0].transpose(0, 1).reshape(count, -1)
        if self.adds:
            x = self.o(z, x)
            result: Tensor = self.down(F.gelu(self.up(self.norm2(x))), x)
            return result
        x = x + self.o(z)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def spread(
    layers: int, group: dist.ProcessGroup, styles: Any, adds: bool, part: Shard | None = None
) -> Model:
    """`part`: how ranks divide what is between the layers."""
    model = Model(layers)
    mesh = DeviceMesh.from_group(group, "cpu")
    columns = styles.ColwiseParallel(input_layouts=part)
    plan = {f"layers.*.{name}": columns for name in ("q", "k", "v", "up")}
    rows = styles.RowwiseParallel(output_layouts=part)
    plan |= {f"layers.*.{name}": rows for name in ("o", "down")}
    if part is not None:
        norms = torch_styles.SequenceParallel(sequence_dim=part.dim)
        plan |= {f"layers.*.{name}": norms for name in ("norm1", "norm2")}
    torch_styles.parallelize_module(model, mesh, plan, src_data_rank=None)
    for layer in model.layers:
        layer.adds = adds
    return model


def compared(
    case: str, models: dict[str, Model], inputs: dict[str, Tensor], wanted: dict[str, Tensor]
) -> dict[str, Callable[[], object]]:
    """A pass of each model, whose outputs are those of one process."""
    for name, model in models.items():
        close = torch.allclose(model(inputs[name]), wanted[name], atol=1e-3)
        harness.require(close, f"{name}: {case} differs from one process")
    return {name: partial(model, inputs[name]) for name, model in models.items()}


def sequence(context: Context, args: argparse.Namespace, layers: int) -> list[Row]:
    from fusedpg import tensor_parallel

    groups, part = context.groups, Shard(0)
    models = {
        SEQUENCE_GLOO: spread(layers, groups["gloo"], torch_styles, False, part),
        SEQUENCE: spread(layers, groups["fused"], tensor_parallel, True, part),
        STYLES: spread(layers, groups["fused"], tensor_parallel, True),
    }
    x = torch.randn(PREFILL, WIDTH, generator=torch.Generator().manual_seed(1))
    want = Model(layers)(x)
    given = dict.fromkeys(models, x.chunk(context.world_size)[context.rank]) | {STYLES: x}
    wanted = dict.fromkeys(models, want.chunk(context.world_size)[context.rank]) | {STYLES: want}
    arms = compared("sequence", models, given, wanted)
    rounds = max(args.rounds // 3, 5)
    return harness.measure(context, arms, case="sequence", size=4 * WIDTH * PREFILL, rounds=rounds)


if __name__ == "__main__":
    sys.exit(main())
