"""Steps that are not compressed, and shares of elements that shrink by epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusedpg.compress import _numbers


class WarmUp:
    """When a state compresses, and how much of a gradient it sends.

    Args:
        compressor: has a ``compress_ratio`` where there are ``ratios``.
        steps: the first steps, which are not compressed.
        every: nor is each step whose number (from 1) is a multiple of this. 0: all others are.
        ratios: ``compress_ratio`` in epoch 0, 1, ...; behind them the compressor's own.
    """

    def __init__(self, compressor: Any, steps: int, every: int, ratios: Sequence[float]) -> None:
        self.steps = _numbers.whole("uncompressed_steps", steps, at_least=0)
        self.every = _numbers.whole("uncompressed_every", every, at_least=0)
        self.ratios = tuple(
            _numbers.real("warmup_ratios", ratio, above=0, at_most=1) for ratio in ratios
        )
        self.epoch = 0
        self._compressor = compressor
        self.ratio: float | None = None  # the compressor's own
        if self.ratios:
            if not hasattr(compressor, "compress_ratio"):
                raise ValueError(
                    f"warmup_ratios with {type(compressor).__name__}, which has no compress_ratio"
                )
            self.begin(compressor.compress_ratio, 0)

    def begin(self, ratio: float, epoch: int) -> None:
        """With the compressor's own ratio."""
        self.ratio = ratio
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = _numbers.whole("epoch", epoch, at_least=0)
        if self.ratio is not None:
            warm = self.epoch < len(self.ratios)
            self._compressor.compress_ratio = self.ratios[self.epoch] if warm else self.ratio

    def plain(self, step: int) -> bool:
        """Whether a step, counted from 1, is not compressed."""
        return step <= self.steps or (self.every > 0 and step % self.every == 0)

    def options(self) -> dict[str, Any]:
        """Arguments of a state."""
        return {
            "uncompressed_steps": self.steps,
            "uncompressed_every": self.every,
            "warmup_ratios": self.ratios,
        }
