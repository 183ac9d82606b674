"""Time training with the fused optimizers against torch's, and one step of each alone.

    python benchmarks/optimizers.py --check-bars
    python benchmarks/optimizers.py --parts step --world-size 4 --check-bars
    python benchmarks/optimizers.py --parts training --models mlp --arms a,f,g
    python benchmarks/optimizers.py --parts training,clip,clipped --models small --check-bars
    python benchmarks/optimizers.py --malloc default --rounds 7 --check-bars

Six parts. **training**: steps of four models (an MLP of 25 million parameters at a small batch,
a transformer of 10 million, a CNN bound by its arithmetic, 1,000 parameters of 64 elements) in the
arms

    a  Gloo DDP + AdamW(fused=True), gradients as bucket views
    b  Gloo DDP + ZeroRedundancyOptimizer(AdamW, fused=True)
    c  Gloo FSDP2 + AdamW(fused=True)
    d  fused DDP + AdamW(fused=True)            a -> d: the transport
    e  d with the state split, unfused          d -> e: sharding
    f  fusedpg.optim.AdamW, overlap=False       e -> f: fusion
    g  fusedpg.optim.AdamW, overlap=True        f -> g: overlap
    h  f with share_parameters=True
    m  fusedpg.optim.AdamW without DDP
    no_sync + step  the limit: backward without synchronisation, then the fused step alone

**clip**: `clip_grad_norm_` alone, between backward and step, on the model of 1,000 parameters:
torch's on arms a, f and m, and the optimizer's own. **clipped**: whole steps with it.

**step**: one optimizer step on 100 MB of parameters: fused ops, the same in three calls, and an
all-reduce followed by torch's optimizer. **list**: the 397 tensors of BERT-large in one
`fused_adamw_` against one tensor of as many elements. **memory**: what each training arm adds to
the proportional set size (PSS) of a rank between two steps, each in processes of its own.

What is measured of `small` alone is saved apart, as is what `--malloc` gives.

Every arm has to reproduce one process's parameters before it is timed; the program ends non-zero
when one does not. How times are taken: see `_harness.py`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import _apart
import _harness as harness
import _steps as steps
import _training as arms
import _words as words
import fusedpg
from _harness import COPY, Bar, Context, Row
from _training import ARMS, MODELS, NO_SYNC, OF_OPTIMIZERS

PARTS = ("training", "clip", "clipped", "step", "list", "memory")
CLIPPED = "small, clip"
ONE_TENSOR, LIST = "one flat tensor", "397 tensors"
STEP_SIZE = 100 << 20
STEP_CLIPPED = "small, step with clipping"
CHECKED_STEPS = 4  # DDP rebuilds its buckets within the first three
TOLERANCE = 2e-5  # relative norm of the difference of the parameters' change


def bars() -> list[Bar]:
    mlp, cnn, small = (arms.parameter_bytes(name) for name in ("mlp", "cnn", "small"))
    result = [
        Bar(2, "mlp", "best of f, g", mlp, "a", at_least=1.5),
        Bar(2, "mlp", "best of f, g", mlp, NO_SYNC, at_most=1.1),
        Bar(2, "mlp", "m", mlp, NO_SYNC, at_most=1.1),
        Bar(2, "mlp", "best of f, g", mlp, "b", at_least=1.8),
        Bar(2, "mlp", "best of f, g", mlp, "c", at_least=1.8),
        Bar(2, "cnn", "best of f, g", cnn, "a", at_least=1.0),
        Bar(2, "small", "best of f, g", small, "a", at_least=1.0),
        Bar(2, "small", "m", small, "a", at_least=1.0),
        *(
            Bar(2, CLIPPED, arm, small, "a", at_most=1.5)
            for arm in ("f", "f, ours", "m", "m, ours")
        ),
        *(
            Bar(2, STEP_CLIPPED, arm, small, "a", at_most=at_most)
            for arm, at_most in (("f", 0.9), ("f, max_grad_norm", 0.9), ("m", 1.0))
        ),
    ]
    return result + step_bars()


def step_bars() -> list[Bar]:
    adamw = steps.ADAMW
    bert = 4 * sum(torch.Size(shape).numel() for shape in steps.bert_shapes())
    return [
        Bar(2, adamw, steps.FUSED, STEP_SIZE, steps.GLOO, at_least=4.5),
        Bar(4, adamw, steps.FUSED, STEP_SIZE, steps.GLOO, at_least=8),
        Bar(2, adamw, steps.FUSED, STEP_SIZE, steps.DEEPSPEED, at_least=2.8),
        Bar(2, adamw, steps.SHARED, STEP_SIZE, steps.GLOO, at_least=6),
        Bar(2, adamw, steps.FUSED, STEP_SIZE, steps.THREE_OPS, at_least=1.15),
        Bar(2, adamw, steps.TWO_OPS, STEP_SIZE, steps.THREE_OPS, at_least=1.0),
        Bar(2, steps.LAMB, steps.LAMB_OP, STEP_SIZE, steps.LAMB_GLOO, at_least=5),
        Bar(2, "list", LIST, bert, ONE_TENSOR, at_most=1.01),
        Bar(1, adamw, steps.CLASS, STEP_SIZE, steps.LOCAL, at_least=1.0),
    ]


def main() -> int:
    parser = harness.Parser(__doc__, backends="fused,gloo,deepspeed", sizes="100M", rounds=21)
    parser.names("--parts", PARTS)
    parser.names("--models", OF_OPTIMIZERS)
    parser.names("--arms", ARMS)
    parser.add_argument(
        "--malloc",
        choices=["keep", "default"],
        default="keep",
        help="keep: what is freed, in all arms; default: glibc's settings, training alone, every "
        "arm in processes of its own, and some again that keep what is freed",
    )
    args = parser.parse_args()
    rows: list[Row] = []
    if args.malloc == "default":
        args.model = args.models[0]
        rows += _apart.run(args, reference_change, check)
        return harness.finish("optimizers_malloc", rows, args, limit=NO_SYNC, bars=_apart.bars())
    measures: dict[str, tuple[harness.Measure, list[Any]]] = {
        "training": (train, args.models),
        "clip": (clip, [CLIPPED]),
        "clipped": (step_clipped, [STEP_CLIPPED]),
        "step": (one_step, args.sizes),
        "list": (many_tensors, ["list"]),
    }
    for part, (measure, cases) in measures.items():
        for case in cases if part in args.parts else ():
            rows += harness.run(measure, args, [case])  # on a heap of its own
    if rows:
        name = "optimizers_small" if args.models == ["small"] else "optimizers"
        harness.finish(name, rows, args, limit=NO_SYNC, bars=bars())
        explain(rows)
    if "memory" in args.parts:
        memory = [harness.run(memory_of, args, [arm])[0] for arm in args.arms if arm != NO_SYNC]
        title = f"PSS a rank, {args.models[0]}, world size {args.world_size}"
        lines = map(memory_line, memory)
        harness.show(title, ["arm", ""], ["MiB", "/ parameters"], lines, wrap=True)
        if not args.no_save:
            path = harness.RESULTS / f"optimizers_memory_p{args.world_size}.json"
            harness.save_rows(path, memory, args.world_size, unit="bytes of PSS a rank")
            print(f"saved {path.name}")
    return 0


# ---------------------------------------------------------------------------------------------
# One step


def one_step(context: Context, args: argparse.Namespace, size: int) -> list[Row]:
    rows = []
    single = (steps.GLOO,) if context.world_size == 1 else ()
    for case, arms_of in {steps.ADAMW: steps.checked, steps.LAMB: steps.checked_lamb}.items():
        # Those that are left out: fused_step.py.
        names = steps.ARMS[case].keys() - {steps.SKIPS, steps.UNFUSED, *single}
        timed = {COPY: harness.copy_arm(size)}
        timed |= arms_of(context, size, [n for n in steps.ARMS[case] if n in names])
        rows += harness.measure(context, timed, case=case, size=size, rounds=args.rounds)
    return rows


def many_tensors(context: Context, args: argparse.Namespace, case: str) -> list[Row]:
    """What describing 397 tensors costs, against one tensor of all their elements."""
    import fusedpg

    group = context.groups["fused"]
    shapes = steps.bert_shapes()
    numels = [torch.Size(shape).numel() for shape in shapes]
    # The same memory for both: only its description differs.
    params, grads = (fusedpg.empty(sum(numels), group=group).zero_() for _ in range(2))
    timed: dict[str, Callable[[], object]] = {}
    for name, parts in ((ONE_TENSOR, [sum(numels)]), (LIST, numels)):
        owned = [fusedpg.shard_range(n, context.world_size, context.rank)[1] for n in parts]
        lists = [list(whole.split(parts)) for whole in (params, grads)]
        for _ in range(2):
            lists.append(list(torch.zeros(sum(owned)).split(owned)))
        counts = [torch.zeros(()) for _ in parts]
        timed[name] = partial(fusedpg.fused_adamw_, *lists, [], counts, **steps.HYPER, group=group)
    harness.require(len(numels) == 397, f"{len(numels)} tensors")
    return harness.measure(
        context, timed, case=case, size=4 * sum(numels), rounds=max(args.rounds // 2, 5)
    )


# ---------------------------------------------------------------------------------------------
# Training


def train(context: Context, args: argparse.Namespace, name: str) -> list[Row]:
    # For every arm alike: by default it depends on the order of allocations whether glibc gives the
    # memory of a gradient back to the system, so an arm would measure what others have left on the
    # heap. With --malloc default each has its own.
    fusedpg.keep_freed_memory()
    reference = reference_change(name, context.world_size)
    timed: dict[str, Callable[[], object]] = {}
    for arm in args.arms:
        group = context.groups.get(ARMS[arm].backend)
        if group is not None:
            made = ARMS[arm].make(name, group)
            if arm != NO_SYNC:  # its replicas go their own ways
                check(arm, name, made, reference)
            timed[arm] = made.step
    size = arms.parameter_bytes(name)
    rows = harness.measure(context, timed, case=name, size=size, rounds=args.rounds)
    return rows + arms.best(rows)


def clip(context: Context, args: argparse.Namespace, case: str) -> list[Row]:
    """The time of clipping alone: backward before it, and the step after it, are not in it."""
    fusedpg.keep_freed_memory()
    max_norm = arms.MAX_NORM
    timed: dict[str, Callable[[], object]] = {}
    prepare: dict[str, Callable[[], object]] = {}
    norms: dict[str, float] = {}
    for title, arm in (("a", "a"), ("f", "f"), ("f, ours", "f"), ("m", "m"), ("m, ours", "m")):
        made: Any = ARMS[arm].make("small", context.groups[ARMS[arm].backend])
        module, optimizer = made.module, made.optimizer
        if title.endswith("ours"):
            timed[title] = partial(optimizer.clip_grad_norm_, max_norm)
        else:
            params = list(module.parameters())
            timed[title] = partial(torch.nn.utils.clip_grad_norm_, params, max_norm)
        made.backward()
        norms[title] = float(timed[title]())  # type: ignore[arg-type]
        apart = abs(norms[title] - norms["a"])
        harness.require(apart < 1e-5 * norms["a"], f"{title}: norm {norms[title]}, {norms}")
        prepare[title] = lambda made=made: (made.optimizer.step(), made.backward())
    size = arms.parameter_bytes("small")
    return harness.measure(
        context, timed, case=case, size=size, rounds=args.rounds, prepare=prepare
    )


def step_clipped(context: Context, args: argparse.Namespace, case: str) -> list[Row]:
    """Whole steps: zero_grad, forward, backward, clip_grad_norm_ by torch, step."""
    fusedpg.keep_freed_memory()
    timed: dict[str, Callable[[], object]] = {}
    expected: Tensor | None = None
    kinds = {arm: ARMS[arm] for arm in ("a", "d", "f", "g", "m")} | arms.CLIPPING
    for title, kind in kinds.items():
        made = kind.make("small", context.groups[kind.backend])
        # overlap=True cannot clip: what the others pay for it.
        clips = title != "g" and title not in arms.CLIPPING

        def step(made: arms.Arm = made, clips: bool = clips) -> None:
            made.backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(made.module.parameters(), arms.MAX_NORM)
            made.optimizer.step()

        for _ in range(CHECKED_STEPS):
            step()
        after = made.parameters()
        expected = after if expected is None else expected
        apart = float((after - expected).norm() / expected.norm())
        if title != "g":
            harness.require(apart < TOLERANCE, f"{title}: parameters differ by {apart:.1e}")
        timed[title] = step
    size = arms.parameter_bytes("small")
    return harness.measure(context, timed, case=case, size=size, rounds=args.rounds)


def flat(module: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def reference_change(name: str, world_size: int) -> Tensor:
    """How far one process on the average of all ranks' gradients moves the parameters."""
    torch.manual_seed(0)
    module = MODELS[name].make()
    before = flat(module)
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=arms.LR, weight_decay=arms.WEIGHT_DECAY, fused=False
    )
    batches = []
    for rank in range(world_size):
        generator = torch.Generator().manual_seed(1 + rank)
        x = MODELS[name].batch(generator)
        batches.append((x, torch.randint(10, x.shape[:1], generator=generator)))
    for _ in range(CHECKED_STEPS):
        optimizer.zero_grad()
        for x, y in batches:
            loss = torch.nn.functional.cross_entropy(module(x), y) / world_size
            loss.backward()
        optimizer.step()
    return flat(module) - before


def check(arm: str, name: str, made: arms.Arm, reference: Tensor) -> None:
    """An arm's steps follow one process's, and all ranks hold the same parameters."""
    before = made.parameters()
    losses = [made.step() for _ in range(CHECKED_STEPS)]
    after = made.parameters()
    # Adam's first steps are about lr * sign(gradient): where a gradient is nothing but rounding
    # errors its sign is open, so a few elements may differ by much.
    apart = ((after - before) - reference).abs() > 0.05 * reference.abs().max()
    share = float(apart.float().mean())
    harness.require(share < 1e-3, f"{name}, arm {arm}: {share:.2%} of the parameters differ")
    harness.require(bool(losses[-1] < losses[0]), f"{name}, arm {arm}: does not learn")
    harness.require(harness.same_on_all_ranks(after), f"{name}, arm {arm}: ranks differ")


def explain(rows: list[Row]) -> None:
    """What each difference between two arms buys."""
    for name in dict.fromkeys(row.case for row in rows):
        times = {row.arm: row.median for row in rows if row.case == name}
        parts = []
        for what, slow, fast in (
            ("transport", "a", "d"),
            ("sharding", "d", "e"),
            ("fusion", "e", "f"),
            ("overlap", "f", "g"),
        ):
            if slow in times and fast in times:
                parts.append(f"{what} {slow}->{fast} {times[slow] / times[fast]:.2f}x")
        if parts:
            print(f"{name}: " + ", ".join(parts))


# ---------------------------------------------------------------------------------------------
# Memory


def pss() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("the kernel reports no PSS")


def memory_of(context: Context, args: argparse.Namespace, arm: str) -> list[Row]:
    """Bytes of PSS that the arm adds to a rank."""
    kind = ARMS[arm]
    group = context.groups[kind.backend]
    # What one backward needs besides, once for all arms.
    small = torch.nn.Linear(8, 8)
    small(torch.zeros(1, 8)).sum().backward()
    gc.collect()
    dist.barrier(group=group)
    before = pss()
    made = kind.make(args.models[0], group)
    for _ in range(3):
        made.step()
    made.optimizer.zero_grad()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what malloc merely keeps does not count
    dist.barrier(group=group)
    used = torch.tensor([float(pss() - before)])
    dist.all_reduce(used, group=group)
    mean = float(used) / context.world_size
    size = arms.parameter_bytes(args.models[0])
    return [Row.of("memory", size, arm, [mean])]


def memory_line(row: Row) -> list[str]:
    used = row.median
    return [row.arm, words.arm(row.arm), f"{used / 2**20:.0f}", f"{used / row.size:.2f}"]


if __name__ == "__main__":
    sys.exit(main())
