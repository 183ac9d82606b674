"""What users expect of an optimizer of torch.optim, with torch.optim as the oracle."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import fusedpg
import harness
from checks import optim_assumptions, optim_reads, optim_torch
from checks.refused import refused
from fuzz import core, optimizers

pytestmark = [
    pytest.mark.fused_only,
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]

KINDS = ("SGD", "Adam", "AdamW")
MODES = ("manual", "ddp", "overlap")
WRITES = ("copy_", "data", "set data", "one element", "numpy", "nothing")


@pytest.mark.parametrize("kind", KINDS)
def test_state_dicts_of_older_torch(pair: harness.Workers, kind: str) -> None:
    pair.run(optim_torch.older_state_dict, kind)


@pytest.mark.parametrize(("source", "target"), [("Adam", "AdamW"), ("AdamW", "Adam")])
def test_state_dicts_of_another_kind(pair: harness.Workers, source: str, target: str) -> None:
    pair.run(optim_torch.other_kind, source, target)


def test_state_dict_of_sgd_without_momentum(pair: harness.Workers) -> None:
    pair.run(optim_torch.without_momentum)


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("to_torch", [False, True], ids=["from torch", "to torch"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_through_dcp(
    pair: harness.Workers, kind: str, to_torch: bool, frozen: bool, tmp_path: Path
) -> None:
    pair.run(optim_torch.through_dcp, kind, to_torch, frozen, str(tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_parameter_without_elements(workers: harness.Workers, kind: str) -> None:
    workers.run(optim_torch.empty_parameter, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_state_comes_with_the_first_gradient(pair: harness.Workers, kind: str) -> None:
    pair.run(optim_torch.lazy, kind)


@pytest.mark.parametrize("mode", MODES)
def test_frozen_parameters_have_no_state(pair: harness.Workers, mode: str) -> None:
    assert pair.run(optim_torch.frozen_memory, mode) == [2 * 4 * 32 + 4] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_first_step_is_none(pair: harness.Workers, kind: str) -> None:
    pair.run(optim_torch.dropped_after_overflow, kind)


def test_momentum_turned_on_later(pair: harness.Workers) -> None:
    pair.run(optim_torch.later_momentum)


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_amsgrad_turned_on_later(pair: harness.Workers, kind: str) -> None:
    pair.run(optim_torch.later_amsgrad, kind)


@pytest.mark.parametrize("how", ["clear", "one", "empty"])
@pytest.mark.parametrize("kind", KINDS)
def test_state_cleared(pair: harness.Workers, kind: str, how: str) -> None:
    pair.run(optim_torch.cleared, kind, how)


def test_state_cleared_on_one_rank(trio: harness.Workers) -> None:
    trio.run(optim_torch.cleared_on_one_rank)


def test_groups_edited_by_hand(pair: harness.Workers) -> None:
    pair.run(optim_torch.edited_groups)


def test_copies_are_refused(pair: harness.Workers) -> None:
    pair.run(optim_torch.copies)


@pytest.mark.parametrize("kind", [*KINDS, "LAMB"])
def test_arguments_are_checked_when_given(pair: harness.Workers, kind: str) -> None:
    pair.run(optim_torch.arguments, kind)


def test_hooks(pair: harness.Workers) -> None:
    pair.run(optim_torch.hooks)


def test_hooks_of_a_fused_optimizer(pair: harness.Workers) -> None:
    pair.run(optim_torch.fused_hooks)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_cannot_be_read(pair: harness.Workers, mode: str) -> None:
    pair.run(optim_reads.reads, mode)


def test_norms_of_local_and_reduced_gradients(pair: harness.Workers) -> None:
    pair.run(optim_reads.mixed_norms)


def test_what_is_added_to_gradients(trio: harness.Workers) -> None:
    trio.run(optim_reads.added_by_hand)


@pytest.mark.parametrize("how", ["method", "torch", "constructor"])
def test_clipping_in_double(pair: harness.Workers, how: str) -> None:
    pair.run(optim_reads.clip_in_double, how)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("write", WRITES)
def test_masters_see_writes(pair: harness.Workers, write: str, mode: str) -> None:
    pair.run(optim_reads.masters_see_writes, write, mode)


@pytest.mark.parametrize("op", ["fused_sgd_", "fused_adam_", "fused_adamw_", "fused_lamb_"])
def test_meta_tensors_are_refused(pair: harness.Workers, op: str) -> None:
    pair.run(optim_reads.meta, op)


def test_torch_is_as_assumed() -> None:
    root = Path(torch.__file__).parent.parent
    assert not list(optim_assumptions.wrong(root))


@pytest.mark.parametrize("what", ["checkpoint", "init", "clip", "join"])
def test_another_torch(pair: harness.Workers, what: str) -> None:
    pair.run(getattr(optim_assumptions, f"another_{what}"))


@pytest.mark.parametrize("where", optimizers.WHERE)
def test_sequences(where: str) -> None:
    core.search("optimizers", where, core.seed(0))


@pytest.mark.parametrize("asked", ["clip", "clip one by one", "norm", "unscale", "scaler step"])
@harness.on_ranks(2, 3)
def test_a_gradient_of_other_ranks_is_named(context: harness.Context, asked: str) -> None:
    """The caller's list of gradients lacks it on a rank: all ranks raise, and go on together."""
    params = [torch.nn.Parameter(torch.ones(5)) for _ in range(3)]
    optimizer = fusedpg.optim.SGD(params, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    last = context.world_size - 1

    def ask() -> None:
        if asked == "norm":
            params[0].grad.norm()
        elif asked == "unscale":
            scaler.unscale_(optimizer)
        elif asked == "scaler step":
            scaler.step(optimizer)
        else:
            foreach = None if asked == "clip" else False
            torch.nn.utils.clip_grad_norm_(params, 1e9, foreach=foreach)

    loss = sum(p.sum() for p in params[: 3 if context.rank == last else 2])
    (scaler.scale(loss) if "scale" in asked else loss).backward()
    begin = time.monotonic()
    rank = last - 1
    with refused(f"rank {rank} has no gradient of parameter 2 of group 0, and other ranks have"):
        ask()
    assert time.monotonic() - begin < 1
    # Now all ranks have it.
    assert params[2].grad is not None
    if "scale" not in asked:
        ask()
        optimizer.step()
        share = 1 / context.world_size
        for p, factor in zip(params, (1, 1, share), strict=True):
            torch.testing.assert_close(p.detach(), torch.full((5,), 1 - 0.1 * factor))
