"""Subject: fused functions under all their schedules, against one process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import harness
from checks import fusion
from checks.fusion import Case
from fuzz import core
from fuzz.core import Choices, Pair, done
from harness import Context

WHERE = ("1", "2", "3", "three", "two and one", "crossed")
EXAMPLES = 11

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
    "{x} * c",
    "o - {x}",
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
# One number of all elements; of such numbers; and elements by them.
SUMS = [
    "{x}.norm()",
    "{x}.mean()",
    "({x} * {y}).sum() / 1000",
    "{x}.amax()",
    "torch.abs({x}).amin()",
    "torch.square({x} - {y}).sum().sqrt()",
]
NUMBERS = ["{s} / (1 + {t} * {t})", "torch.tanh({s})", "torch.maximum({s}, {t})", "lr * {s}"]
SCALED = [
    "{x} / (1 + torch.abs({s}))",
    "{x} - {s} / 1000",
    "torch.minimum({x}, torch.abs({s}))",
    "{x} * torch.tanh({s})",
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


@functools.cache
def rounds_roots() -> bool:
    x = torch.arange(1000.0)
    return torch.equal(torch.sqrt(x), torch.sqrt(x.double()).float())


def draw_case(
    choose: Choices,
    smooth: bool = False,
    reduces: bool = False,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    products: bool = False,
    sums: bool = False,
    flag: bool = False,
) -> Case:
    """Any program; or one of some.

    Args:
        smooth: those that have a backward.
        reduces: of one collective.
        products: there are some of matrices.
        sums: of one collective, with sums over all elements that later elements depend on.
        flag: one more argument, `flip`, negates a result.
    """
    shape = choose.choice(shapes)
    dtypes = [torch.float32, torch.float32, torch.float64, torch.bfloat16]
    dtype = choose.choice([torch.float64] if smooth else dtypes)
    reducing = reduces or (choose.choice([False, True]) and 0 not in shape)
    partial = ["g", "h"]
    whole, numbers = ["w", "r0", "m0"], []
    first = choose.choice(["all_reduce", "reduce_scatter"]) if sums else "all_reduce"
    lines = [f"r0 = {first}(g, 'mean')", "m0 = 0.9 * m + r0"]
    exact = True
    for number in range(choose.randint(3 if sums else 1, 9)):
        name = f"v{number}"
        kinds = ["unary", "binary"] + ["partial", "collective"] * (not reduces and not sums)
        kinds += ["reducing"] * (reducing + reduces)
        kinds += ["product"] * (products and len(shape) == 2 and 0 not in shape)
        kinds += (["sum"] + ["number", "scaled"] * bool(numbers)) * sums
        kind = {1: "sum", 2: "scaled"}.get(number) if sums else None
        kind = kind or choose.choice(kinds)
        x, y = choose.choice(whole[-3:] if sums else whole), choose.choice(whole)
        p, q = choose.choice(partial), choose.choice(partial)
        if kind == "partial":
            lines.append(f"{name} = " + choose.choice(PARTIAL).format(p=p, q=q))
            partial.append(name)
            continue
        if kind in ("sum", "number"):
            scalars = {"s": numbers[-1], "t": choose.choice(numbers)} if numbers else {}
            text = choose.choice(SUMS if kind == "sum" else NUMBERS)
            lines.append(f"{name} = " + text.format(x=x, y=y, **scalars))
            numbers.append(name)
            exact = False
            continue
        if kind == "product":
            lines.append(choose.choice(PRODUCTS).format(v=name, x=x))
            whole.append(name)
            exact = False
            continue
        if kind == "collective":
            op = choose.choice(["sum", "mean"] if smooth else ["sum", "mean", "max", "min"])
            how = ["all_reduce({p}, '{op}')", "reduce_scatter({p}, '{op}')"]
            how += ["all_gather(reduce_scatter({p}, '{op}'))"]
            how += ["all_gather({x} - reduce_scatter({p}, '{op}'))"]
            how += ["broadcast(w, 0)" if smooth else "broadcast({p}, 0)"]
            text = choose.choice(how).format(p=p, op=op, x=x)
        elif kind == "scaled":
            text = choose.choice(SCALED).format(x=x, s=numbers[-1])
        elif kind == "reducing":
            text = choose.choice(REDUCING).format(x=x)
            exact = False
        else:
            pool = UNARY + SMOOTH * smooth if kind == "unary" else BINARY
            text = choose.choice(pool).format(x=x, y=y)
        lines.append(f"{name} = {text}")
        whole.append(name)
    last = whole[1:][-4:]
    results = choose.sample(last, choose.randint(1, min(3, len(last))))
    layouts = [choose.choice(["None", "Replicate", "Shard"]) for _ in results]
    if numbers and last[-1] not in results:  # which the sums lead to
        results, layouts = [*results, last[-1]], [*layouts, "Replicate"]
    for name in choose.sample(numbers, choose.randint(0, 1)) if numbers else ():
        results, layouts = [*results, name], [*layouts, "Replicate"]
    if flag:
        lines.append(f"if flip: {results[0]} = -{results[0]}")
    more = ", flip: bool = False" if flag else ""
    head = f"def program({fusion.ARGUMENTS}{more}) -> ({', '.join(layouts)},):"
    # That of torch, with MKL, may be a unit in the last place off.
    exact = exact and (rounds_roots() or "sqrt" not in str(lines))
    body = [*lines, f"return {', '.join(results)},"]
    text = "\n    ".join([head, *body])
    return Case(text, shape, dtype, exact, choose.randint(0, 99))


def run_cases(
    ranks: Callable[[], harness.Workers], check: Any, examples: int, seed: int = 1, **drawn: Any
) -> int:
    """How much `check(context, case)` counts on each rank, of so many functions in all.

    They are the same each time: some of them have what it counts.
    """

    def body(case: Case) -> int:
        counts = ranks().run(check, case, timeout=300)  # a new pool where one has failed
        assert len(set(counts)) == 1
        return int(counts[0])

    return sum(core.each(lambda choose: draw_case(choose, **drawn), seed, examples, body))


@dataclasses.dataclass(frozen=True)
class Program:
    """A function, and a line with which it is refused."""

    case: Case
    refused: str


def draw(choose: Choices, where: str) -> Program:
    return Program(draw_case(choose, products=True), choose.choice(REFUSED))


def run(program: Program, context: Context) -> Iterator[Pair]:
    for number in range(fusion.random_program(context, program.case, program.refused)):
        yield done(f"schedule {number}")
