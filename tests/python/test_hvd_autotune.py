"""fusedpg.hvd.autotune: the search finds good settings of known functions, and logs it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fusedpg.hvd.autotune import BOUNDS, LOG_HEADER, SAMPLES_PER_POINT, START_POINTS, Tuner
from test_hvd_run import launch

MIB = 1 << 20
Throughput = Callable[[float, float], float]  # of MiB and ms, in bytes per microsecond


def peak(megabytes: float, milliseconds: float) -> float:
    return 900 * math.exp(-(((megabytes - 44) / 30) ** 2) - ((milliseconds - 12) / 40) ** 2)


def corner(megabytes: float, milliseconds: float) -> float:
    """The largest threshold and the shortest cycle are the best."""
    return 100 + 3 * megabytes + 2 * (100 - milliseconds)


def flat(megabytes: float, milliseconds: float) -> float:
    return 50.0


def tune(function: Throughput, *, jitter: float = 0.0, seed: int = 0, **options: object) -> Tuner:
    """Runs a tuner to its end, as an engine would whose cycles have this throughput."""
    random = np.random.default_rng(seed)
    tuner = Tuner(seed=seed, **options)  # type: ignore[arg-type]
    megabytes, milliseconds = 128.0, 1.0
    for _ in range(100_000):
        if tuner.finished:
            return tuner
        seconds = milliseconds / 1e3
        rate = function(megabytes, milliseconds) * (1 + jitter * random.standard_normal())
        new = tuner.record(int(rate * seconds * 1e6), seconds)
        if new is not None:
            megabytes, milliseconds = new[0] / MIB, new[1] * 1e3
    raise AssertionError("the search did not end")


def best_of(function: Throughput) -> float:
    return max(
        function(megabytes, milliseconds)
        for megabytes in np.linspace(*BOUNDS[0], 65)
        for milliseconds in np.linspace(*BOUNDS[1], 100)
    )


@pytest.mark.parametrize("noise", [0.8, 0.1])
@pytest.mark.parametrize("jitter", [0.0, 0.05])
@pytest.mark.parametrize("function", [peak, corner])
def test_finds_a_good_setting(function: Throughput, jitter: float, noise: float) -> None:
    """Within 5% of the best at the median of three seeds."""
    found = []
    for seed in range(3):
        threshold, cycle = tune(function, jitter=jitter, seed=seed, noise=noise).best
        found.append(function(threshold / MIB, cycle * 1e3) / best_of(function))
    assert sorted(found)[1] > 0.95, found
    starts = max(function(*point) for point in START_POINTS) / best_of(function)
    assert min(found) > starts - 0.05, (found, starts)


def test_a_flat_function_ends() -> None:
    threshold, cycle = tune(flat).best
    assert 0 <= threshold <= 64 * MIB
    assert 1e-3 <= cycle <= 0.1


def test_the_same_seed_gives_the_same_search(tmp_path: Path) -> None:
    logs = [tmp_path / name for name in ("a", "b")]
    for log in logs:
        tune(peak, log=log, seed=3)
    assert logs[0].read_text() == logs[1].read_text()


@pytest.mark.parametrize(
    ("fixed", "kept"),
    [({"fusion_threshold": 7 * MIB}, (7 * MIB, None)), ({"cycle_time": 0.012}, (None, 0.012))],
)
def test_what_is_fixed_stays(fixed: dict[str, float], kept: tuple[float | None, ...]) -> None:
    tuner = Tuner(0, 1, 8, **fixed)  # type: ignore[arg-type]
    seen = []
    while not tuner.finished:
        new = tuner.record(1000, 0.01)
        seen += [] if new is None else [new]
    assert len(seen) == 9  # the first point, six others, the best
    for setting in seen:
        for value, fixed_value in zip(setting, kept):
            assert fixed_value is None or value == pytest.approx(fixed_value)
    moved = {setting[0 if kept[0] is None else 1] for setting in seen}
    assert len(moved) > 3


def test_both_fixed_leaves_nothing_to_search() -> None:
    tuner = Tuner(fusion_threshold=MIB, cycle_time=0.001)
    assert tuner.finished
    assert tuner.record(10, 0.1) is None
    assert tuner.best == (MIB, 0.001)


def test_the_log_has_horovods_format(tmp_path: Path) -> None:
    log = tmp_path / "autotune.csv"
    tuner = tune(peak, log=log, max_samples=6, warmup_samples=2, steps_per_sample=3)
    header, *lines = log.read_text().splitlines()
    assert header == LOG_HEADER
    rows = [[float(value) for value in line.split(",")] for line in lines]
    assert len(rows) == 7
    assert [(row[5], row[4]) for row in rows[:4]] == [tuple(point) for point in START_POINTS]
    for row in rows:
        assert row[:4] == [0, 0, 0, 1]
        assert row[6] == pytest.approx(peak(row[5], row[4]), rel=1e-2)
    assert rows[-1][6] == max(row[6] for row in rows)
    assert (rows[-1][5] * MIB, rows[-1][4] / 1e3) == pytest.approx(tuner.best, rel=1e-4)


def test_samples_count_cycles_with_bytes_and_the_time_of_all() -> None:
    """Idle cycles lengthen a sample: they lower its score and do not fill it."""
    tuner = Tuner(0, 2, 1)
    assert tuner.record(1, 1.0) == (4 * MIB, 0.005)  # the first point
    for _ in range(SAMPLES_PER_POINT):
        assert not tuner.finished
        for nbytes in (100, 0, 0, 100):
            tuner.record(nbytes, 1e-6)
    assert tuner.finished
    assert tuner._best_score == pytest.approx(50)


def test_warm_up_is_not_counted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    tuner = Tuner(2, 1, 1, log=log)
    tuner.record(1, 1.0)
    for nbytes in [7] * (2 * SAMPLES_PER_POINT) + [11] * SAMPLES_PER_POINT:
        assert not tuner.finished
        tuner.record(nbytes, 1e-6)
    assert tuner.finished
    assert [line.split(",")[-1] for line in log.read_text().splitlines()[1:]] == ["11", "11"]


@pytest.mark.parametrize(
    "wrong", [{"noise": 1.5}, {"max_samples": 0}, {"steps_per_sample": 0}, {"warmup_samples": -1}]
)
def test_wrong_arguments_raise(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Tuner(**wrong)  # type: ignore[arg-type]


def test_without_scikit_learn_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match="pip install scikit-learn"):
        Tuner()


@pytest.mark.long
def test_an_engine_is_tuned(tmp_path: Path) -> None:
    """By the launcher's flags: the log ends with the best point, which all ranks then use."""
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, fusedpg.hvd as hvd\n"
        "from fusedpg.hvd._basics import engine\n"
        "hvd.init()\n"
        "done = False\n"
        "while not done:\n"
        "    hvd.allreduce(torch.ones(1000), name='x')\n"
        "    tuner = engine().tuner\n"
        "    done = hvd.broadcast_object(tuner is not None and tuner.finished)\n"
        "hvd.barrier()\n"
        "print(engine().fusion_threshold, engine().cycle_time)\n"
    )
    log = tmp_path / "log"
    flags = "--autotune --autotune-warmup-samples 0 --autotune-steps-per-sample 1"
    code, out, err = launch(
        *("-np", "2", *flags.split(), "--autotune-bayes-opt-max-samples", "5"),
        *("--autotune-log-file", str(log), sys.executable, str(program)),
    )
    assert code == 0, err
    rows = [
        [float(value) for value in line.split(",")] for line in log.read_text().splitlines()[1:]
    ]
    assert len(rows) == 6
    printed = [line.partition(">:")[2].split() for line in out.splitlines()]
    for threshold, cycle in printed:
        assert float(threshold) == pytest.approx(rows[-1][5] * MIB, rel=1e-4, abs=1)
        assert float(cycle) * 1e3 == pytest.approx(rows[-1][4], rel=1e-4)
    assert len(printed) == 2
