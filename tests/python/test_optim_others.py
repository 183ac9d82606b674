"""Modules of which a part belongs to an optimizer of torch: sparse and complex parameters."""

from __future__ import annotations

import pytest

import harness
from checks import optim_others

pytestmark = pytest.mark.fused_only


@pytest.mark.parametrize("view", [False, True], ids=["", "view"])
@pytest.mark.parametrize("mode", ["plain", "ddp", "overlap", "hook"])
@pytest.mark.parametrize("kind", optim_others.KINDS)
def test_parameters_of_torch(pair: harness.Workers, kind: str, mode: str, view: bool) -> None:
    digests = pair.run(optim_others.trains, kind, mode, view)
    assert len(set(digests)) == 1, "ranks hold different parameters"
