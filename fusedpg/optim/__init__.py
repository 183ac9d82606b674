"""Optimizers whose step is one collective and whose state is split between the ranks.

    optimizer = fusedpg.optim.AdamW(model.parameters(), lr=1e-3, ddp=ddp)

in place of ``torch.optim.AdamW(model.parameters(), lr=1e-3)`` is all that changes in a script that
trains with DistributedDataParallel on the backend "fused". See docs/guides/optimizers.md.
"""

from typing import TYPE_CHECKING

from fusedpg._deprecated import old_names
from fusedpg.optim._base import FusedOptimizer
from fusedpg.optim._from_torch import from_torch
from fusedpg.optim._slices import SliceTensor, merge_state_dicts
from fusedpg.optim.adam import Adam, AdamW
from fusedpg.optim.lamb import LAMB
from fusedpg.optim.sgd import SGD

if TYPE_CHECKING:
    fuse = from_torch
else:
    __getattr__ = old_names(__name__, {"fuse": "from_torch"})

__all__ = [
    "LAMB",
    "SGD",
    "Adam",
    "AdamW",
    "FusedOptimizer",
    "SliceTensor",
    "from_torch",
    "fuse",
    "merge_state_dicts",
]
