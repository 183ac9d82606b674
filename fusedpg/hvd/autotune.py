"""Search for the fusion threshold and cycle time that move the most bytes per second.

Horovod's method and log format: start points, then Bayesian optimisation (a Gaussian process and
expected improvement). The Gaussian process is scikit-learn's.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import warnings
from pathlib import Path

import numpy as np

__all__ = ["Tuner"]

MIB = 1 << 20
# Horovod's search space (fusion threshold in MiB, cycle time in ms) and its start points.
BOUNDS = np.array([[0.0, 64.0], [1.0, 100.0]])
START_POINTS = ((4.0, 5.0), (32.0, 50.0), (16.0, 25.0), (8.0, 10.0))
# A point's score is the median of this many samples, as in Horovod.
SAMPLES_PER_POINT = 5
# How much better than the best score a point must promise to be, in standard deviations.
EXPLORATION = 0.01
# Random points of which the one of the highest expected improvement is tried next: a point in the
# middle of the search space has another one within some 2% of the space's width.
CANDIDATES = 2000
LOG_HEADER = (
    "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,"
    "cycle_time_ms,tensor_fusion_threshold,score"
)


def check_autotuning() -> None:
    """Raises ``ImportError`` where scikit-learn is missing."""
    if importlib.util.find_spec("sklearn") is None:
        raise ImportError(
            "autotuning needs scikit-learn: pip install scikit-learn, or switch it off "
            "(HOROVOD_AUTOTUNE=0)"
        )


class _Search:
    """Proposes the next point of a maximisation within bounds."""

    def __init__(self, bounds: np.ndarray, noise: float, seed: int) -> None:
        self._bounds, self._noise = bounds, noise
        self._random = np.random.default_rng(seed)
        self._points: list[np.ndarray] = []  # in the unit cube
        self._scores: list[float] = []

    def add(self, point: np.ndarray, score: float) -> None:
        low, high = self._bounds.T
        self._points.append((point - low) / (high - low))
        self._scores.append(score)

    def next(self) -> np.ndarray:
        """The point of the highest expected improvement."""
        import sklearn.gaussian_process as learn
        from scipy import stats

        scores = np.array(self._scores)
        scale = scores.std() or 1.0
        standard = (scores - scores.mean()) / scale
        process = learn.GaussianProcessRegressor(
            kernel=learn.kernels.ConstantKernel(1.0, (0.1, 10.0))
            * learn.kernels.RBF(0.3, (0.05, 3.0)),
            # Scores are standardised, so the noise is a share of their standard deviation.
            alpha=max(self._noise**2, 1e-6),
            random_state=int(self._random.integers(1 << 31)),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a kernel's parameter at its bound
            process.fit(np.array(self._points), standard)
        # With noise the best observed score may be luck: compare with the best prediction.
        best = float(process.predict(np.array(self._points)).max())

        candidates = self._random.random((CANDIDATES, len(self._bounds)))
        mean, deviation = process.predict(candidates, return_std=True)
        deviation = np.maximum(deviation, 1e-9)
        gain = mean - best - EXPLORATION
        z = gain / deviation
        improvement = gain * stats.norm.cdf(z) + deviation * stats.norm.pdf(z)
        low, high = self._bounds.T
        return low + candidates[np.argmax(improvement)] * (high - low)


class Tuner:
    """Tries fusion thresholds (0 to 64 MiB) and cycle times (1 to 100 ms), then keeps the best.

    Args:
        warmup_samples: points whose scores are dropped before the search begins.
        steps_per_sample: cycles that carried bytes in one sample. A point's score is the median
            of five samples.
        max_samples: points to try.
        noise: of scores, in units of their standard deviation, from 0 to 1.
        log: file for one line a point. The last line has the best point.
        fusion_threshold: bytes; keeps the threshold and searches only the cycle time.
        cycle_time: seconds; keeps the cycle time and searches only the threshold.
        seed: of the search.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        warmup_samples: int = 3,
        steps_per_sample: int = 10,
        max_samples: int = 20,
        noise: float = 0.8,
        log: str | Path | None = None,
        *,
        fusion_threshold: int | None = None,
        cycle_time: float | None = None,
        seed: int = 0,
    ) -> None:
        if warmup_samples < 0 or steps_per_sample < 1 or max_samples < 1:
            raise ValueError("warmup_samples must be >= 0, the other counts >= 1")
        if not 0 <= noise <= 1:
            raise ValueError(f"noise must be from 0 to 1, not {noise}")
        check_autotuning()
        fixed = (
            None if fusion_threshold is None else fusion_threshold / MIB,
            None if cycle_time is None else cycle_time * 1e3,
        )
        self._fixed = fixed
        self._free = [place for place, value in enumerate(fixed) if value is None]
        self._warmups_left = warmup_samples
        self._steps_per_sample, self._max_samples = steps_per_sample, max_samples
        self._search = _Search(BOUNDS[self._free], noise, seed)
        self._log = None if log is None else Path(log)
        if self._log is not None:
            self._log.write_text(LOG_HEADER + "\n")
        self._tried = 0
        self._point = np.array(START_POINTS[0])[self._free]
        self._best, self._best_score = self._point, -math.inf
        self._begun = False
        self._finished = not self._free
        self._start_sample()
        self._scores: list[float] = []

    @property
    def finished(self) -> bool:
        """True if the search is over; `record` returns None from then on."""
        return self._finished

    @property
    def best(self) -> tuple[int, float]:
        """The best threshold (bytes) and cycle time (seconds) so far."""
        return self._setting(self._best)

    def record(self, nbytes: int, seconds: float) -> tuple[int, float] | None:
        """Takes note of one cycle of the engine.

        Args:
            nbytes: bytes that the cycle reduced or moved.
            seconds: time since the end of the cycle before.

        Returns:
            The fusion threshold (bytes) and cycle time (seconds) to use from now on; None: as
            they are.
        """
        if self._finished:
            return None
        if not self._begun:  # this cycle ran with the engine's settings, not with the first point's
            self._begun = True
            return self._setting(self._point)
        self._bytes += nbytes
        self._seconds += seconds
        self._steps += nbytes > 0
        if self._steps < self._steps_per_sample:
            return None
        self._scores.append(self._bytes / max(self._seconds * 1e6, 1e-9))
        self._start_sample()
        if len(self._scores) < SAMPLES_PER_POINT:
            return None
        score = statistics.median(self._scores)
        self._scores = []
        return self._score_point(score)

    def _start_sample(self) -> None:
        self._bytes, self._seconds, self._steps = 0, 0.0, 0

    def _score_point(self, score: float) -> tuple[int, float] | None:
        if self._warmups_left:
            self._warmups_left -= 1
            return None
        self._write(self._point, score)
        if score > self._best_score:
            self._best, self._best_score = self._point, score
        self._search.add(self._point, score)
        self._tried += 1
        if self._tried == self._max_samples:
            self._finished = True
            self._write(self._best, self._best_score)
            return self.best
        if self._tried < len(START_POINTS):
            self._point = np.array(START_POINTS[self._tried])[self._free]
        else:
            self._point = self._search.next()
        return self._setting(self._point)

    def _values(self, point: np.ndarray) -> tuple[float, float]:
        free = iter(point)
        megabytes, milliseconds = (
            float(next(free)) if value is None else value for value in self._fixed
        )
        return megabytes, milliseconds

    def _setting(self, point: np.ndarray) -> tuple[int, float]:
        megabytes, milliseconds = self._values(point)
        return int(megabytes * MIB), milliseconds / 1e3

    def _write(self, point: np.ndarray, score: float) -> None:
        if self._log is not None:
            megabytes, milliseconds = self._values(point)
            # No hierarchical or torus all-reduce to choose; requests are always cached.
            with self._log.open("a") as file:
                file.write(f"0,0,0,1,{milliseconds:.6g},{megabytes:.6g},{score:.6g}\n")
