"""Ctrl-C and other signals that have handlers in Python, while a rank waits for others."""

from __future__ import annotations

import itertools

import pytest

import harness
from checks import signals

pytestmark = [pytest.mark.fused_only, pytest.mark.timeout(120)]

HOSTS = {"one host": None, "two hosts": [{"FUSEDPG_HOST_ID": "a"}, {"FUSEDPG_HOST_ID": "b"}]}
numbers = itertools.count()


def pool(layout: str) -> harness.Workers:
    return harness.pool(2, init=False, oracle=False, env=HOSTS[layout])


@pytest.mark.parametrize("layout", HOSTS)
@pytest.mark.parametrize("what", signals.OPERATIONS)
@pytest.mark.parametrize("raises", [True, False], ids=["raises", "returns"])
def test_handler_runs_in_a_wait(what: str, layout: str, raises: bool) -> None:
    name = f"signal{next(numbers)}"
    (late, within, error, after), other = pool(layout).run(signals.blocked, what, raises, name)
    assert late < signals.LATE
    if raises:
        assert error.startswith("KeyboardInterrupt"), error
        if after is not None:
            assert "interrupted by KeyboardInterrupt" in after, after
        if what not in ("destroy", "monitored_barrier"):
            assert "interrupted by KeyboardInterrupt" in other, other
        assert other or what == "destroy", "the other rank must not go on alone"
    else:
        assert within, "it ran after the operation only"
        assert not error, error
        assert not other, other


@pytest.mark.parametrize("how", ["collective", "destroy", "abort"])
def test_handler_uses_the_group(how: str) -> None:
    here, other = pool("one host").run(signals.within, how, f"signal{next(numbers)}")
    in_handler, operation = here
    if how == "collective":
        assert "a signal handler waits for a group" in in_handler
        assert not operation
        assert other == [""]
    else:
        assert not in_handler
        assert "on rank 0" in operation
        assert "on rank 0" in other[0]
