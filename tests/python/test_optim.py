"""Fused optimizers in manual mode and under DDP, against torch.optim in one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import harness
from checks import optim, optim_guards
from checks.optim import Run

pytestmark = pytest.mark.fused_only

NAMES = ("SGD", "Adam", "AdamW", "LAMB")
MODES = ("manual", "ddp", "overlap")
NOT_OVERLAP = ("manual", "ddp")
VARIANTS = {
    "SGD plain": Run("SGD", options={"momentum": 0, "dampening": 0, "weight_decay": 0}),
    "SGD nesterov": Run("SGD", options={"dampening": 0, "nesterov": True}),
    "SGD maximize": Run("SGD", options={"maximize": True}),
    "Adam amsgrad": Run("Adam", options={"amsgrad": True}),
    "Adam maximize": Run("Adam", options={"maximize": True, "amsgrad": True}),
    "Adam decoupled": Run("Adam", options={"decoupled_weight_decay": True}),
    "AdamW amsgrad": Run("AdamW", options={"amsgrad": True}),
    "AdamW maximize": Run("AdamW", options={"maximize": True}),
    "AdamW tensor lr": Run("AdamW", lr_tensor=True),
    "AdamW sum": Run("AdamW", ours={"reduce": "sum"}),
    "LAMB trust_clip": Run("LAMB", options={"trust_clip": True}),
    "LAMB no decay": Run("LAMB", options={"weight_decay": 0.0}),
    "LAMB always_adapt": Run("LAMB", options={"weight_decay": 0.0, "always_adapt": True}),
    "LAMB maximize": Run("LAMB", options={"maximize": True}),
    "LAMB tensor lr": Run("LAMB", lr_tensor=True),
}
LAYOUTS = ("channels_last", "transposed")


def identical(digests: list[str]) -> None:
    assert len(set(digests)) == 1, "ranks hold different parameters"


def in_mode(run: Run, mode: str) -> Run:
    return dataclasses.replace(run, mode=mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_parity(workers: harness.Workers, name: str, mode: str) -> None:
    identical(workers.run(optim.parity, Run(name, mode)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_parity_in_double(pair: harness.Workers, name: str, mode: str) -> None:
    identical(pair.run(optim.parity, Run(name, mode, dtypes=("float64",)), 1e-12))


IN_TURN = tuple(MODES[i % len(MODES)] for i in range(len(VARIANTS)))


@pytest.mark.parametrize(
    ("variant", "mode"),
    [
        (variant, mode) if mode == turn else harness.slow(variant, mode)
        for variant, turn in zip(VARIANTS, IN_TURN, strict=True)
        for mode in MODES
    ],
)
def test_variants(trio: harness.Workers, variant: str, mode: str) -> None:
    identical(trio.run(optim.parity, in_mode(VARIANTS[variant], mode)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_shared_parameters(workers: harness.Workers, name: str, mode: str) -> None:
    run = Run(name, mode, steps=30, ours={"share_parameters": True})
    identical(workers.run(optim.parity, run))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(trio: harness.Workers, layout: str, mode: str) -> None:
    for share in (False, True):
        run = Run(mode=mode, layout=layout, steps=30, ours={"share_parameters": share})
        identical(trio.run(optim.parity, run))


@pytest.mark.parametrize("mode", MODES)
def test_bucket_views(trio: harness.Workers, mode: str) -> None:
    for layout in ("contiguous", *LAYOUTS):
        run = Run(mode=mode, steps=10, layout=layout, ddp={"gradient_as_bucket_view": True})
        identical(trio.run(optim.parity, run))


@pytest.mark.parametrize("mode", MODES)
def test_slices_without_elements(workers: harness.Workers, mode: str) -> None:
    shapes = ((5,), (33,), (64,), (97,), (1,), (0,), (127,), ())
    for name in NAMES:
        identical(workers.run(optim.parity, Run(name, mode, steps=10, shapes=shapes)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_mixed_types(trio: harness.Workers, name: str, mode: str) -> None:
    dtypes = ("float32", "float64", "float32", "float64", "float32")
    identical(trio.run(optim.parity, Run(name, mode, dtypes=dtypes, steps=20)))
    # bfloat16 beside them, with state in bfloat16 as torch's.
    dtypes = ("float32", "bfloat16", "float64", "bfloat16", "float32")
    run = Run(name, mode, dtypes=dtypes, steps=5, options={"eps": 1e-4} if "A" in name else {})
    identical(trio.run(optim.parity, run, 2e-2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half(pair: harness.Workers, dtype: str, mode: str) -> None:
    # fp16's smallest numbers are no eps: torch's denominators would be zero.
    for name, options in (("SGD", {}), ("AdamW", {"eps": 1e-3}), ("LAMB", {"eps": 1e-3})):
        run = Run(name, mode, dtypes=(dtype,), steps=10, options=options)
        identical(pair.run(optim.parity, run, 2e-2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_half_with_master_weights(
    workers: harness.Workers, name: str, dtype: str, mode: str
) -> None:
    shapes = ((1021,), (31, 37), (2, 3, 5, 7))
    ours = {"master_dtype": torch.float32}
    run = Run(name, mode, dtypes=(dtype,), steps=20, shapes=shapes, ours=ours)
    identical(workers.run(optim.half_with_master, run))


@pytest.mark.parametrize("mode", MODES)
def test_master_weights_without_elements(workers: harness.Workers, mode: str) -> None:
    ours = {"master_dtype": torch.float32}
    run = Run(mode=mode, dtypes=("bfloat16",), steps=5, ours=ours)
    identical(workers.run(optim.half_with_master, run))


def test_masters_follow_what_is_written_into_parameters(pair: harness.Workers) -> None:
    pair.run(optim.half_written_outside)


@pytest.mark.parametrize("mode", MODES)
def test_the_oracle_sees_a_wrong_lamb(pair: harness.Workers, mode: str) -> None:
    for distance in pair.run(optim.lamb_mutant, Run("LAMB", mode, steps=20)):
        assert distance > 1e-4


@pytest.mark.parametrize("mode", MODES)
def test_trust_ratio_is_that_of_whole_tensors(workers: harness.Workers, mode: str) -> None:
    workers.run(optim.lamb_ratio, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_runs_are_identical(trio: harness.Workers, name: str, mode: str) -> None:
    run = Run(name, mode, steps=20)
    assert trio.run(optim.reproducible, run) == trio.run(optim.reproducible, run)


# --- groups, schedulers, closures ---------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_one_cycle(pair: harness.Workers, name: str, mode: str) -> None:
    identical(pair.run(optim.scheduled, Run(name, mode, steps=12)))


@pytest.mark.parametrize("mode", MODES)
def test_one_cycle_with_a_tensor(pair: harness.Workers, mode: str) -> None:
    identical(pair.run(optim.scheduled, Run("AdamW", mode, steps=12, lr_tensor=True)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_hyperparameters_are_read_at_update_time(
    pair: harness.Workers, name: str, mode: str
) -> None:
    identical(pair.run(optim.edited, Run(name, mode, steps=10)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_no_lr_moves_nothing(pair: harness.Workers, name: str, mode: str) -> None:
    pair.run(optim.still, Run(name, mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_a_group_added_later(pair: harness.Workers, name: str, mode: str) -> None:
    identical(pair.run(optim.group_later, Run(name, mode, steps=8)))


@pytest.mark.parametrize("mode", MODES)
def test_closure_is_called_once(pair: harness.Workers, mode: str) -> None:
    pair.run(optim.closure, mode)


@pytest.mark.parametrize("mode", MODES)
def test_step_without_gradients(trio: harness.Workers, mode: str) -> None:
    trio.run(optim.two_steps, mode)


@pytest.mark.parametrize("mode", MODES)
def test_frozen_parameters(trio: harness.Workers, mode: str) -> None:
    identical(trio.run(optim.frozen, mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "LAMB"])
def test_unused_parameters(trio: harness.Workers, name: str, mode: str) -> None:
    run = Run(name, mode, steps=6, ddp={"find_unused_parameters": True})
    identical(trio.run(optim.unused, run))


# --- clipping, GradScaler, accumulation ---------------------------------------------


@pytest.mark.parametrize("how", ["method", "torch", "constructor"])
@pytest.mark.parametrize("mode", NOT_OVERLAP)
def test_clipping(workers: harness.Workers, mode: str, how: str) -> None:
    for max_norm in (2.0, 1e6):
        run = Run("SGD", mode, steps=5)
        identical(workers.run(optim_guards.clipped, run, how, max_norm))


@pytest.mark.parametrize("mode", NOT_OVERLAP)
def test_ranks_that_scale_differently(trio: harness.Workers, mode: str) -> None:
    for how in optim_guards.SCALING:
        trio.run(optim_guards.scaled_differently, mode, how)


def test_hosts_that_clip_differently() -> None:
    workers = harness.pool_of_hosts("two")
    workers.run(optim_guards.scaled_differently, "manual", "method")


@pytest.mark.parametrize("order", [torch.inf, 1.0, 3.0])
@pytest.mark.parametrize("how", ["method", "torch"])
@pytest.mark.parametrize("mode", NOT_OVERLAP)
def test_other_norms(trio: harness.Workers, mode: str, how: str, order: float) -> None:
    run = Run("SGD", mode, steps=3)
    identical(trio.run(optim_guards.clipped, run, how, 1.5, order))


def test_reduced_gradients(trio: harness.Workers) -> None:
    trio.run(optim_guards.norms)


SCALED: dict[str, dict[str, Any]] = {
    "plain": {},
    "unscale": {"unscale": True},
    "unscale, method": {"unscale": True, "clip": "method"},
    "unscale, torch": {"unscale": True, "clip": "torch"},
    "constructor": {"clip": "constructor"},
}


@pytest.mark.parametrize("how", SCALED)
@pytest.mark.parametrize("mode", NOT_OVERLAP)
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_grad_scaler(trio: harness.Workers, name: str, mode: str, how: str) -> None:
    options = {"unscale": False, "clip": "none", **SCALED[how]}
    run = Run(name, mode, steps=7)
    identical(trio.run(optim_guards.scaler, run, options["unscale"], options["clip"]))


def test_grad_scaler_with_types_of_their_own(pair: harness.Workers) -> None:
    for mode in NOT_OVERLAP:
        run = Run("SGD", mode, dtypes=("float32", "float64"), steps=6)
        identical(pair.run(optim_guards.scaler, run, True, "method"))


@pytest.mark.parametrize("types", [1, 2])
@pytest.mark.parametrize("unscale", [False, True], ids=["", "unscale"])
def test_grad_scaler_by_hand(trio: harness.Workers, unscale: bool, types: int) -> None:
    identical(trio.run(optim_guards.scaler_by_hand, unscale, types))


def test_found_inf_on_one_rank(trio: harness.Workers) -> None:
    trio.run(optim_guards.found_inf_without_scaler)


@pytest.mark.parametrize("view", [False, True], ids=["", "view"])
@pytest.mark.parametrize("mode", ["ddp", "overlap"])
def test_accumulation(workers: harness.Workers, mode: str, view: bool) -> None:
    run = Run(mode=mode, steps=5, ddp={"gradient_as_bucket_view": view})
    identical(workers.run(optim_guards.accumulated, run))


@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("view", [False, True], ids=["", "view"])
def test_synced_accumulation(trio: harness.Workers, view: bool, clip: bool, some: bool) -> None:
    run = Run("SGD", "ddp", steps=5, ddp={"gradient_as_bucket_view": view})
    identical(trio.run(optim_guards.synced_twice, run, clip, some))


@pytest.mark.parametrize("before", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("mode", ["ddp", "overlap"])
def test_gradients_never_reduced(pair: harness.Workers, mode: str, before: bool) -> None:
    pair.run(optim_guards.unsynchronised, mode, before)


# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize("what", optim_guards.OVERLAP_REFUSES)
def test_overlap_refuses(pair: harness.Workers, what: str) -> None:
    pair.run(optim_guards.overlap_refuses, what)


@pytest.mark.parametrize("what", optim_guards.REFUSES)
def test_refuses(pair: harness.Workers, what: str) -> None:
    pair.run(optim_guards.refuses, what)


@pytest.mark.parametrize("mode", MODES)
def test_sparse_gradients(pair: harness.Workers, mode: str) -> None:
    pair.run(optim_guards.sparse, mode)


@pytest.mark.parametrize("early", [False, True], ids=["after backward", "before"])
@pytest.mark.parametrize("mode", MODES)
def test_shared_parameters_are_guarded(pair: harness.Workers, mode: str, early: bool) -> None:
    identical(pair.run(optim_guards.shared, mode, early))
