"""Training scripts run twice: plain DDP with torch.optim, and the fused optimizers.

After every step all parameters must be equal, or the fused run must have raised an error that
names what it cannot do. What DDP itself refuses, the fused run has to refuse, too.
"""

from __future__ import annotations

import copy
import re
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from checks.optim_patterns import ANY, NAMES, NEVER, PATTERNS, Program, execute
from checks.optim_script import OPTIMIZERS, WIDTH, Net, Script, Setup, of_torch
from checks.refused import refused
from harness import Context

TOLERANCE = 1e-11


def _run(
    context: Context,
    setup: Setup,
    pattern: Callable[[Script], None],
    fused: bool,
    group: Any = None,
) -> tuple[Script, str]:
    """The script after its run, and the error that ended it, if any."""
    script = Script(context, setup, fused, group)
    error = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            pattern(script)
        except RuntimeError as problem:
            assert not isinstance(problem, dist.DistError), problem
            error = str(problem) or repr(problem)
            traceback.clear_frames(problem.__traceback__)
    return script, error


def difference(
    context: Context,
    setup: Setup,
    pattern: Callable[[Script], None],
    allowed: dict[str, str],
    groups: Sequence[Any] = (None, None),
) -> str:
    """What is wrong, or nothing."""
    theirs, refused = _run(context, setup, pattern, False, groups[0])
    ours, error = _run(context, setup, pattern, True, groups[1])
    got, want = ours.history, theirs.history
    for number, (mine, right) in enumerate(zip(got, want, strict=False)):
        for i, (a, b) in enumerate(zip(mine, right, strict=True)):
            apart = float((a - b).abs().max()) / max(1.0, float(b.abs().max()))
            if not apart <= TOLERANCE:
                return f"step {number}, parameter {i}: {apart:.1e} apart ({error})"
    if refused:
        able = error or re.search(allowed.get("refused", "^$"), refused)
        return "" if able else f"DDP refuses, ours does not: {refused}"
    if not error:
        return "" if len(got) == len(want) else f"{len(got)} steps of {len(want)}"
    mode = "ddp" if setup.mode == "hook" else setup.mode
    texts = [allowed.get("", ""), allowed.get(mode, ""), allowed.get(setup.graph, "")]
    if theirs.diverged is not None and len(got) >= theirs.diverged:
        texts.append(NEVER)  # DDP has let ranks drift apart without a word
    if any(text and re.search(text, error) for text in texts):
        return ""
    return f"raised after {len(got)} steps: {error}"


def compare(context: Context, cases: Sequence[tuple[str, Setup]]) -> list[str]:
    """Runs patterns; the findings of this rank."""
    found = []
    for name, setup in cases:
        pattern = NAMES[name]
        wrong = difference(context, setup, pattern, PATTERNS[pattern])
        # A rank that has raised alone would leave the others with another operation.
        facts = torch.tensor([float(bool(wrong))])
        dist.all_reduce(facts, group=context.oracle)
        if wrong:
            found.append(f"rank {context.rank}, {name}, {setup}: {wrong}")
    return found


def compare_program(context: Context, program: Program, setup: Setup) -> str:
    """Runs a drawn program; what is wrong on this rank."""
    # When DDP raises in the middle of a backward, ranks may have begun different operations: the
    # order in which it declares unused parameters ready is that of addresses.
    groups = [dist.new_group(backend=context.backend) for _ in range(2)]
    wrong = difference(context, setup, execute(program), {"": ANY}, groups)
    dist.barrier(group=context.oracle)
    return wrong


def compare_without_taking(context: Context, cases: Sequence[tuple[str, Setup]]) -> list[str]:
    """With a torch that is not known, which copies every gradient into its buckets."""
    from fusedpg.optim import _torch

    known, _torch.KNOWN = _torch.KNOWN, ((0, 0), (0, 1))
    try:
        return compare(context, cases)
    finally:
        _torch.KNOWN = known


def unfrozen_by_hand(context: Context, optimizer: str) -> None:
    """Manual mode: a parameter that is unfrozen later, and clipping of all gradients."""
    import fusedpg

    torch.manual_seed(11)
    net = Net().double()
    net.layers[2].requires_grad_(False)
    twin = copy.deepcopy(net)
    params, twins = list(net.parameters()), list(twin.parameters())
    ours: Any = getattr(fusedpg.optim, optimizer)(params, **OPTIMIZERS[optimizer])
    theirs = getattr(torch.optim, optimizer)(twins, **OPTIMIZERS[optimizer], foreach=False)
    for step in range(5):
        for one in (net, twin):
            one.layers[2].requires_grad_(step in (2, 3))
        x = torch.randn(
            context.world_size,
            4,
            WIDTH,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(step),
        )
        net(x[context.rank]).square().sum().backward()
        (twin(x.flatten(0, 1)).square().sum() / context.world_size).backward()
        mine, want = (
            torch.nn.utils.clip_grad_norm_(some, 0.7, foreach=False) for some in (params, twins)
        )
        torch.testing.assert_close(mine.double(), want, rtol=1e-6, atol=0)
        ours.step()
        theirs.step()
        for a, b in zip(params, twins, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        ours.zero_grad()
        theirs.zero_grad()


def masters(context: Context, optimizer: str, dtype: torch.dtype, overlap: bool) -> None:
    """Half parameters with fp32 masters under DDP, against fp32 copies and an optimizer of torch.

    Gradients are small integers, exact in half types also when they are accumulated and scaled.
    """
    import fusedpg

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


def masters_and_memory_format(context: Context, steps: int) -> None:
    """bf16 with fp32 masters, converted to channels_last after the optimizer was made."""
    import fusedpg

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
