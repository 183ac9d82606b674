"""Compressors by the names that GRACE (Xu et al. 2021) gave them."""

from __future__ import annotations

from fusedpg.compress._base import Compensated, Compressor, Context, Payload
from fusedpg.compress._dense import FP16, NoneCompressor
from fusedpg.compress._low_rank import PowerSGD
from fusedpg.compress._quantisers import QSGD, Natural, TernGrad
from fusedpg.compress._signs import EFSignSGD, OneBit, SignSGD, Signum
from fusedpg.compress._sparse import DGC, GuardedThreshold, RandomK, Threshold, TopK

__all__ = [
    "BY_NAME",
    "DGC",
    "FP16",
    "QSGD",
    "Compensated",
    "Compressor",
    "Context",
    "EFSignSGD",
    "GuardedThreshold",
    "Natural",
    "NoneCompressor",
    "OneBit",
    "Payload",
    "PowerSGD",
    "RandomK",
    "SignSGD",
    "Signum",
    "TernGrad",
    "Threshold",
    "TopK",
]

BY_NAME: dict[str, type[Compressor]] = {
    "none": NoneCompressor,
    "fp16": FP16,
    "topk": TopK,
    "randomk": RandomK,
    "threshold": Threshold,
    "guarded_threshold": GuardedThreshold,
    "dgc": DGC,
    "qsgd": QSGD,
    "terngrad": TernGrad,
    "signsgd": SignSGD,
    "signum": Signum,
    "efsignsgd": EFSignSGD,
    "onebit": OneBit,
    "natural": Natural,
    "powersgd": PowerSGD,
}
