"""fusedpg: a torch.distributed backend with fused collectives.

Importing this package registers the backend "fused" for CPU and CUDA devices, as soon as
torch is imported::

    import torch.distributed as dist
    import fusedpg

    dist.init_process_group("fused")

Torch is not imported by this, and the compiled extension is loaded by the first use, so
importing stays cheap and cannot fail.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fusedpg._registration import load_extension as _load_extension
from fusedpg._registration import register_with_torch as _register_with_torch

if TYPE_CHECKING:
    from fusedpg import aggregation as aggregation
    from fusedpg import aggregator as aggregator
    from fusedpg import compress as compress
    from fusedpg import ddp as ddp
    from fusedpg import functional as functional
    from fusedpg import fusion as fusion
    from fusedpg import hvd as hvd
    from fusedpg import launch as launch
    from fusedpg import optim as optim
    from fusedpg import plan as plan
    from fusedpg import tensor_parallel as tensor_parallel
    from fusedpg._C import Options as Options
    from fusedpg._C import ProcessGroupFused as ProcessGroupFused
    from fusedpg._malloc import keep_freed_memory as keep_freed_memory
    from fusedpg._metrics import openmetrics as openmetrics
    from fusedpg._serve_gloo import serve_gloo as serve_gloo
    from fusedpg.functional import all_reduce_ as all_reduce_
    from fusedpg.functional import empty as empty
    from fusedpg.functional import fused_adam_ as fused_adam_
    from fusedpg.functional import fused_adamw_ as fused_adamw_
    from fusedpg.functional import fused_lamb_ as fused_lamb_
    from fusedpg.functional import fused_sgd_ as fused_sgd_
    from fusedpg.functional import group_info as group_info
    from fusedpg.functional import in_arena as in_arena
    from fusedpg.functional import quantized_all_reduce as quantized_all_reduce
    from fusedpg.functional import shard_range as shard_range
    from fusedpg.functional import sparse_all_reduce as sparse_all_reduce
    from fusedpg.functional import stats as stats
    from fusedpg.fusion.api import fuse as fuse
    from fusedpg.tensor_parallel import ColumnParallelLinear as ColumnParallelLinear
    from fusedpg.tensor_parallel import RowParallelLinear as RowParallelLinear

__version__ = "0.2.0"

# Public names by the module that has them, which their first use imports; "": modules.
_EXPORTS = {
    "": "aggregation aggregator compress ddp functional fusion hvd launch optim plan "
    "tensor_parallel",
    "_C": "Options ProcessGroupFused",
    "_malloc": "keep_freed_memory",
    "_metrics": "openmetrics",
    "_serve_gloo": "serve_gloo",
    "functional": "all_reduce_ empty fused_adam_ fused_adamw_ fused_lamb_ fused_sgd_ group_info "
    "in_arena quantized_all_reduce shard_range sparse_all_reduce stats",
    "fusion.api": "fuse",
    "tensor_parallel": "ColumnParallelLinear RowParallelLinear",
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)

_MODULE_OF |= {"ray": "", "torchft": ""}  # not for `import *`: they need other packages


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'fusedpg' has no attribute {name!r}")
    if module == "":
        return importlib.import_module(f"fusedpg.{name}")
    if module == "_C":  # it lies beside the torch that it was built for
        _load_extension()
    value = globals()[name] = getattr(importlib.import_module(f"fusedpg.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})


def _autoload() -> None:
    """Entry point of torch's plugin autoload: importing this module was enough.

    Anything raised here would break ``import torch`` for everybody.
    """


_register_with_torch()
