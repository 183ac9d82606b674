"""What compressed gradients send between hosts, by the counters of their interfaces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import harness
import hosts

pytestmark = [
    pytest.mark.fused_only,
    pytest.mark.skipif(hosts.why_not() is not None, reason=f"no hosts: {hosts.why_not()}"),
]

SCRIPT = str(Path(__file__).resolve().parent / "scripts/compress_hosts.py")
NUMEL = 1_000_000  # of scripts/compress_hosts.py
KEPT = NUMEL // 100
# Of payloads large enough that the engine's all_reduce does not send them from every rank to every
# other one, to save a message.
ALLREDUCE = {"communicator": "allreduce"}
# By method what a host's payload has of bytes, by its definition.
METHODS: dict[str, tuple[dict[str, Any], float]] = {
    "DDP": ({}, 4 * NUMEL),
    "none": ({"compressor": "none"}, 4 * NUMEL),
    "fp16": ({"compressor": "fp16", **ALLREDUCE}, 2 * NUMEL),
    "top-k": ({"compressor": "topk", "compress_ratio": 0.01}, (4 + 4) * KEPT),
    "top-k, ps": (
        # Half of a payload, and half of the answer; and how many each half has.
        {"compressor": "topk", "compress_ratio": 0.01, "communicator": "ps"}, (4 + 4) * KEPT
    ),
    "random-k": ({"compressor": "randomk", "compress_ratio": 0.1, **ALLREDUCE}, 4 * 10 * KEPT),
    "sign": ({"compressor": "signsgd"}, NUMEL / 8),
    "EF sign": ({"compressor": "efsignsgd"}, NUMEL / 8 + 4),
    "1-bit": ({"compressor": "onebit"}, NUMEL / 8 + 8),
    "TernGrad": ({"compressor": "terngrad"}, NUMEL / 4 + 4),
    "QSGD": ({"compressor": "qsgd", "bucket_size": 100}, NUMEL + 4 * NUMEL / 100),
    "natural": ({"compressor": "natural"}, NUMEL),
    "PowerSGD": (
        {"compressor": "powersgd", "memory": "powersgd", "compress_rank": 50, **ALLREDUCE},
        4 * 50 * (1000 + 1000),
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("ranks", [harness.slow(1), 2])
def test_bytes_on_the_wire(ranks: int) -> None:
    """The packed payload crosses each host's link once, however many ranks the host has."""
    params = json.dumps({name: given for name, (given, _) in METHODS.items()})
    with hosts.Hosts(2) as made:
        outputs = made.run([SCRIPT, params], ranks=ranks, timeout=280)
    for output in outputs:
        found = json.loads(output.splitlines()[-1])
        for name, (_, payload) in METHODS.items():
            if name == "fp16" and ranks > 1:
                # The engine's sums of a host's ranks are float32; results are float16 again.
                payload *= 1.5
            # Headers and acknowledgements come on top, of a few small messages, too.
            assert 0.99 * payload < found[name] < 1.08 * payload + 8000, (name, found)
