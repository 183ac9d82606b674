"""Ordinary collectives on a GPU."""

from __future__ import annotations

import pytest

from gpu_checks import collectives
from ranks import Ranks

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("name", collectives.CHECKS)
def test_collective(ranks: Ranks, name: str) -> None:
    ranks.run(collectives.every_type, name)


def test_both_devices_on_one_group(ranks: Ranks) -> None:
    ranks.run(collectives.names)


@pytest.mark.real_gpu
def test_devices_mixed_in_one_call(pair: Ranks) -> None:
    pair.run(collectives.mixed_devices)


def test_subgroups(trio: Ranks) -> None:
    trio.run(collectives.subgroups)


def test_nccl_is_torchs(pair: Ranks) -> None:
    """Without FUSEDPG_NCCL_LIB the engine takes the library that torch has loaded."""
    found = pair.run(collectives.nccl_versions)
    assert all(ours == torchs for ours, torchs in found), found
