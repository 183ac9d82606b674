"""Elementwise programs around collectives: traced, checked, scheduled (docs/guides/fusion.md)."""

from typing import TYPE_CHECKING

from torch.distributed.tensor import Partial, Replicate, Shard

from fusedpg._deprecated import old_names
from fusedpg.fusion.api import FusedFunction, Pending, fuse
from fusedpg.fusion.errors import FusionError, IllegalProgram, IllegalTransformation
from fusedpg.fusion.functions import (
    all_gather,
    all_reduce,
    broadcast,
    dropout,
    recv,
    reduce_scatter,
    send,
)
from fusedpg.fusion.ir import Program
from fusedpg.fusion.local_rows import LocalRowReduction
from fusedpg.fusion.schedule import Schedule, schedules
from fusedpg.fusion.transformations import (
    AsShard,
    FuseCollective,
    FuseCompute,
    FuseSend,
    Overlap,
    Reorder,
    Split,
    Transformation,
)
from fusedpg.fusion.tune import Report, Timed

if TYPE_CHECKING:
    OwnRows = LocalRowReduction
else:
    __getattr__ = old_names(__name__, {"OwnRows": "LocalRowReduction"})

__all__ = [
    "AsShard",
    "FuseCollective",
    "FuseCompute",
    "FuseSend",
    "FusedFunction",
    "FusionError",
    "IllegalProgram",
    "IllegalTransformation",
    "LocalRowReduction",
    "Overlap",
    "OwnRows",
    "Partial",
    "Pending",
    "Program",
    "Reorder",
    "Replicate",
    "Report",
    "Schedule",
    "Shard",
    "Split",
    "Timed",
    "Transformation",
    "all_gather",
    "all_reduce",
    "broadcast",
    "dropout",
    "fuse",
    "recv",
    "reduce_scatter",
    "schedules",
    "send",
]
