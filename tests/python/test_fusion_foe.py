"""Random sequences against fused functions: the tuner, parallel layers, messages of pipelines.

Everything is compared with plain torch in one process. A failure names its seed, which
`SEED=` runs again, alone.
"""

from __future__ import annotations

import os

import pytest

import harness
from checks import mesh_foe, pipeline_foe, places_foe, rows_foe, tensor_parallel_foe, tuner_foe

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(600)]
MORE = 30


def seeds(*few: int) -> list[object]:
    """Those of the normal run, then many slow ones."""
    if "SEED" in os.environ:
        return [int(os.environ["SEED"])]
    return [*few, *(harness.slow(seed) for seed in range(1000, 1000 + MORE))]


@pytest.mark.parametrize("seed", seeds(2, 4))
def test_tuner(seed: int) -> None:
    harness.pool(3).run(tuner_foe.life, seed, timeout=300)


@pytest.mark.parametrize("world_size", [2, harness.slow(3)])
@pytest.mark.parametrize("seed", seeds(0, 6, 14, 19))
def test_parallel_layers(world_size: int, seed: int) -> None:
    harness.pool(world_size).run(tensor_parallel_foe.train, seed, timeout=300)


def test_other_numbers_of_threads() -> None:
    harness.pool(2).run(tensor_parallel_foe.threads)


def test_overlap_falls_back() -> None:
    harness.pool(2).run(tensor_parallel_foe.overlap_falls_back)


def test_doubles_under_autocast() -> None:
    harness.pool(2).run(tensor_parallel_foe.doubles_under_autocast)


def test_layers_beside_ddp() -> None:
    harness.pool(4).run(mesh_foe.train)


def test_layers_under_torch_compile() -> None:
    """They break the graph, and run as they do outside."""
    harness.pool(2).run(tensor_parallel_foe.under_compile)


@pytest.mark.parametrize("seed", seeds(1, 4, 5))
def test_messages(seed: int) -> None:
    harness.pool(4).run(pipeline_foe.run, seed, timeout=300)


@pytest.mark.parametrize("hosts", ["two of two", "crossed", harness.slow("three and one")])
@pytest.mark.parametrize("seed", seeds(2))
def test_messages_between_hosts(hosts: str, seed: int) -> None:
    harness.pool_of_hosts(hosts).run(pipeline_foe.run, seed, timeout=300)


def test_one_of_several_messages_differs() -> None:
    harness.pool(4).run(pipeline_foe.recovers)


def test_waits_in_another_order() -> None:
    harness.pool(3).run(pipeline_foe.reversed_waits)


@pytest.mark.parametrize("world_size", [2, *map(harness.slow, (1, 3))])
@pytest.mark.parametrize("seed", seeds(3000))
def test_places_of_tensors(world_size: int, seed: int) -> None:
    harness.pool(world_size).run(places_foe.run, seed, timeout=300)


@pytest.mark.parametrize("world_size", [1, 2])
def test_kinds_of_tensors(world_size: int) -> None:
    harness.pool(world_size).run(places_foe.kinds)


@pytest.mark.parametrize("seed", seeds(119))
def test_functions_of_rows(seed: int) -> None:
    harness.pool(1).run(rows_foe.run, seed, timeout=300)
