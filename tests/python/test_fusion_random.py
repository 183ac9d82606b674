"""Random programs under all their schedules, against one process."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import harness
from checks import fusion
from checks.fusion import Case

SHAPES = [
    (0,),
    (1,),
    (7,),
    (33,),
    (64,),
    (100,),
    (0, 4),
    (1, 1),
    (3, 5),
    (4, 32),
    (7, 33),
    (2, 3, 17),
]
UNARY = [
    "torch.tanh({x})",
    "torch.sigmoid({x})",
    "torch.erf({x})",
    "torch.sqrt(torch.abs({x}))",
    "torch.exp(-torch.abs({x}))",
    "torch.log(1 + {x} * {x})",
    "torch.rsqrt({x} ** 2 + 1.5)",
    "F.gelu({x})",
    "F.gelu({x}, approximate='tanh')",
    "F.silu({x})",
    "{x}.clamp(-0.5, 1.0)",
    "{x}.clamp(min=0.1)",
    "1.5 - {x}",
    "lr * {x}",
    "{x} / (lr + 2)",
    "-{x}",
    "{x} + b",
    "b * {x}",
    "dropout({x}, 0.3, seed)",
    "dropout({x}, lr, seed + 11)",
    "torch.where({x} > 0, {x}, 0.5)",
    "{x}.double().to({x}.dtype)",
]
# One of each rule that the others do not need.
SMOOTH = [
    "F.relu({x})",
    "torch.abs({x})",
    "torch.square({x}) * 0.5",
    "1 / (2.5 + {x}.sign())",
    "({x} * {x} + 1).reciprocal()",
    "({x} * {x} + 0.5) ** 1.5",
    "2 ** torch.tanh({x})",
    "({x} * {x} + 1) ** torch.tanh({x})",
    "torch.maximum({x}, b)",
    "b / ({x} * {x} + 1)",
    "torch.where({x} > b, b, {x})",
]
BINARY = [
    "{x} + {y}",
    "{x} - lr * {y}",
    "{x} * {y}",
    "{x} / ({y} * {y} + 1)",
    "torch.maximum({x}, {y})",
    "torch.where({x} > {y}, {x}, 0.5 * {y})",
    "torch.where(({x} > {y}) & ({y} < 0.5), {x}, {y})",
]
# Their sums over elements are in another order under other schedules.
REDUCING = [
    "{x} / (1 + {x}.norm())",
    "{x} - {x}.mean()",
    "{x} + torch.sum({x}, dim=-1, keepdim=True)",
    "{x} - torch.amax({x}, dim=-1, keepdim=True)",
    "{x} * torch.amin({x})",
    "{x} + {x}.sum(0, True)",
    "F.layer_norm({x}, ({x}.shape[-1],), b, b)",
    "F.rms_norm({x}, ({x}.shape[-1],), b, 1e-3)",
    "{x} + b.mean() * {x}.max()",
]
# Of a matrix w: what autocast changes, and blocks in which it is another one.
PRODUCTS = [
    "{v} = {x} * torch.tanh(F.linear(w, w).mean())",
    "with torch.autocast('cpu', dtype=torch.bfloat16): {v} = {x} + F.linear(w, w).float().amax()",
    "with torch.autocast('cpu', enabled=False): {v} = {x} - F.linear(w, w).amin()",
]
# What programs refuse, wherever it stands: `v` writes to {x}, or changes torch's state.
REFUSED = [
    "{x} += 1.0",
    "{x} *= lr",
    "{x}.add_(1.0)",
    "{x}.data = w",
    "with torch.no_grad(): v = {x} * 2; r0 = v",
    "with torch.inference_mode(): v = {x} * 2; r0 = v",
    "torch.set_grad_enabled(False); r0 = {x} * 2",
]
PARTIAL = ["0.5 * {p}", "{p} + {q}", "{p} - lr * {q}", "-{p}", "{p} / 3", "{p} * w"]


@st.composite
def programs(
    draw: st.DrawFn,
    smooth: bool = False,
    reduces: bool = False,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    products: bool = False,
) -> Case:
    """With `smooth`, those that have a backward; with `reduces`, of one collective."""
    shape = draw(st.sampled_from(shapes))
    dtypes = [torch.float32, torch.float32, torch.float64, torch.bfloat16]
    dtype = draw(st.sampled_from([torch.float64] if smooth else dtypes))
    reducing = reduces or (draw(st.booleans()) and 0 not in shape)
    partial = ["g", "h"]
    whole = ["w", "r0", "m0"]
    lines = ["r0 = all_reduce(g, 'mean')", "m0 = 0.9 * m + r0"]
    exact = True
    for number in range(draw(st.integers(1, 9))):
        name = f"v{number}"
        kinds = ["unary", "binary"] + ["partial", "collective"] * (not reduces)
        kinds += ["reducing"] * (reducing + reduces)
        kinds += ["product"] * (products and len(shape) == 2 and 0 not in shape)
        kind = draw(st.sampled_from(kinds))
        x, y = draw(st.sampled_from(whole)), draw(st.sampled_from(whole))
        p, q = draw(st.sampled_from(partial)), draw(st.sampled_from(partial))
        if kind == "partial":
            lines.append(f"{name} = " + draw(st.sampled_from(PARTIAL)).format(p=p, q=q))
            partial.append(name)
            continue
        if kind == "product":
            lines.append(draw(st.sampled_from(PRODUCTS)).format(v=name, x=x))
            whole.append(name)
            exact = False
            continue
        if kind == "collective":
            op = draw(st.sampled_from(["sum", "mean"] if smooth else ["sum", "mean", "max", "min"]))
            how = ["all_reduce({p}, '{op}')", "reduce_scatter({p}, '{op}')"]
            how += ["all_gather(reduce_scatter({p}, '{op}'))"]
            how += ["all_gather({x} - reduce_scatter({p}, '{op}'))"]
            how += ["broadcast(w, 0)" if smooth else "broadcast({p}, 0)"]
            text = draw(st.sampled_from(how)).format(p=p, op=op, x=x)
        elif kind == "reducing":
            text = draw(st.sampled_from(REDUCING)).format(x=x)
            exact = False
        else:
            pool = UNARY + SMOOTH * smooth if kind == "unary" else BINARY
            text = draw(st.sampled_from(pool)).format(x=x, y=y)
        lines.append(f"{name} = {text}")
        whole.append(name)
    results = draw(st.lists(st.sampled_from(whole[1:][-4:]), min_size=1, max_size=3, unique=True))
    layouts = [draw(st.sampled_from(["None", "Replicate", "Shard"])) for _ in results]
    head = (
        "def program(g: Partial, h: Partial, w: Replicate, m: Shard, b: Replicate, lr: float, "
        f"seed: int) -> ({', '.join(layouts)},):"
    )
    body = [*lines, f"return {', '.join(results)},"]
    text = "\n    ".join([head, *body])
    return Case(text, shape, dtype, exact, draw(st.integers(0, 99)))


def _all_schedules(workers: harness.Workers, examples: int) -> int:
    """How many schedules of random programs have been run."""
    seen = 0

    @hypothesis.settings(max_examples=examples)
    @hypothesis.given(programs(products=True), st.sampled_from(REFUSED))
    def run(case: Case, refused: str) -> None:
        nonlocal seen
        counts = workers.run(fusion.random_program, case, refused)
        assert len(set(counts)) == 1
        seen += counts[0]

    run()
    return seen


@pytest.mark.parametrize("world_size", [1, 2, harness.slow(3)])
def test_random_programs_under_all_schedules(world_size: int) -> None:
    assert _all_schedules(harness.pool(world_size), 12) > 50


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["three", "two and one", "crossed"])
def test_random_programs_between_hosts(hosts: str) -> None:
    assert _all_schedules(harness.pool_of_hosts(hosts), 12) > 50
