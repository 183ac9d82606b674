"""Commands of benchmarks/ up to where ranks would start: none of them is wrong about the runner.

What a rank then measures is compared with known results by the benchmark itself, before it times.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from typing import Any

import pytest

from harness import ROOT


class Started(Exception):
    pass


@pytest.mark.parametrize(
    "command",
    [
        "aggregators --densities 10",
        "async_op",
        "between_hosts",
        "collectives --ops all_reduce --tensor arena",
        "compress --rates 1gbit",
        "compress_accuracy",
        "compress_kernels",
        "data_parallel",
        "ddp --optimizer sgd",
        "fused_step",
        "fused_step --hosts 2 --rate 1gbit --densities 1,.1",
        "hvd",
        "latency",
        "llm",
        "many_hosts --world-size 64",
        "model_parallel",
        "model_parallel --parts hosts",
        "new_group",
        "optimizers --models small",
        "optimizers --parts memory",
        "pipeline_parallel",
        "scaling",
        "schedules",
        "serve_gloo steps",
        "sparse --tensor both",
        "sparse --hosts 2",
    ],
)
def test_commands_reach_the_ranks(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "FUSEDPG_THREADS", "FUSEDPG_SPIN_US"):
        monkeypatch.setenv(name, "1")  # goes with the test, whatever a benchmark makes of it
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    runner = importlib.import_module("_harness")

    def start(job: Any, *where: Any) -> None:
        other = pickle.loads(pickle.dumps(job))
        assert other.measure is job.measure
        assert len(other.cases) == len(other.titles) > 0
        hosts = "hosts" in command or command.startswith(
            ("aggregators", "compress -", "pipeline", "scaling")
        )
        assert isinstance(where[0], runner.Hosts) == (hosts and "many_hosts" not in command)
        raise Started

    monkeypatch.setattr(runner, "_run_here", start)
    monkeypatch.setattr(importlib.import_module("_hosts"), "launch", start)
    monkeypatch.setattr(importlib.import_module("_mpi"), "why_not", lambda: "not here")
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(Started):
        importlib.import_module(command.split()[0]).main()


def test_a_name_that_is_none_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    parser = importlib.import_module("_harness").Parser("", rounds=1)
    parser.names("--models", ("mlp", "cnn"))
    assert parser.parse_args([]).models == ["mlp", "cnn"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--models", "mlp,other"])
    assert "other: choose from mlp, cnn" in capsys.readouterr().err
