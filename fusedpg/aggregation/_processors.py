"""What of a slice travels: its elements, or integers with exponents."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable

import torch

from fusedpg.aggregation._config import Config
from fusedpg.aggregation._jobs import JobSlice


@dataclasses.dataclass
class Message:
    """A batch of packets on its way.

    Attributes:
        entries: what is added up over all workers, or None. The backend puts the sum in its place.
        extra: int8, of which the largest over all workers is taken, or None.
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
        """How many batches of packets the slice makes; the same on all workers."""

    @abc.abstractmethod
    def preprocess(self, batch: int) -> Message:
        """What batch number ``batch`` sends."""

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


# int32's largest value, which the sum of all workers must stay within.
_LARGEST = 2**31 - 1
# Exponents from -126 (all denormal numbers have it, too) to 128 travel as int8, less this.
_SHIFT = 2
# A packet in which some worker has an infinity or a NaN: larger than any exponent.
_NOT_FINITE = 127


class ExponentQuantizer(PrePostProcessor):
    """Floats as 32-bit integers that share an exponent a packet, as SwitchML sends them.

    A packet's exponent is the smallest e with max |x| <= 2^e over all workers. It travels one batch
    ahead. With n workers an element travels as round(x * s), where s is the largest power of two
    with n * 2^e * s <= 2^31 - 1, so no sum overflows; a result is the sum / s. Each is off by at
    most n/2 / s, and the rounding to float32. Integer sums are the same in any order.

    int32 tensors travel as they are. Other types: TypeError.

    Unlike SwitchML, s is a power of two, so that values which fit are exact. A packet in which some
    worker has an infinity or a NaN gives NaN in all of its elements; one of zeros gives zeros.
    """

    def __init__(self, part: JobSlice, config: Config, num_workers: int) -> None:
        super().__init__(part, config, num_workers)
        if part.input.dtype not in (torch.float32, torch.int32):
            raise TypeError(
                f"cpu_exponent_quantizer takes float32 and int32, found {part.input.dtype}"
            )
        self._floats = part.input.dtype == torch.float32
        self._step = config.batch_packets * config.packet_numel
        self._exponents = torch.empty(0, dtype=torch.int8)
        # The largest k with num_workers * 2^k <= 2^31 - 1.
        self._bits = (_LARGEST // num_workers).bit_length() - 1

    @property
    def _data_batches(self) -> int:
        return -(-self.part.numel // self._step)

    @property
    def batches(self) -> int:
        extra = self._floats and self.part.numel > 0  # exponents alone
        return self._data_batches + extra

    def _range(self, data_batch: int) -> slice:
        return slice(data_batch * self._step, min((data_batch + 1) * self._step, self.part.numel))

    def _packets(self, values: torch.Tensor) -> torch.Tensor:
        """One row a packet; the last one filled up with zeros."""
        numel = self.config.packet_numel
        rows = -(-values.numel() // numel)
        if rows * numel != values.numel():
            values = torch.nn.functional.pad(values, (0, rows * numel - values.numel()))
        return values.view(rows, numel)

    def _exponents_of(self, data_batch: int) -> torch.Tensor:
        packets = self._packets(self.part.input[self._range(data_batch)])
        largest = packets.abs().amax(1)  # NaN where there is one
        mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent
        exponent = exponent - (mantissa == 0.5).to(exponent.dtype)  # a power of two itself
        exponent = exponent.masked_fill(largest == 0, -126).clamp(-126, 128) - _SHIFT
        return exponent.masked_fill(~largest.isfinite(), _NOT_FINITE).to(torch.int8)

    def _scales(self) -> torch.Tensor:
        """s of each packet of the batch that is under way, in double."""
        powers = self._bits - (self._exponents.to(torch.int64) + _SHIFT)
        # By its bits, because torch.ldexp and exp2 are not exact.
        return ((powers + 1023) << 52).view(torch.float64).view(-1, 1)

    def preprocess(self, batch: int) -> Message:
        if not self._floats:
            return Message(self.part.input[self._range(batch)].clone())
        entries = None
        if batch > 0:
            packets = self._packets(self.part.input[self._range(batch - 1)]).double()
            bad = (self._exponents == _NOT_FINITE).view(-1, 1)
            entries = (packets * self._scales()).masked_fill_(bad, 0).round_().to(torch.int32)
        extra = self._exponents_of(batch) if batch < self._data_batches else None
        return Message(entries, extra)

    def postprocess(self, batch: int, message: Message) -> None:
        if not self._floats:
            assert message.entries is not None
            self.part.output[self._range(batch)].copy_(message.entries)
            return
        if message.entries is not None:
            sums = message.entries.double() / self._scales()
            bad = (self._exponents == _NOT_FINITE).view(-1, 1)
            output = self.part.output[self._range(batch - 1)]
            output.copy_(sums.masked_fill_(bad, math.nan).view(-1)[: output.numel()])
        if message.extra is not None:
            self._exponents = message.extra


Make = Callable[[JobSlice, Config, int], PrePostProcessor]
_by_name: dict[str, Make] = {"bypass": Bypass, "cpu_exponent_quantizer": ExponentQuantizer}


def register_prepostprocessor(name: str, make: Make) -> None:
    """Makes ``Config(prepostprocessor=name)`` call ``make`` for each slice; a name that is there
    already is replaced."""
    _by_name[name] = make


def prepostprocessor(config: Config) -> Make:
    if config.prepostprocessor not in _by_name:
        raise ValueError(
            f"no prepostprocessor {config.prepostprocessor!r}; there are {sorted(_by_name)}"
        )
    return _by_name[config.prepostprocessor]
