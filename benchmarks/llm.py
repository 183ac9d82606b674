"""Time decoding with a Llama of Hugging Face, and single layers: ours, and plain lines.

    python benchmarks/llm.py --check-bars
    python benchmarks/llm.py --parts decode --width 512 --layers 4 --dtypes bfloat16

Three parts; the arms of each run in turn:

    decode  greedy decoding, one token after the other, batch 1; a sample is `--tokens` tokens,
            a row is one of them.
            "one process": the whole model on rank 0, by one thread, or by one for each core, while
            the others sleep. "tp_plan on": the plan that transformers has for the model, on either
            backend. "DTensor on": torch's styles of a plan. "layers": the same plan with our
            styles. "plain lines on": weights cut by hand, and `dist.all_reduce` in a forward hook
            behind o_proj and down_proj. "no communication": DTensor on torch's backend "fake",
            whose operations do nothing; "shards alone": the plain lines without their sums. All
            other arms choose the same tokens (bfloat16: their scores are close), or the benchmark
            ends before it times anything
    prefill the same arms, for the first token behind a prompt of `--prompt` tokens
    layers  one layer of width x width, without gradients: ours and the plain lines of the same
            numbers (`F.linear`, `dist.all_reduce`, `+=`, the norm), bit for bit. "plain lines
            again" is a second arm of the first kind: what it differs by is noise
    dispatch  a layer of torch's RowwiseParallel on the backend "fake", which communicates nothing;
            in it, the functional all_reduce with its wait: the part that a backend's own kernels
            for `_c10d_functional` could take off; and the clone that they would have to make, too

--world-size is the number of ranks. Every rank has one thread. Decode and prefill need transformers
(`pip install transformers`; "tp_plan" needs 5.17), and are left out without it.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
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
from torch.distributed.tensor import parallel as torch_styles

import _harness as harness
from _harness import Bar, Context, Row

PLAIN, AGAIN, OURS = "plain lines on fused", "plain lines again", "layers"
ALONE, ALONE_THREADS = "one process, 1 thread", "one process, all threads"
DTYPES = ("float32", "bfloat16")
SILENT, SHARDS = "no communication", "shards alone"
PARTS = ("layers", "decode", "prefill", "dispatch")
TOKENS = (1, 16, 256)
WIDTH = 1024
COLUMNS = [f"self_attn.{x}_proj" for x in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
ROWS = ["self_attn.o_proj", "mlp.down_proj"]
KINDS = ["column", "row", "row, bias, residual", "row, residual, norm"]


def main() -> int:
    parser = harness.Parser(__doc__, rounds=15)
    parser.names("--parts", PARTS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=256)
    parser.names("--dtypes", DTYPES)
    args = parser.parse_args()
    cases = [(x, y) for x in args.parts for y in args.dtypes if x != "dispatch"]
    cases += [("dispatch", "float32")] if "dispatch" in args.parts else []
    rows = harness.run(measure, args, cases, title=", ".join)
    return harness.finish("llm", rows, args, limit=PLAIN, bars=bars(args.width))


def bars(width: int = WIDTH) -> list[Bar]:
    """No layer and no model is slower than its plain lines."""
    token = 4 * width
    found = [
        Bar(2, "decode", OURS, token, "DTensor on gloo", at_least=2),
        Bar(2, "decode", "DTensor on fused", token, "DTensor on gloo", at_least=1.6),
        Bar(2, "decode", "tp_plan on fused", token, "tp_plan on gloo", at_least=1.5),
        Bar(2, "decode", OURS, token, ALONE, at_most=1),
        Bar(2, "prefill", OURS, token * 256, "DTensor on gloo", at_least=1.2),
    ]
    for dtype in DTYPES:
        token = width * getattr(torch, dtype).itemsize
        cases = [("decode", token), *((kind, token * n) for kind in KINDS for n in TOKENS)]
        found += [Bar(2, case, OURS, size, PLAIN, at_most=1.0) for case, size in cases]
    return found


@torch.no_grad()
def measure(context: Context, args: argparse.Namespace, case: tuple[str, str]) -> list[Row]:
    parts: dict[str, Callable[[Context, argparse.Namespace, torch.dtype], list[Row]]] = {
        "layers": layers,
        "decode": partial(llm, "decode"),
        "prefill": partial(llm, "prefill"),
        "dispatch": lambda context, args, dtype: dispatch(context, args),
    }
    part, dtype = case
    return parts[part](context, args, getattr(torch, dtype))


def part_of(weight: Tensor, dim: int, context: Context) -> nn.Parameter:
    return nn.Parameter(weight.detach().chunk(context.world_size, dim)[context.rank].clone())


class Plain(nn.Module):
    """What a user would write in a layer's place, with its weight: caches know it alike."""

    def __init__(self, layer: Any, bias: Tensor | None, norm: nn.Module | None) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(layer.weight.to_local()), bias
        self.norm, self.group = norm, layer.weight.device_mesh.get_group()
        self.sums = layer.weight.placements[0].is_shard(1)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        y = F.linear(x, self.weight)
        if self.sums:
            dist.all_reduce(y, group=self.group)
        if self.bias is not None:
            y += self.bias
        if residual is not None:
            y += residual
        return y if self.norm is None else (self.norm(y), y)


def layers(context: Context, args: argparse.Namespace, dtype: torch.dtype) -> list[Row]:
    from fusedpg import ColumnParallelLinear, RowParallelLinear

    width, rows = args.width, []
    given: dict[str, Any] = {"group": context.groups["fused"]}
    for count in TOKENS:
        for kind in KINDS:
            torch.manual_seed(0)
            linear = nn.Linear(width, width, "bias" in kind, dtype=dtype)
            norm = nn.RMSNorm(width, dtype=dtype) if "norm" in kind else None
            inputs = [torch.randn(1, count, width, dtype=dtype)]
            inputs += [torch.randn_like(inputs[0])] if "residual" in kind else []
            if kind == "column":
                ours: nn.Module = ColumnParallelLinear.from_linear(linear, **given)
            else:
                ours = RowParallelLinear.from_linear(linear, norm=norm, **given)
                inputs[0] = inputs[0].chunk(context.world_size, -1)[context.rank].contiguous()
            plain = Plain(ours, linear.bias, norm)
            for mine, theirs in zip(ours(*inputs), plain(*inputs), strict=True):
                harness.require(torch.equal(mine, theirs), f"{kind}, {count} tokens: other numbers")
            arms: dict[str, Callable[[], object]] = {
                PLAIN: partial(plain, *inputs),
                AGAIN: partial(plain, *inputs),
                OURS: partial(ours, *inputs),
            }
            size = count * width * dtype.itemsize
            rows += harness.measure(context, arms, case=kind, size=size, rounds=4 * args.rounds)
    return rows


def dispatch(context: Context, args: argparse.Namespace) -> list[Row]:
    fake = harness.fake_group()
    linear = nn.Linear(64, 64, bias=False)
    mesh = DeviceMesh.from_group(fake, "cpu")
    layer = torch_styles.parallelize_module(linear, mesh, torch_styles.RowwiseParallel())
    x, product = torch.randn(1, 1, 64 // context.world_size), torch.randn(1024)
    operations = torch.ops._c10d_functional

    def functional() -> Tensor:
        begun = operations.all_reduce.default(product, "sum", fake.group_name)
        ended: Tensor = operations.wait_tensor.default(begun)
        return ended

    arms: dict[str, Callable[[], object]] = {
        "RowwiseParallel": lambda: layer(x) + 0,
        "functional all_reduce": functional,
        "clone": product.clone,
    }
    return harness.measure(context, arms, case="dispatch", size=4096, rounds=4 * args.rounds)


def llama(args: argparse.Namespace, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)  # alike on all ranks
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=args.width,
        intermediate_size=args.width * 11 // 4,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        num_key_value_heads=min(4, args.width // 64),
        dtype=dtype,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def spread(model: Any, styles: Any, group: dist.ProcessGroup) -> Any:
    plan = {f"model.layers.*.{name}": styles.ColwiseParallel() for name in COLUMNS}
    plan |= {f"model.layers.*.{name}": styles.RowwiseParallel() for name in ROWS}
    return torch_styles.parallelize_module(model, DeviceMesh.from_group(group, "cpu"), plan)


def by_hand(model: Any, group: dist.ProcessGroup | None, context: Context) -> Any:
    for layer in model.model.layers:
        for dim, names in ((0, COLUMNS), (1, ROWS)):
            for name in names:
                linear = layer.get_submodule(name)
                linear.weight = part_of(linear.weight, dim, context)
                if dim and group is not None:
                    linear.register_forward_hook(
                        lambda *args: dist.all_reduce(args[2], group=group)
                    )
    return model


def by_tp_plan(model: Any, group: dist.ProcessGroup) -> Any:
    """As `from_pretrained(..., tp_plan="auto")` does; None with a transformers that is older."""
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError:
        return None
    size = dist.get_world_size(group)
    plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=size))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    return apply_tensor_parallelism(model, mesh, plan)


def llm(part: str, context: Context, args: argparse.Namespace, dtype: torch.dtype) -> list[Row]:
    try:
        import transformers  # noqa: F401
    except ImportError:
        if context.rank == 0:
            print(f"no {part}: it needs transformers (pip install transformers)", file=sys.stderr)
        return []
    from fusedpg import tensor_parallel

    fused, gloo = (context.groups[name] for name in ("fused", "gloo"))
    whole = llama(args, dtype)
    models = {
        OURS: spread(copy.deepcopy(whole), tensor_parallel, fused),
        PLAIN: by_hand(copy.deepcopy(whole), fused, context),
        "plain lines on gloo": by_hand(copy.deepcopy(whole), gloo, context),
        "DTensor on fused": spread(copy.deepcopy(whole), torch_styles, fused),
        "DTensor on gloo": spread(copy.deepcopy(whole), torch_styles, gloo),
        "tp_plan on fused": by_tp_plan(copy.deepcopy(whole), fused),
        "tp_plan on gloo": by_tp_plan(copy.deepcopy(whole), gloo),
    }
    length, count = (8, args.tokens) if part == "decode" else (args.prompt, 1)
    prompt = (torch.arange(length)[None] * 7 + 1) % 1000

    def generate(model: Any) -> Tensor:
        tokens: Tensor = model.generate(
            prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False
        )
        return tokens

    # Sums of bfloat16 are rounded otherwise in parts, and random weights have near ties: there the
    # scores must be close, not the tokens equal.
    exact = dtype == torch.float32
    answer = generate if exact else (lambda model: model(prompt).logits.float())
    want = answer(whole)
    for name, model in models.items():
        if model is not None:
            got = answer(model)
            same = torch.equal(got, want) if exact else (got - want).norm() < 0.02 * want.norm()
            harness.require(bool(same), f"{part}, {name}: another answer than the whole's")

    models[SILENT] = spread(copy.deepcopy(whole), torch_styles, harness.fake_group())
    models[SHARDS] = by_hand(copy.deepcopy(whole), None, context)
    arms: dict[str, Callable[[], object]] = {
        name: partial(generate, model) for name, model in models.items() if model is not None
    }
    for name, threads in ((ALONE, 1), (ALONE_THREADS, len(os.sched_getaffinity(0)))):
        arms[name] = partial(harness.alone, context, threads, partial(generate, whole))
    size = (1 if part == "decode" else length) * args.width * dtype.itemsize
    rows = harness.measure(context, arms, case=part, size=size, rounds=args.rounds)
    return [a_token(row, count) for row in rows]


def a_token(row: Row, count: int) -> Row:
    """The row of one token, where a call generates `count`."""
    times = {x: getattr(row, x) / count for x in ("median", "p25", "p75", "fast")}
    return dataclasses.replace(row, **times)


if __name__ == "__main__":
    sys.exit(main())
