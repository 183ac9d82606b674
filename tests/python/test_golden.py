"""What every operation gives, and how it says that ranks disagree, as recorded.

``python tests/python/test_golden.py --record`` writes tests/golden/operations.json anew: right only
where results or texts are meant to change. The results depend on neither the instruction set nor
the number of threads.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fusedpg
import harness
from checks import cases, collectives, fused_ops, sparse
from checks.cases import Case, digest
from fusedpg import fusion
from fusedpg.functional import _backend
from harness import Context

pytestmark = pytest.mark.fused_only

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "operations.json"
# The ranks' hosts. A group is the first ranks: two are on two hosts, three on hosts of 1 and 2.
PLACES = {"one host": "aaaaaaaa", "hosts of 1 and 2": "abbccdee"}
SIZES = (1, 2, 3, 8)
SMALL, LARGE = 1003, 12_011  # elements; the small ones' operations take one exchange
STEPS = {
    "fp32": {"dtypes": (torch.float32,)},
    "fp64": {"dtypes": (torch.float64,)},
    "fp16": {"dtypes": (torch.float16,), "half_state": True},
    "bf16": {"dtypes": (torch.bfloat16,), "half_state": True},
    "bf16 with masters": {"dtypes": (torch.bfloat16,), "master": True, "scale": 8.0},
    "fp32 with bf16 gradients": {"grad_dtypes": (torch.bfloat16,), "weighted": True},
    "fp32 with zeros": {"present": 0.3, "shapes": ((30_011,), (9,))},
}
_groups: dict[int, Any] = {}


def group_of(context: Context, size: int) -> tuple[Context, Any] | None:
    """A group of the first ranks, if this is one of them. All ranks call it."""
    if size not in _groups:
        whole = size == context.world_size
        _groups[size] = None if whole else dist.new_group(list(range(size)))
    if context.rank >= size:
        return None
    return dataclasses.replace(context, world_size=size, oracle=None), _groups[size]


def moves_and_sums(context: Context, group: Any) -> dict[str, str]:
    found = {}
    for name, op in collectives.OPS.items():
        for dtype in cases.REDUCIBLE if op.reduces else cases.MOVABLE:
            redops = ["SUM", "SUM"]
            if name == "all_reduce":
                redops += ["AVG", "PRODUCT", "MIN", "MAX", "BXOR", "PREMUL_SUM"]
            redops = [redop for redop in redops if not op.reduces or cases.supported(redop, dtype)]
            got = []
            for seed, redop in enumerate(redops):
                numel, root = (SMALL, LARGE)[seed % 2], seed % context.world_size
                memory = "mixed" if seed == 1 else "ordinary"
                case = Case(name, dtype, numel, memory=memory, redop=redop, root=root, seed=seed)
                got += op.run(context, case, group)
            found[f"{name} {dtype}"] = digest(got)
    return found


def coordinates(context: Context, group: Any, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(context.rank)
    at = torch.randint(0, 500, (1, 90), generator=generator)
    entries = torch.randint(-8, 9, (90, 3), generator=generator).to(dtype)
    tensor = torch.sparse_coo_tensor(at, entries, (500, 3)).coalesce()
    dist.all_reduce(tensor, group=group)
    return tensor.to_dense()


def zeros_skipped(context: Context, group: Any) -> dict[str, str]:
    found = {}
    for name, dtype in sparse.DTYPES.items():
        got = []
        for numel in (SMALL, 70_003):
            case = sparse.Case(numel, block=64, dtype=name, seed=numel)
            tensor = sparse.values(case, context.rank, context.world_size)
            fusedpg.sparse_all_reduce(tensor, group=group, block_size=64)
            got.append(tensor)
        if dtype.is_floating_point:
            data = cases.values(context.rank, SMALL, dtype)
            residual = torch.zeros_like(data)
            fusedpg.sparse_all_reduce(
                data, group=group, block_size=64, threshold=2.5, residual=residual
            )
            got += [data, residual]
        found[f"sparse_all_reduce {name}"] = digest(got)
        found[f"all_reduce of coordinates {name}"] = digest([coordinates(context, group, dtype)])
    return found


def optimizers(context: Context, group: Any) -> dict[str, str]:
    found = {}
    for op in fused_ops.OPS:
        for name, options in STEPS.items():
            if op == "lamb" and "present" in options:
                continue  # it skips nothing
            model = fused_ops.Model(context, fused_ops.Run(op, **options))  # type: ignore[arg-type]
            for step in range(2):
                model.set_gradients(step)
                model.step(group=group)
            found[f"{op} {name}"] = digest(model.state())
    for dtype in cases.FLOATS:
        got = []
        for weight, used in ((None, None), (context.rank + 0.5, [1, 0, context.rank == 0])):
            grads = [cases.values(31 * i + context.rank, 700 * i + 9, dtype) for i in range(3)]
            flags = None if used is None else torch.tensor(used, dtype=torch.uint8)
            _backend(group).reduce_shards_(grads, weight=weight, used=flags)
            for grad in grads:
                begin, length = fusedpg.shard_range(grad.numel(), context.world_size, context.rank)
                got.append(grad[begin : begin + length])
            got += [] if flags is None else [flags]
        found[f"reduce_shards {dtype}"] = digest(got)
    return found


@fusedpg.fuse
def program(g: fusion.Partial, w: fusion.Replicate, lr: float) -> Any:
    return torch.relu(w - lr * fusion.all_reduce(g))


def programs(context: Context, group: Any) -> dict[str, str]:
    """Of values that every order of operations makes the same."""
    found = {}
    for dtype in cases.FLOATS:
        got = []
        for numel in (SMALL, LARGE):
            generator = torch.Generator().manual_seed(numel)
            w = torch.randint(-8, 9, (numel,), generator=generator).to(dtype)
            got.append(program((w + context.rank).clamp(max=8), w, 0.25, group=group))
        found[f"program {dtype}"] = digest(got)
    return found


SORTS = (moves_and_sums, zeros_skipped, optimizers, programs)


def hashes(context: Context, size: int) -> dict[str, str]:
    """This rank's results by operation and type."""
    member = group_of(context, size)
    found: dict[str, str] = {}
    for sort in SORTS if member else ():
        assert member is not None
        found |= sort(*member)
    return found


def calls(group: Any) -> dict[str, tuple[Callable[[], Any], ...]]:
    """What two ranks call: all but the first differ from it, each in one respect."""
    one, two, wide = torch.ones(64), [torch.ones(32)] * 2, torch.ones(128)
    half, more = one.half(), torch.ones(68)
    P = functools.partial
    total, gather, rank = dist.ReduceOp.SUM, dist.all_gather_into_tensor, dist.get_rank(group)

    def step(op: str = "adamw", grad: torch.Tensor = one, lr: float = 0.5, **more: Any) -> Any:
        state = [torch.zeros(32)] * (2 if op != "sgd" else 1)
        counters = [] if op == "sgd" else [torch.tensor(0.0)]
        function = getattr(fusedpg, f"fused_{op}_")
        lists = [[one.clone()], [grad], *([part] for part in state)]
        if op in ("adam", "adamw"):
            lists.append([])
        lists += [counters] if counters else []
        hyper = fused_ops.HYPERS[op] | {"lr": lr} | ({"is_first_step": True} if op == "sgd" else {})
        function(*lists, **hyper, **more, group=group)

    def shards(*grads: torch.Tensor, **more: Any) -> Any:
        _backend(group).reduce_shards_([grad.clone() for grad in grads], **more)

    def root(function: Callable[..., Any], tensor: torch.Tensor, to: int) -> Any:
        return function(tensor, [tensor.clone()] * 2 if rank == to else None, to, group=group)

    def skipping(tensor: torch.Tensor, **more: Any) -> Any:
        fusedpg.sparse_all_reduce(tensor.clone(), group=group, **more)

    def coo(size: int, dtype: torch.dtype) -> Any:
        at = torch.zeros(1, 1, dtype=torch.int64)
        tensor = torch.sparse_coo_tensor(at, torch.ones(1, dtype=dtype), (size,))
        dist.all_reduce(tensor, group=group)

    def many(tensors: list[torch.Tensor]) -> Any:
        dist.all_reduce_coalesced(tensors, group=group)

    def exchanged(*sizes: int) -> Any:
        dist.all_to_all_single(torch.empty(64), torch.ones(64), None, list(sizes), group)

    return {
        "all_reduce": (
            P(dist.all_reduce, one.clone(), total, group),
            P(dist.all_reduce, half.clone(), total, group),
            P(dist.all_reduce, more.clone(), total, group),
            P(dist.all_reduce, one.clone(), dist.ReduceOp.AVG, group),
            P(dist.barrier, group),
            P(many, two),
            P(many, [torch.ones(31), torch.ones(33)]),
        ),
        "all_reduce by a factor": (
            P(dist.all_reduce, one.clone(), dist._make_nccl_premul_sum(0.5), group),
            P(dist.all_reduce, one.clone(), dist._make_nccl_premul_sum(0.25), group),
        ),
        "all_reduce of several": (P(many, two), P(many, [torch.ones(31), torch.ones(33)])),
        "reduce": (
            P(dist.reduce, one.clone(), 0, total, group),
            P(dist.reduce, one.clone(), 1, total, group),
            P(dist.reduce, more.clone(), 0, total, group),
        ),
        "reduce_scatter": (
            P(dist.reduce_scatter_tensor, one.clone(), wide, total, group),
            P(dist.reduce_scatter_tensor, half.clone(), wide.half(), total, group),
            P(dist.reduce_scatter_tensor, one[:30].clone(), wide[:60], total, group),
            P(gather, wide.clone(), one, group),
        ),
        "broadcast": (
            P(dist.broadcast, one, 0, group),
            P(dist.broadcast, one, 1, group),
            P(dist.broadcast, half, 0, group),
            P(dist.broadcast, more, 0, group),
        ),
        "all_gather": (
            P(gather, wide.clone(), one, group),
            P(gather, wide.half(), half, group),
            P(gather, wide[:60].clone(), one[:30], group),
        ),
        "gather": (
            P(root, dist.gather, one, 0),
            P(root, dist.gather, one, 1),
            P(root, dist.gather, half, 0),
            P(root, dist.gather, more, 0),
        ),
        "scatter": (
            P(root, dist.scatter, one, 0),
            P(root, dist.scatter, one, 1),
            P(root, dist.scatter, half, 0),
            P(root, dist.scatter, more, 0),
        ),
        "all_to_all": (P(exchanged, 32, 32), P(exchanged, 31, 33)),
        "barrier": (P(dist.barrier, group), P(dist.broadcast, one, 0, group)),
        "sparse_all_reduce": (
            P(skipping, one),
            P(skipping, half),
            P(skipping, more),
            P(skipping, one, block_size=64),
            P(skipping, one, threshold=0.5, residual=torch.zeros(64)),
            P(dist.all_reduce, one.clone(), total, group),
        ),
        "coordinates": (
            P(coo, 40, torch.float32),
            P(coo, 41, torch.float32),
            P(coo, 40, torch.float64),
        ),
        "step": (
            step,
            P(step, "adam"),
            P(step, "lamb"),
            P(step, "sgd"),
            P(step, lr=0.25),
            P(step, grad=half),
            P(step, reduce="sum"),
            P(step, weight=0.5),
            P(step, block_skip=True),
            P(step, grad_scale=torch.tensor(2.0), found_inf=torch.tensor(0.0)),
        ),
        "sgd": (P(step, "sgd"), P(step, "sgd", lr=0.25)),
        "lamb": (P(step, "lamb"), P(step, "lamb", lr=0.25)),
        "reduce_shards": (
            P(shards, one),
            P(shards, half),
            P(shards, more),
            P(shards, one, one),
            P(shards, one, mean=False),
            P(shards, one, weight=0.5),
            P(shards, one, used=torch.ones(1, dtype=torch.uint8)),
        ),
        "program": (
            P(program, one, one, 0.25, group=group),
            P(program, one, one, 0.5, group=group),
            P(program, more, more, 0.25, group=group),
        ),
    }


def texts(context: Context) -> dict[str, str]:
    """What this rank is told where the second one's call differs."""
    member = group_of(context, 2)
    found: dict[str, str] = {}
    if member is None:
        return found
    group = member[1]
    for name, (every, *others) in calls(group).items():
        every()
        for i, other in enumerate(others):
            try:
                (other if context.rank == 1 else every)()
                text = "nothing is raised"
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
            found[f"{name} {i}"] = re.sub(r"sequence number \d+", "sequence number N", text)
            check = torch.ones(3)
            dist.all_reduce(check, group=group)
            assert bool((check == 2).all()), (name, i)
    return found


def short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def pool(place: str) -> harness.Workers:
    env = [{"FUSEDPG_HOST_ID": host, "FUSEDPG_FUSION": "compiled"} for host in PLACES[place]]
    return harness.pool(len(env), env=env, oracle=False, one_host=place == "one host")


def results(place: str, size: int) -> dict[str, str]:
    """Of all ranks, by operation and type."""
    ranks = pool(place).run(hashes, size, timeout=120)[:size]
    return {name: short(" ".join(rank[name] for rank in ranks)) for name in ranks[0]}


def disagreements(place: str) -> dict[str, list[str]]:
    """The first rank's text, and the hash of what the second one is told."""
    first, second = pool(place).run(texts)[:2]
    return {name: [first[name], short(second[name])] for name in first}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("place", PLACES)
def test_results_are_the_recorded_ones(place: str, size: int) -> None:
    assert results(place, size) == json.loads(GOLDEN.read_text())["results"][place][str(size)]


@pytest.mark.parametrize("place", PLACES)
def test_texts_are_the_recorded_ones(place: str) -> None:
    assert disagreements(place) == json.loads(GOLDEN.read_text())["texts"][place]


def main() -> None:
    if sys.argv[1:] != ["--record"]:
        raise SystemExit(__doc__)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True)
    golden = {
        "commit": commit.strip(),
        "results": {place: {n: results(place, n) for n in SIZES} for place in PLACES},
        "texts": {place: disagreements(place) for place in PLACES},
    }
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    harness.close_pools()


if __name__ == "__main__":
    main()
