"""Processors turn slices into messages: their elements, or integers with exponents."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable

import torch

from fusedpg.aggregation._config import Config, named
from fusedpg.aggregation._jobs import JobSlice
from fusedpg.compress import _kernels as kernels


@dataclasses.dataclass
class Message:
    """A batch of packets on its way.

    Attributes:
        entries: what is added up over all workers, or None. The backend puts the sum in its place.
        extra: int32, of which the largest over all workers is taken, or None.
    """

    entries: torch.Tensor | None
    extra: torch.Tensor | None = None


class PrePostProcessor(abc.ABC):
    """Makes messages of one slice, and the slice's output of their sums.

    Batches go out in the order of their numbers. ``preprocess`` of batch k + 1 is called after
    ``postprocess`` of batch k, so a batch may carry what the next one needs.

    Args:
        part: whose ``input`` is read and ``output`` written.
        config: of the context.
        num_workers: how many workers add up.
    """

    def __init__(self, part: JobSlice, config: Config, num_workers: int) -> None:
        self.part = part
        self.config = config
        self.num_workers = num_workers

    @property
    @abc.abstractmethod
    def batches(self) -> int:
        """The number of batches of packets that the slice makes; the same on all workers."""

    @abc.abstractmethod
    def preprocess(self, batch: int) -> Message:
        """The message of batch number ``batch``."""

    @abc.abstractmethod
    def postprocess(self, batch: int, message: Message) -> None:
        """``message`` is that of ``preprocess``, with sums and maxima instead of its own values."""


class Bypass(PrePostProcessor):
    """The tensor's own elements, in one batch and in place."""

    @property
    def batches(self) -> int:
        return 1 if self.part.numel else 0

    def preprocess(self, batch: int) -> Message:
        if self.part.input.data_ptr() != self.part.output.data_ptr():
            self.part.output.copy_(self.part.input)
        return Message(self.part.output)

    def postprocess(self, batch: int, message: Message) -> None:
        if message.entries is not None and message.entries is not self.part.output:
            self.part.output.copy_(message.entries)


class ExponentQuantizer(PrePostProcessor):
    """Floats as 32-bit integers that share an exponent a packet, as SwitchML sends them.

    The results are those of :func:`fusedpg.quantized_all_reduce` with packets as blocks. A packet's
    exponent travels one batch ahead. int32 tensors travel as they are. Other types: TypeError.
    """

    def __init__(self, part: JobSlice, config: Config, num_workers: int) -> None:
        super().__init__(part, config, num_workers)
        if part.input.dtype not in (torch.float32, torch.int32):
            raise TypeError(
                f"cpu_exponent_quantizer takes float32 and int32, found {part.input.dtype}"
            )
        self._floats = part.input.dtype == torch.float32
        self._step = config.batch_packets * config.packet_numel
        self._exponents = torch.empty(0, dtype=torch.int32)  # of the batch that is under way

    @property
    def _data_batches(self) -> int:
        return -(-self.part.numel // self._step)

    @property
    def batches(self) -> int:
        extra = self._floats and self.part.numel > 0  # exponents alone
        return self._data_batches + extra

    def _range(self, data_batch: int) -> slice:
        return slice(data_batch * self._step, min((data_batch + 1) * self._step, self.part.numel))

    def preprocess(self, batch: int) -> Message:
        if not self._floats:
            return Message(self.part.input[self._range(batch)].clone())
        packet = self.config.packet_numel
        entries = extra = None
        if batch > 0:
            values = self.part.input[self._range(batch - 1)]
            entries = kernels.block_quantise(values, self._exponents, packet, self.num_workers)
        if batch < self._data_batches:
            extra = kernels.block_exponents(self.part.input[self._range(batch)], packet)
        return Message(entries, extra)

    def postprocess(self, batch: int, message: Message) -> None:
        if not self._floats:
            assert message.entries is not None
            self.part.output[self._range(batch)].copy_(message.entries)
            return
        if message.entries is not None:
            kernels.block_dequantise_(
                self.part.output[self._range(batch - 1)], message.entries, self._exponents,
                self.config.packet_numel, self.num_workers,
            )  # fmt: skip
        if message.extra is not None:
            self._exponents = message.extra


Make = Callable[[JobSlice, Config, int], PrePostProcessor]
_by_name: dict[str, Make] = {"bypass": Bypass, "cpu_exponent_quantizer": ExponentQuantizer}


def register_prepostprocessor(name: str, make: Make) -> None:
    """Makes ``Config(prepostprocessor=name)`` call ``make`` for each slice; a name that is there
    already is replaced."""
    _by_name[name] = make


def prepostprocessor(config: Config) -> Make:
    return named("prepostprocessor", _by_name, config.prepostprocessor)
