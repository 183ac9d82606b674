"""Fused optimizers against torch.optim on plain DDP, pattern by pattern and at random."""

from __future__ import annotations

import dataclasses
import inspect
import random
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import fusedpg
import harness
from checks import optim_differential as differential
from checks.optim_patterns import NAMES, WITH_DDP
from checks.optim_script import OPTIMIZERS, WIDTH, Setup, of_torch
from checks.refused import refused
from fuzz import core, trips
from fuzz.scripts import SETUPS
from harness import Context, on_ranks

pytestmark = pytest.mark.fused_only


def agree(workers: harness.Workers, name: str, setups: list[Setup]) -> None:
    cases = [(name, setup) for setup in setups]
    found = [one for rank in workers.run(differential.compare, cases) for one in rank]
    assert not found, "\n".join(found[:20])


HOOKED = [s for s in SETUPS if s.finish == "" and s.mode == "hook"]
EVERY = [s for s in SETUPS if s.finish == "" and s.mode in ("ddp", "overlap")]
MANUAL = [s for s in SETUPS if s.mode == "manual"]
# Every mode, view and kind of graph; the optimizers in turn, each with every kind of graph.
CHOSEN = [s for i, s in enumerate(EVERY) if i % 3 == (i // 3 + i // 9) % 3]
assert len({(s.optimizer, s.graph) for s in CHOSEN}) == 9
# In an order without a rhythm, so that each part has some of everything.
FINISHED = random.Random(1).sample([s for s in SETUPS if s.finish], 120)
# Those where a step follows more than one backward, or some parameters have no gradient.
INTERESTING = (
    "plainly",
    "reentrant_checkpoints",
    "accumulation",
    "synchronised_twice_with_unused",
    "unused_on_some_ranks",
    "module_first",
)


def test_each_pattern(pair: harness.Workers) -> None:
    """In one of the setups."""
    for i, name in enumerate(NAMES):
        agree(pair, name, CHOSEN[i % len(CHOSEN) :][:1])


@pytest.mark.parametrize("name", NAMES)
def test_patterns(pair: harness.Workers, name: str) -> None:
    agree(pair, name, CHOSEN)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITH_DDP])
def test_manual_mode(pair: harness.Workers, name: str) -> None:
    agree(pair, name, MANUAL if name in INTERESTING else MANUAL[:3])


@pytest.mark.parametrize("name", INTERESTING)
def test_clipping_and_scaling(pair: harness.Workers, name: str) -> None:
    agree(pair, name, FINISHED[INTERESTING.index(name) :: len(INTERESTING)])


@pytest.mark.parametrize("name", INTERESTING)
def test_dispatch_modes(pair: harness.Workers, name: str) -> None:
    agree(pair, name, [dataclasses.replace(s, modes=True) for s in CHOSEN])


@pytest.mark.parametrize("name", NAMES)
def test_hooks(pair: harness.Workers, name: str) -> None:
    agree(pair, name, HOOKED[list(NAMES).index(name) % 5 :: 5])


@pytest.mark.skipif(
    "batched_grad_copy" not in inspect.signature(DistributedDataParallel).parameters,
    reason="this torch copies every gradient at once",
)
@pytest.mark.parametrize("name", INTERESTING)
def test_batched_copies(pair: harness.Workers, name: str) -> None:
    agree(pair, name, [dataclasses.replace(s, batched=True) for s in CHOSEN])


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 3])
def test_other_worlds(size: int) -> None:
    for i, name in enumerate(NAMES):
        agree(harness.pool(size), name, CHOSEN[i % 4 :: 4])


@pytest.mark.parametrize("name", ("accumulation_of_unused", *INTERESTING))
def test_unknown_torch(pair: harness.Workers, name: str) -> None:
    cases = [(name, setup) for setup in CHOSEN[::2]]
    found = pair.run(differential.compare_without_taking, cases)
    assert not any(found), found


@pytest.mark.parametrize("steps", [0, 2])
@on_ranks(2)
def test_masters_and_memory_format(context: Context, steps: int) -> None:
    """bf16 with fp32 masters, converted to channels_last after the optimizer was made."""
    torch.manual_seed(11)
    net = torch.nn.Conv2d(3, 8, 3).bfloat16()
    optimizer: Any = fusedpg.optim.AdamW(
        net.parameters(), lr=1e-6, weight_decay=0.0, master_dtype=torch.float32
    )

    def train() -> None:
        net(torch.randn(2, 3, 8, 8).bfloat16()).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(steps):
        train()
    before = [param.detach().clone() for param in net.parameters()]
    net.to(memory_format=torch.channels_last)
    if steps:
        with refused("memory format"):
            train()
        with refused("memory format"):
            optimizer.local_state_dict()
    else:
        train()
    for now, old in zip(net.parameters(), before, strict=True):
        torch.testing.assert_close(now.detach(), old, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "LAMB"])
@on_ranks(2)
def test_masters(context: Context, optimizer: str, dtype: torch.dtype, overlap: bool) -> None:
    """Half parameters with fp32 masters under DDP, against fp32 copies and an optimizer of torch.

    Gradients are small integers, exact in half types also when they are accumulated and scaled.
    """
    torch.manual_seed(11)
    net = torch.nn.Sequential(torch.nn.Linear(WIDTH, 37), torch.nn.Linear(37, 5)).to(dtype)
    params = list(net.parameters())
    copies = [param.detach().float().requires_grad_() for param in params]
    theirs = of_torch(optimizer, copies)
    ddp = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.0005)
    ours: Any = getattr(fusedpg.optim, optimizer)(
        params, **OPTIMIZERS[optimizer], ddp=ddp, overlap=overlap, master_dtype=torch.float32
    )
    # The scaler of overlap=True raises, which other tests see.
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100, enabled=not overlap)

    def gradient(step: int, batch: int, rank: int, i: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + 100 * batch + 10 * rank + i)
        return torch.randint(-3, 4, params[i].shape, generator=generator).float()

    for step in range(7):
        overflow = step in (0, 3) and not overlap
        for batch in range(2):
            ddp.require_backward_grad_sync = batch == 1
            values = ddp.module[0].weight.new_zeros(1, WIDTH)
            loss = ddp(values).sum() * 0
            for i, param in enumerate(params):
                factor = gradient(step, batch, context.rank, i).to(dtype)
                if overflow and batch and context.rank == 0 and i == 1:
                    factor[3] = torch.inf
                loss = loss + (param * factor).float().sum()
            scaler.scale(loss).backward()
        ddp.require_backward_grad_sync = True
        scaler.step(ours)
        scaler.update()
        ours.zero_grad()
        for i, copied in enumerate(copies):
            copied.grad = sum(
                gradient(step, batch, rank, i) for batch in range(2)
                for rank in range(context.world_size)
            ) / context.world_size  # type: ignore[assignment]  # fmt: skip
        if not overflow:
            theirs.step()
        state = ours.full_state_dict(rank0_only=False)["state"]
        for i, (param, copied) in enumerate(zip(params, copies, strict=True)):
            want = copied.detach()
            mine = state[i]["master_param"].reshape(want.shape) if state else want
            apart = float((mine - want).norm() / want.norm())
            assert apart <= 2e-6, (step, i, apart)
            assert torch.equal(param.detach(), mine.to(dtype)), (step, i)
            if "step" in state.get(i, {}):
                assert float(state[i]["step"]) == float(theirs.state[copied]["step"]), (step, i)
    assert state


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_everything(size: int) -> None:
    for name in NAMES:
        agree(harness.pool(size), name, SETUPS)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, *map(harness.slow, range(1, 11))])
@pytest.mark.parametrize("where", ["2", *map(harness.slow, "13")])
def test_drawn_scripts(where: str, seed: int) -> None:
    core.search("scripts", where, core.seed(seed))


@pytest.mark.long
def test_drawn_trips() -> None:
    """Checkpoints from three ranks to two and back."""
    core.search("trips", *trips.WHERE, core.seed(0))
