"""Training scripts run twice: plain DDP with torch.optim, and the fused optimizers.

After every step all parameters must be equal, or the fused run must have raised an error that
names what it cannot do. What DDP itself refuses, the fused run has to refuse, too.
"""

from __future__ import annotations

import contextlib
import re
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from checks.optim_patterns import ANY, NAMES, NEVER, PATTERNS, Program, execute
from checks.optim_script import Script, Setup
from harness import Context

TOLERANCE = 1e-11


class Mode(TorchDispatchMode):
    """A mode of the user's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


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
    flops = FlopCounterMode(display=False)
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        for mode in (Mode(), flops) if setup.modes else ():
            stack.enter_context(mode)
        try:
            pattern(script)
        except RuntimeError as problem:
            assert not isinstance(problem, dist.DistError), problem
            error = str(problem) or repr(problem)
            traceback.clear_frames(problem.__traceback__)
    script.flops = flops.get_total_flops()
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
    # There is no DDP then that could refuse, or let ranks drift apart without a word.
    cut = setup.mode == "manual" and (bool(refused) or theirs.diverged is not None)
    if cut:
        want, refused = want[: theirs.diverged], ""
        got, want = got[: len(want)], want[: len(got)]
    for number, (mine, right) in enumerate(zip(got, want, strict=False)):
        for i, (a, b) in enumerate(zip(mine, right, strict=True)):
            apart = float((a - b).abs().max()) / max(1.0, float(b.abs().max()))
            if not apart <= TOLERANCE:
                return f"step {number}, parameter {i}: {apart:.1e} apart ({error})"
    if refused:
        able = error or re.search(allowed.get("refused", "^$"), refused)
        return "" if able else f"DDP refuses, ours does not: {refused}"
    if not error and not cut:
        if ours.scaler.get_scale() != theirs.scaler.get_scale():
            return "other scales of the loss"
        if ours.flops != theirs.flops:
            return f"{ours.flops} FLOPs were counted, not {theirs.flops}"
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
