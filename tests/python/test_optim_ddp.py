"""Fused optimizers in scripts that use DistributedDataParallel, Join, DCP and from_torch()."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import harness
from checks import optim, optim_ddp
from checks.optim import Run

pytestmark = pytest.mark.fused_only

MODES = ("manual", "ddp", "overlap")
UNDER_DDP = ("ddp", "overlap")
# Networks amplify rounding; a large eps keeps Adam from dividing by it.
RUNS = {
    "SGD": Run("SGD", steps=5),
    "AdamW": Run("AdamW", steps=5, options={"eps": 1e-3}),
}
DDP: dict[str, dict[str, Any]] = {
    "default": {},
    "static_graph": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
    "view": {"gradient_as_bucket_view": True},
    "static_graph view": {"static_graph": True, "gradient_as_bucket_view": True},
}


@pytest.fixture(params=["SGD", "AdamW"])
def run(request: pytest.FixtureRequest) -> Run:
    return RUNS[request.param]


def in_mode(run: Run, mode: str) -> Run:
    return dataclasses.replace(run, mode=mode)


@pytest.mark.parametrize("options", DDP)
@pytest.mark.parametrize("mode", UNDER_DDP)
def test_networks(workers: harness.Workers, mode: str, options: str) -> None:
    for run in RUNS.values():
        workers.agree(optim_ddp.trains, "net", in_mode(run, mode), DDP[options])


@pytest.mark.parametrize("options", DDP)
@pytest.mark.parametrize("kind", ["channels_last", "tied"])
@pytest.mark.parametrize("mode", UNDER_DDP)
def test_other_networks(
    pair: harness.Workers, run: Run, mode: str, kind: str, options: str
) -> None:
    pair.agree(optim_ddp.trains, kind, in_mode(run, mode), DDP[options])


@pytest.mark.parametrize("kind", ["net", "channels_last", "tied"])
def test_networks_by_hand(pair: harness.Workers, run: Run, kind: str) -> None:
    pair.agree(optim_ddp.trains, kind, run, {})


@pytest.mark.parametrize("view", [False, True], ids=["", "view"])
@pytest.mark.parametrize("static", [False, True], ids=["", "static"])
@pytest.mark.parametrize("mode", UNDER_DDP)
def test_state_survives_new_buckets(
    trio: harness.Workers, mode: str, static: bool, view: bool
) -> None:
    options = {"static_graph": static, "gradient_as_bucket_view": view}
    run = Run(mode=mode, ddp=options)
    trio.agree(optim_ddp.rebuild, run)


@pytest.mark.parametrize("view", [False, True], ids=["", "view"])
@pytest.mark.parametrize("static", [False, True], ids=["", "static"])
@pytest.mark.parametrize("mode", UNDER_DDP)
def test_unused_parameters(workers: harness.Workers, mode: str, static: bool, view: bool) -> None:
    # A static graph is one graph for all ranks: "used by some" needs find_unused_parameters.
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
    if static and workers.world_size > 1:
        pytest.skip("ranks differ in what they use")
    run = Run("AdamW", mode, steps=6, ddp={**options, "static_graph": static})
    workers.agree(optim.unused, run)


@pytest.mark.parametrize("mode", UNDER_DDP)
def test_two_optimizers(trio: harness.Workers, mode: str) -> None:
    trio.agree(optim_ddp.two_optimizers, mode)


@pytest.mark.parametrize("view", [False, True], ids=["", "view"])
def test_parameters_without_an_optimizer(trio: harness.Workers, view: bool) -> None:
    trio.agree(optim_ddp.without_optimizer, view)


@pytest.mark.parametrize("share", [False, True], ids=["", "share"])
@pytest.mark.parametrize("mode", UNDER_DDP)
def test_attach_later(trio: harness.Workers, run: Run, mode: str, share: bool) -> None:
    run = dataclasses.replace(run, mode=mode, ours={"share_parameters": share})
    trio.agree(optim_ddp.attach_later, run)


@pytest.mark.parametrize("mode", UNDER_DDP)
def test_retained_graph(pair: harness.Workers, mode: str) -> None:
    pair.run(optim_ddp.retained_graph, mode)


@pytest.mark.parametrize("alone", [False, True], ids=["all", "rank 0"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "LAMB"])
def test_state_dict_of_a_fresh_optimizer(
    pair: harness.Workers, name: str, mode: str, alone: bool
) -> None:
    pair.agree(optim_ddp.checkpoint_of_fresh, Run(name, mode), alone)


@pytest.mark.parametrize("zero_last", [False, True], ids=["zero first", "zero last"])
@pytest.mark.parametrize("mode", MODES)
def test_join(trio: harness.Workers, run: Run, mode: str, zero_last: bool) -> None:
    trio.agree(optim_ddp.joined, in_mode(run, mode), zero_last, True)


@pytest.mark.parametrize("mode", UNDER_DDP)
def test_join_divides_by_those_who_have_data(trio: harness.Workers, run: Run, mode: str) -> None:
    trio.agree(optim_ddp.joined, in_mode(run, mode), True, False)


@pytest.mark.parametrize("uneven", [False, True], ids=["", "join"])
@pytest.mark.parametrize("mode", MODES)
def test_local_batch_sizes(trio: harness.Workers, run: Run, mode: str, uneven: bool) -> None:
    trio.agree(optim_ddp.weighted, in_mode(run, mode), uneven)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_fuse(trio: harness.Workers, name: str, mode: str) -> None:
    trio.agree(optim_ddp.continues, Run(name, mode))


def test_fuse_refuses(pair: harness.Workers) -> None:
    pair.run(optim_ddp.fuse_refuses)
