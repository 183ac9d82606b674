"""What a group leaves to torch's ProcessGroupNCCL. What that does is tested in tests/gpu."""

from __future__ import annotations

import types
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

import fusedpg
import harness
from checks import delegate
from fusedpg import _registration

pytestmark = pytest.mark.fused_only


def test_timeout_set_later() -> None:
    with harness.Workers(2) as workers:
        assert max(workers.run(delegate.timeout_set_later)) < 20


def test_group_of_some_ranks_of_a_bound_group() -> None:
    harness.pool(3).run(delegate.group_of_some_ranks)


def test_methods_of_nccl() -> None:
    with harness.Workers(2) as workers:
        workers.run(delegate.methods_of_nccl)


def test_options_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        is_high_priority_stream = False
        config = "torch's"

    class ProcessGroupNCCL:
        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            self.options = options

        def _set_sequence_number_for_group(self) -> None:
            pass

    ProcessGroupNCCL.Options = Options  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    mine = types.SimpleNamespace(is_high_priority_stream=True, config="mine")
    for given, expected in ((None, (False, "torch's")), (mine, (True, "mine"))):
        options = types.SimpleNamespace(
            _timeout=timedelta(seconds=7),
            group_name="7",
            global_ranks_in_group=[2, 3],
            nccl_options=given,
        )
        made = _registration._make_delegate("cuda", None, 0, 2, options).options
        assert (made.is_high_priority_stream, made.config) == expected
        assert made is not given
        assert made._timeout == timedelta(seconds=7)
        assert (made.group_name, made.global_ranks_in_group) == ("7", [2, 3])


def test_options_of_another_backend() -> None:
    others: Any = fusedpg.Options()
    with pytest.raises(ValueError, match=r"nccl_options must be ProcessGroupNCCL\.Options"):
        fusedpg.Options(nccl_options=others)
