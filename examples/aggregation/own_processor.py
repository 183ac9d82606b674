"""Exercise 4 of SwitchML's tutorial: a pre- and postprocessor of one's own.

    python examples/aggregation/own_processor.py

It sends fixed-point numbers: floats times 2^16, as 32-bit integers. That is simpler than SwitchML's
shared exponents, and right only while sums stay below 2^15.
"""

from __future__ import annotations

import torch

from fusedpg import aggregation
from fusedpg.aggregation import Message

SCALE = 2.0**16


class FixedPoint(aggregation.PrePostProcessor):
    @property
    def batches(self) -> int:
        step = self.config.batch_packets * self.config.packet_numel
        return -(-self.part.numel // step)

    def _range(self, batch: int) -> slice:
        step = self.config.batch_packets * self.config.packet_numel
        return slice(batch * step, (batch + 1) * step)

    def preprocess(self, batch: int) -> Message:
        values = self.part.input[self._range(batch)]
        return Message(values.double().mul_(SCALE).round_().to(torch.int32))

    def postprocess(self, batch: int, message: Message) -> None:
        assert message.entries is not None
        self.part.output[self._range(batch)].copy_(message.entries.double().div_(SCALE))


aggregation.register_prepostprocessor("fixed_point", FixedPoint)

config = aggregation.Config(backend="dummy", num_workers=4, prepostprocessor="fixed_point")
with aggregation.Context(config) as context:
    tensor = torch.randn(100_000)
    total = context.all_reduce(tensor, torch.empty_like(tensor))
    largest = (total - 4 * tensor).abs().max().item()
    print(f"The sum of {context.num_workers} workers is off by at most {largest:.2g}.")
    assert largest <= context.num_workers * 0.5 / SCALE + 1e-6
