"""Compressed gradients under DDP."""

from __future__ import annotations

import copy
import datetime
import itertools
import os
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import fusedpg
import harness
from checks import compress as checks
from checks.optim_script import OPTIMIZERS, of_torch
from checks.refused import refused
from fusedpg import compress
from fusedpg.compress import _checkpoint, _schedule
from fusedpg.compress.communicators import BY_NAME as COMMUNICATORS
from fusedpg.compress.compressors import BY_NAME as COMPRESSORS
from fusedpg.compress.memories import BY_NAME as MEMORIES
from harness import Context, on_ranks


def hook_of(name: str, params: dict[str, Any], schedule: Any) -> tuple[Any, Any]:
    if name == "compress":
        return compress.from_params(checks.fitting(params), schedule=schedule), compress.hook
    if name == "powersgd":
        # Buckets are one: its callbacks' collectives have no order of their own.
        state = powerSGD_hook.PowerSGDState(dist.group.WORLD, start_powerSGD_iter=2, random_seed=3)
        return state, powerSGD_hook.powerSGD_hook
    if name == "block_sparse":
        return fusedpg.ddp.BlockSparseState(threshold=0.05), fusedpg.ddp.block_sparse_hook
    return dist.group.WORLD, getattr(default_hooks, f"{name}_compress_hook")


DETERMINISTIC = (
    ("none", "none"), ("fp16", "none"), ("fp16", "residual"), ("topk", "none"),
    ("topk", "residual"), ("topk", "dgc"), ("dgc", "dgc"), ("threshold", "residual"),
    ("guarded_threshold", "residual"), ("signsgd", "none"), ("signum", "none"),
    ("efsignsgd", "residual"), ("efsignsgd", "efsignsgd"), ("onebit", "residual"),
)  # fmt: skip
PARAMS = {
    "compress_ratio": 0.1, "threshold": 0.5, "lr": 0.5, "momentum": 0.9, "quantum_num": 63,
}  # fmt: skip


def legal(compressor: str, memory: str, communicator: str) -> bool:
    try:
        compress.from_params(
            {"compressor": compressor, "memory": memory, "communicator": communicator}
        )
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("communicator", ["allgather", "broadcast", "allreduce"])
@pytest.mark.parametrize(("compressor", "memory"), DETERMINISTIC)
def test_equals_oracle(compressor: str, memory: str, communicator: str) -> None:
    if communicator == "allreduce" and not COMPRESSORS[compressor].linear:
        pytest.skip("its payloads cannot be added")
    for more in [{}, *[{"momentum_masking": False}] * (memory == "dgc")]:
        harness.pool(3).run(checks.equals_oracle, compressor, memory, communicator, more)


WARM = [
    ("topk", "residual", [0.25, 0.2], "bucket"), ("topk", "residual", [0.3], 2),
    ("topk", "none", [0.25], "layer"), ("threshold", "residual", [], "bucket"),
    ("efsignsgd", "efsignsgd", [], "bucket"), ("efsignsgd", "residual", [], 2),
    ("onebit", "residual", [], "layer"),
    # A search goes on between steps that are not compressed; here nothing is ever lost.
    ("topk", "residual", [1.0, 1.0, 1.0, 1.0], "auto"),
]  # fmt: skip


@pytest.mark.parametrize("how", ["as it is", "pickle", "state_dict"])
@pytest.mark.parametrize("case", WARM, ids=lambda case: "-".join(map(str, case)))
def test_warm_up(case: tuple[str, str, list[float], Any], how: str) -> None:
    compressor, memory, ratios, schedule = case
    harness.pool(3).run(checks.warms_up, compressor, memory, schedule, ratios, how)


def test_warm_up_is_the_same_on_all_ranks() -> None:
    with harness.Workers(3) as ranks:  # a failure ends their groups
        ranks.run(checks.epochs_differ)


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ({"compressor": "signsgd"}, {"uncompressed_steps": 1}, "votes"),
        ({"compressor": "dgc", "memory": "dgc"}, {"uncompressed_every": 2}, "momentum"),
        ({"compressor": "efsignsgd"}, {"warmup_ratios": [0.5]}, "no compress_ratio"),
        ({"compressor": "topk"}, {"warmup_ratios": [0.0]}, "warmup_ratios is"),
        ({"compressor": "topk"}, {"uncompressed_steps": -1}, "uncompressed_steps is"),
        ({"compressor": "topk"}, {"uncompressed_every": 1.5}, "uncompressed_every is"),
    ],
)
def test_warm_up_that_cannot_be(
    params: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compress.from_params(params, **options)


ALL = [
    ("topk", "residual"), ("randomk", "residual"), ("signum", "none"), ("qsgd", "residual"),
    ("terngrad", "residual"), ("natural", "none"), ("efsignsgd", "efsignsgd"), ("topk", "dgc"),
    ("onebit", "residual"), ("guarded_threshold", "residual"), ("powersgd", "powersgd"),
]  # fmt: skip


@pytest.mark.parametrize("how", ["pickle", "state_dict"])
@pytest.mark.parametrize(("compressor", "memory"), ALL)
def test_checkpoints(compressor: str, memory: str, how: str) -> None:
    for communicator, schedule in (("allgather", "bucket"), ("allgather", "one"),
                                   ("allreduce", "bucket"), ("ps", "layer")):  # fmt: skip
        if legal(compressor, memory, communicator):
            params = {
                "compressor": compressor, "memory": memory, "communicator": communicator, **PARAMS
            }  # fmt: skip
            harness.pool(3).run(checks.survives, params, how, schedule)


@pytest.mark.parametrize(("compressor", "memory"), [*ALL, ("fp16", "residual"), ("none", "none")])
def test_same_by_any_schedule(compressor: str, memory: str) -> None:
    for communicator in ("allgather", "allreduce"):
        if legal(compressor, memory, communicator):
            params = {
                "compressor": compressor, "memory": memory, "communicator": communicator, **PARAMS
            }  # fmt: skip
            harness.pool(3).run(checks.same_by_any_schedule, params)


def test_follows_ddp() -> None:
    harness.pool(3).run(checks.follows_ddp)


def test_search_in_training() -> None:
    answers = harness.pool(3).run(checks.auto)
    assert all(answer == answers[0] for answer in answers)


def killed(context: Context) -> float:
    """A rank dies in training: the others raise, and nobody waits for ever."""
    state = compress.from_params({"compressor": "topk", "memory": "residual"})
    ddp = DistributedDataParallel(checks.Given(), bucket_cap_mb=0.001)
    params = ddp.module.parameters()
    optimizer = fusedpg.optim.SGD(params, lr=0.1, ddp=ddp, comm_hook=(state, compress.hook))

    def train() -> None:
        for step in range(3):
            ddp(checks.given(step, context.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()

    train()
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with refused(""):
        train()
    return time.monotonic() - begin


@pytest.mark.fused_only
def test_killed_rank() -> None:
    with harness.Workers(3, timeout=20) as ranks:
        ranks.start(killed)
        answers = ranks.collect(40)
        assert isinstance(answers[1], harness.Died)
        assert answers[1].exitcode == -signal.SIGKILL
        for rank in (0, 2):
            assert isinstance(answers[rank], float), answers
            assert answers[rank] < 10


@pytest.mark.long
def test_error_feedback_keeps_the_accuracy() -> None:
    """Within 1 % of uncompressed training; without feedback it is not."""
    ranks = harness.pool(2)

    def accuracy(**params: Any) -> float:
        found: float = ranks.run(checks.learns, params, 0.2, timeout=180)[0]
        return found

    wanted = accuracy()
    assert wanted > 0.95
    for ratio in (0.01, 0.001):
        kept = accuracy(compressor="topk", compress_ratio=ratio, memory="residual")
        assert kept > wanted - 0.01, (ratio, kept, wanted)
    lost = accuracy(compressor="topk", compress_ratio=0.001, memory="none")
    assert lost < wanted - 0.05, (lost, wanted)


HOOKS = (
    ("compress", "topk", "residual", "bucket"), ("compress", "topk", "dgc", "layer"),
    ("compress", "efsignsgd", "residual", "one"), ("compress", "randomk", "residual", 2),
    ("compress", "none", "none", "auto"), ("fp16", "", "", ""), ("powersgd", "", "", ""),
    ("block_sparse", "", "", ""),
)  # fmt: skip


def as_with_torchs_optimizer(
    context: Context, optimizer: str, name: str, params: dict[str, Any], schedule: Any,
    hosts: bool = False, carrier: str | None = None,
) -> None:  # fmt: skip
    """The same training: the hook under DDP with torch's optimizer, and under ours.

    Parameters 3 and 4 have an optimizer of torch in both. ``hosts``: a host's ranks share state.
    ``carrier``: the backend of the module's group.
    """
    options: dict[str, Any] = {}
    group = None if carrier is None else dist.new_group(backend=carrier)
    if carrier is not None:
        options["process_group"] = dist.group.WORLD
    if hosts:
        local = fusedpg.group_info()["local_ranks"]
        options["process_group"] = dist.new_group(local, use_local_synchronization=True)
    unused = schedule == "layer"
    torch.manual_seed(3)
    # Not all of them zero: LAMB looks at norms.
    module = checks.Given()
    for p in module.parts:
        nn.init.normal_(p)
    rows: list[list[torch.Tensor]] = [[], []]
    norms: list[list[float]] = [[], []]
    for ours in (False, True):
        mine = copy.deepcopy(module)
        ddp = DistributedDataParallel(
            mine,
            process_group=group,
            bucket_cap_mb=25 if name == "powersgd" else 0.001,
            find_unused_parameters=unused,
            gradient_as_bucket_view=optimizer == "AdamW",
        )
        parts = list(mine.parts)
        others = torch.optim.SGD(parts[3:5], lr=0.1, momentum=0.9)
        some = parts[:3] + parts[5:]
        comm_hook = hook_of(name, params, schedule)
        made: Any
        if ours:
            make = getattr(fusedpg.optim, optimizer)
            made = make(some, **OPTIMIZERS[optimizer], ddp=ddp, comm_hook=comm_hook, **options)
        else:
            ddp.register_comm_hook(*comm_hook)
            made = of_torch(optimizer, some)
        for step in range(6):
            grads: list[Any] = checks.given(step, context.rank)
            if unused and step % 2 and context.rank == 0:
                grads[2] = None
            if step % 3 == 1:
                with ddp.no_sync():
                    ddp(checks.given(90 + step, context.rank)).backward()
            ddp(grads).backward()
            if step in (2, 4):
                # Of torch's part, each rank has all of it.
                total = torch.nn.utils.clip_grad_norm_(some, 0.8, foreach=False)
                norms[ours].append(float(total))
            for one in (made, others):
                one.step()
                one.zero_grad()
            rows[ours] += [p.detach().clone() for p in parts]
        if ours:
            of = [
                dist.get_world_size(made.join_process_group),
                dist.get_rank(made.join_process_group),
            ]
            for p in some:
                length = fusedpg.shard_range(p.numel(), *of)[1]
                assert all(v.numel() == length for v in made.state[p].values() if v.dim())
    torch.testing.assert_close(norms[True], norms[False], rtol=1e-5, atol=1e-6)
    for a, b in zip(rows[True], rows[False], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)
    checks.alike(rows[True])


@pytest.mark.fused_only
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: "-".join(map(str, filter(None, hook))))
def test_under_fused_optimizers(hook: tuple[str, str, str, Any]) -> None:
    name, compressor, memory, schedule = hook
    params = {"compressor": compressor, "memory": memory, **PARAMS}
    for optimizer in ("SGD", "AdamW", "LAMB"):
        harness.pool(3).run(as_with_torchs_optimizer, optimizer, name, params, schedule)


@pytest.mark.fused_only
@pytest.mark.parametrize("names", ["two", "two of two", "crossed"])
def test_state_shared_inside_hosts(names: str) -> None:
    ranks = harness.pool_of_hosts(names)
    params = {"compressor": "topk", "memory": "residual", **PARAMS}
    for optimizer in ("AdamW", "LAMB"):
        ranks.run(as_with_torchs_optimizer, optimizer, "compress", params, "one", True)


def ranks_that_know_more_groups(context: Any, params: dict[str, Any]) -> None:
    """A pipeline's first stage is in one more; ``new_group`` names groups by their number."""
    limit = datetime.timedelta(seconds=20)
    group = dist.new_group(list(range(context.world_size)), timeout=limit)
    others = [
        dist.new_group([context.rank], use_local_synchronization=True) for _ in range(context.rank)
    ]
    for _ in range(2):  # also a second state, and a lane that is made anew
        torch.manual_seed(0)
        state = compress.from_params(params, group=group)
        ddp = checks.hooked(torch.nn.Linear(30, 20), state, process_group=group)
        ddp(torch.full((4, 30), float(context.rank))).sum().backward()
        for p in ddp.parameters():
            assert p.grad is not None
            same = p.grad.clone()
            dist.broadcast(same, 0, group=group)
            assert torch.equal(same, p.grad)
        compress._lane.drop(compress._lane.of(group))
    # torch numbers groups by how many a rank has made, since 2.15 all of them.
    others += [
        dist.new_group([context.rank], use_local_synchronization=True)
        for _ in range(context.rank, context.world_size)
    ]
    for other in (*others, group):
        dist.destroy_process_group(other)


@pytest.mark.parametrize("ranks", [3, "two of two"])
def test_ranks_that_know_more_groups(ranks: int | str) -> None:
    params = {"compressor": "topk", "memory": "residual", "communicator": "allgather", **PARAMS}
    workers = harness.pool(ranks) if isinstance(ranks, int) else harness.pool_of_hosts(ranks)
    workers.run(ranks_that_know_more_groups, params)


@pytest.mark.fused_only
def test_module_on_another_backend() -> None:
    """Its gradients go by Gloo, and the optimizer's parameters by ours."""
    params = {"compressor": "topk", "memory": "residual", **PARAMS}
    harness.pool(3).run(
        as_with_torchs_optimizer, "AdamW", "compress", params, "layer", False, "gloo"
    )


@pytest.mark.fused_only
@pytest.mark.parametrize("ours", [False, True], ids=["torch", "fused"])
@on_ranks(3)
def test_uneven_inputs(context: Context, ours: bool) -> None:
    """Uneven inputs: a compressor that loses nothing trains as plain DDP does."""
    rows: list[list[torch.Tensor]] = []
    for compressed in (False, True):
        torch.manual_seed(3)
        module = checks.Given()
        ddp = DistributedDataParallel(module, bucket_cap_mb=0.001)
        params = {"compressor": "topk", "memory": "residual", "compress_ratio": 1.0}
        comm_hook = compress.from_params(params, schedule=2), compress.hook
        made: Any
        if compressed and ours:
            made = fusedpg.optim.SGD(
                module.parameters(), lr=0.1, momentum=0.9, ddp=ddp, comm_hook=comm_hook
            )
        else:
            if compressed:
                ddp.register_comm_hook(*comm_hook)
            made = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        joinables = [ddp, made] if compressed and ours else [ddp]
        with Join(joinables):
            for step in range(3 + 2 * context.rank):
                ddp(checks.given(step, context.rank)).backward()
                made.step()
                made.zero_grad()
        rows.append([p.detach().clone() for p in module.parts])
    # Ranks that have joined get the last one's parameters from DDP.
    for a, b in zip(*rows, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
    checks.alike(rows[1])


@pytest.mark.fused_only
@pytest.mark.parametrize("place", range(6))
@on_ranks(2)
def test_backward_that_is_cut_short(context: Context, place: int) -> None:
    """A backward that raises when some buckets of a group of gradients are there, and the rest will
    never be: its caller gets the exception at once. (DDP itself refuses the next forward.)"""
    state = compress.from_params({"compressor": "efsignsgd", "memory": "residual"}, schedule="one")
    module = checks.Given()
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.001)
    parts: Any = list(module.parts)
    one: Any = fusedpg.optim.SGD(parts, lr=0.1, ddp=ddp, comm_hook=(state, compress.hook))

    def step(number: int) -> None:
        ddp(checks.given(number, context.rank)).backward()
        one.step()
        one.zero_grad()

    def fails(grad: Any) -> None:
        raise ArithmeticError("of the user's")

    for number in range(3):
        step(number)
    parts[place].register_hook(fails)
    begin = time.monotonic()
    with refused("of the user's", ArithmeticError):
        step(3)
    assert time.monotonic() - begin < 20
    checks.alike([p.detach() for p in parts])


@pytest.mark.fused_only
@on_ranks(3)
def test_fused_optimizers_say_what_they_cannot(context: Context) -> None:
    state = compress.from_params({"compressor": "topk", "memory": "residual"})
    ddp = DistributedDataParallel(checks.Given(), bucket_cap_mb=0.001)
    parts: Any = list(ddp.module.parts)
    hook = (state, compress.hook)
    make: Any = fusedpg.optim.SGD
    with refused("overlap=False", ValueError):
        make(parts, ddp=ddp, comm_hook=hook, overlap=True)
    with refused('reduce="mean"', ValueError):
        make(parts, ddp=ddp, comm_hook=hook, reduce="sum")
    with refused("(state, hook)", TypeError):
        make(parts, ddp=ddp, comm_hook=state)
    with refused("attach(ddp)"):
        make(parts, comm_hook=hook).step()
    uneven = [0, 1] if context.rank < 2 else [2]
    group = dist.new_group(uneven, use_local_synchronization=True)
    with refused("process groups of one size", ValueError):
        make(parts, ddp=ddp, comm_hook=hook, process_group=group)
    ranks = [context.rank]
    alone = dist.new_group(ranks, backend="fused", use_local_synchronization=True)
    elsewhere = DistributedDataParallel(checks.Given(), process_group=alone)
    with refused("give the state its group", ValueError):
        make(elsewhere.parameters(), ddp=elsewhere, comm_hook=hook)
    assert not elsewhere._comm_hooks
    one = make(parts[:2], ddp=ddp, comm_hook=hook)
    with refused("the same (state, hook)", ValueError):
        make(parts[2:], ddp=ddp)
    two = make(parts[2:], ddp=ddp, comm_hook=hook)
    ddp(checks.given(0, context.rank)).backward()
    one.step()
    two.step()
    ddp.zero_grad()
    one.set_local_batch_size(3)
    with refused("set_local_batch_size"):
        ddp(checks.given(0, context.rank)).backward()


def outer_steps(context: Context) -> list[torch.Tensor]:
    """DiLoCo (Douillard et al. 2023, arXiv:2311.08105, algorithm 1): steps of each rank alone, then
    one of Nesterov's on the mean of what they have changed; ours is one operation."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 3))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    options: dict[str, Any] = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    ours = context.backend == "fused"
    make: Any = fusedpg.optim.SGD if ours else torch.optim.SGD
    optimizer = make(outer, **options)
    for step in range(20):
        generator = torch.Generator().manual_seed(100 * step + context.rank)
        inner.zero_grad()
        model(torch.randn(8, 20, generator=generator)).square().mean().backward()
        inner.step()
        if step % 4 != 3:
            continue
        with torch.no_grad():
            for before, p in zip(outer, model.parameters()):
                before.grad = before.detach() - p
                if not ours:
                    dist.all_reduce(before.grad)
                    before.grad /= context.world_size
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for before, p in zip(outer, model.parameters()):
                p.copy_(before)
    checks.alike([p.detach() for p in outer])
    return [p.detach().clone() for p in outer]


@pytest.mark.fused_only
def test_outer_steps_as_on_gloo() -> None:
    found = harness.pool(3).run(outer_steps)
    with harness.Workers(3, backend="gloo") as gloo:
        wanted = gloo.run(outer_steps)
    for a, b in zip(found[0], wanted[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# --- without ranks -------------------------------------------------------------------------


def test_illegal_pairs_say_what_to_use() -> None:
    for compressor, memory, communicator, hint in (
        ("topk", "residual", "allreduce", "allgather"),
        ("qsgd", "dgc", "allgather", "topk"),
        ("signsgd", "residual", "allgather", "efsignsgd"),
        ("powersgd", "powersgd", "allgather", "allreduce"),
        ("topk", "powersgd", "allgather", "residual"),
        ("powersgd", "efsignsgd", "allreduce", "powersgd"),
    ):
        with pytest.raises(ValueError, match=hint):
            compress.from_params(
                {"compressor": compressor, "memory": memory, "communicator": communicator}
            )
    for wrong in (
        {"compressor": "top"},
        {"memory": "some"},
        {"communicator": "wire"},
        {"compressor": "topk", "rate": 0.1},
        {"compressor": "topk", "compress_ratio": 0.0},
        {"compressor": "qsgd", "quantum_num": 0},
    ):
        with pytest.raises(ValueError, match=r"known|ratio|quantum_num"):
            compress.from_params(wrong)
    with pytest.raises(ValueError, match="schedule"):
        compress.from_params({}, schedule="best")


def test_every_legal_triple_is_made() -> None:
    made = sum(legal(*one) for one in itertools.product(COMPRESSORS, MEMORIES, COMMUNICATORS))
    # By hand: 15 compressors with none; the rules of docs/guides/compression.md for the others.
    four, six = 4, 6  # without and with the two that add payloads up: allreduce, quantized
    linear_sparse, sparse = 1, 4  # randomk; topk, threshold, guarded_threshold, dgc
    dense_linear, lossy, votes = 2, 5, 2  # none, fp16; qsgd, terngrad, ...; signsgd, signum
    wanted = (
        linear_sparse * six * 4 + sparse * four * 4 + dense_linear * six * 3
        + lossy * four * 3 + votes * four * 1 + 3 * 2
    )  # fmt: skip
    assert made == wanted


def test_ones_own() -> None:
    class Halves(compress.Compressor):
        def compress(self, tensor: torch.Tensor, name: str) -> Any:
            return [tensor.bfloat16()], tensor.shape

        def decompress(self, tensors: Any, ctx: Any) -> torch.Tensor:
            return tensors[0].float().view(ctx)

    compress.register_compressor("halves", Halves)
    try:
        state = compress.from_params({"compressor": "halves", "memory": "residual"})
        assert isinstance(state.compressor, Halves)
        with pytest.raises(ValueError, match="exists already"):
            compress.register_compressor("halves", COMPRESSORS["topk"])
        with pytest.raises(TypeError, match="subclass"):
            compress.register_memory("halves", Halves)  # type: ignore[arg-type]
    finally:
        del COMPRESSORS["halves"]


def test_names_of_ours_are_not_taken_twice() -> None:
    top: Any = COMPRESSORS["topk"]
    with pytest.raises(ValueError, match="'topk' is TopK already"):

        class Mine(top, name="topk"):
            pass

    class Keyed:
        def __init_subclass__(cls, key: str, **options: Any) -> None:
            super().__init_subclass__(**options)
            cls.key = key

    class Other(top, Keyed, key="a"):
        key: str

    assert Other.key == "a" and COMPRESSORS["topk"] is top


def test_a_state_beside_other_entries_loads_without_memory() -> None:
    values = {"parameters": [], "memory": {"sent": []}}
    saved = {"rank 0 of 2": (values,), "epoch": 1}
    with pytest.raises(ValueError, match="must have one entry"):
        _checkpoint.values_of(saved, "rank 0 of 2", memory=True)
    assert _checkpoint.values_of(saved, "rank 1 of 2", memory=False)["memory"] == {}


def test_graces_two_functions() -> None:
    """compress() and decompress() as in GRACE, outside of training."""
    for name, made in COMPRESSORS.items():
        if name in ("signum", "powersgd"):
            continue
        one = made()
        x = torch.linspace(-2, 2, 60).view(3, 20)
        tensors, ctx = one.compress(x, "x")
        back = one.decompress(tensors, ctx)
        assert back.shape == x.shape
        assert (back * x).sum() > 0, name


# --- the search ----------------------------------------------------------------------------


def layout(numels: list[int], each: int) -> _schedule.Layout:
    made = _schedule.Layout()
    for begin in range(0, len(numels), each):
        made.add(numels[begin : begin + each], "fp32")
    return made


class Model:
    """A pipeline: gradients come, a thread compresses and sends, group after group."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.numels = [int(n) for n in 10 ** draw.uniform(2, 6.3, draw.integers(6, 40))]
        self.layout = layout(self.numels, int(draw.integers(1, 4)))
        self.total = np.cumsum([0, *self.numels])
        self.fixed = 10 ** draw.uniform(-4, -2)
        self.slope = 10 ** draw.uniform(-9.5, -7.5)
        backward = np.cumsum([0, *(n * 10 ** draw.uniform(-9, -8) + 1e-5 for n in self.numels)])
        ends = np.array([0, *self.layout.ends()])
        self.when = backward[ends[np.searchsorted(ends, np.arange(len(self.total)))]]
        self.plain = self.when[-1] + self.total[-1] * 10 ** draw.uniform(-9.5, -7)

    def took(self, candidate: _schedule.Candidate) -> _schedule.Measured:
        if candidate.plain:
            return _schedule.Measured(float(self.plain))
        begin, now, groups, ready = 0, 0.0, [], {}
        for end in sorted(candidate.splits):
            numel = int(self.total[end] - self.total[begin])
            seconds = self.fixed + self.slope * numel
            now = max(now, float(self.when[end])) + seconds
            groups.append((numel, seconds))
            ready[end] = float(self.when[end])
            begin = end
        return _schedule.Measured(now, groups, ready)

    def best(self) -> float:
        count = len(self.numels)
        found = [float(self.plain)]
        for cuts in range(4):
            for inner in itertools.combinations(range(1, count), cuts):
                splits = frozenset({*inner, count})
                found.append(self.took(_schedule.Candidate(splits)).seconds)
        return min(found)


@pytest.mark.parametrize("seed", range(25))
def test_search_is_near_brute_force(seed: int) -> None:
    model = Model(seed)
    search = _schedule.search(model.layout, True)
    candidate, tried = next(search), 0
    while True:
        try:
            candidate = search.send(model.took(candidate))
            tried += 1
        except StopIteration as done:
            chosen = done.value
            break
    assert tried < 40
    assert model.took(chosen).seconds <= 1.02 * model.best(), seed


def test_groups_end_where_types_do() -> None:
    made = _schedule.Layout()
    made.add([10, 10], "a")
    made.add([10], "a")
    made.add([10, 10], "b")
    made.add([10], "a")
    assert made.forced() == {3, 5, 6}
    assert made.equal(1) == {3, 5, 6}
    assert {3, 5, 6} <= made.equal(4)
    for splits in _schedule.best_splits(made, np.arange(7.0), 0.1, 0.01):
        assert {3, 5, 6} <= splits


@harness.on_ranks(1)
def test_every_step_draws_anew(context: harness.Context) -> None:
    state = compress.from_params({"compressor": "randomk", "compress_ratio": 0.1})
    ddp = checks.hooked(nn.Linear(64, 1, bias=False), state)
    sent = set()
    for _ in range(4):
        ddp.zero_grad()
        ddp(torch.ones(1, 64)).sum().backward()
        sent.add(tuple(ddp.module.weight.grad.flatten().nonzero().flatten().tolist()))
    assert len(sent) == 4
