"""Seams between the parts of the fused optimizers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import harness
from checks import optim_seams


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "check",
    [
        optim_seams.accumulated_in_a_bucket,
        optim_seams.swapped_groups,
        optim_seams.norms_are_fresh,
        optim_seams.masters_into_float32,
        optim_seams.blank_state,
    ],
)
def test_seams(check: Callable[[harness.Context], None], world_size: int) -> None:
    harness.pool(world_size).run(check)


@pytest.mark.parametrize("view", [False, True])
def test_gradients_of_other_strides(view: bool) -> None:
    harness.pool(2).run(optim_seams.gradients_of_other_strides, view)


@pytest.mark.parametrize("view", [False, True])
def test_hooks_of_users(view: bool) -> None:
    harness.pool(2).run(optim_seams.hooks_of_users, view)


DDP: dict[str, dict[str, bool]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


@pytest.mark.parametrize("options", DDP)
@pytest.mark.parametrize("overlap", [False, True])
def test_detach_before_backward(overlap: bool, options: str) -> None:
    for again in (False, True):
        for by_name in (False, True):
            harness.pool(2).run(
                optim_seams.detached_before_backward, overlap, DDP[options], again, by_name
            )


def test_group_while_detached() -> None:
    harness.pool(2).run(optim_seams.group_while_detached)


@pytest.mark.parametrize("options", DDP)
@pytest.mark.parametrize("overlap", [False, True])
def test_parameters_taken_out(overlap: bool, options: str) -> None:
    harness.pool(2).run(optim_seams.taken_out, overlap, DDP[options])


@pytest.mark.parametrize("overlap", [False, True])
def test_parameters_taken_out_with_gradients(overlap: bool) -> None:
    harness.pool(2).run(optim_seams.taken_out_and_not_zeroed, overlap)


@pytest.mark.parametrize("how", ["group", "parameter", "state"])
def test_edited_after_backward(how: str) -> None:
    harness.pool(2).run(optim_seams.edited_after_backward, how)


@pytest.mark.parametrize("how", ["", "step raises", "backward raises"])
def test_loaded_after_backward(how: str) -> None:
    harness.pool(2).run(optim_seams.loaded_after_backward, how)
