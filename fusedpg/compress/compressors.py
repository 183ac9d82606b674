"""Compressors by the names that GRACE (Xu et al. 2021) gave them."""

from __future__ import annotations

from fusedpg.compress._base import BY_NAME, Compensated, Compressor, Context, Payload
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
