"""fusedpg: a torch.distributed backend with fused collectives.

Importing this package registers the backend "fused" for CPU and CUDA devices::

    import torch.distributed as dist
    import fusedpg

    dist.init_process_group("fused")

The compiled extension is loaded by the first use, so importing stays cheap and
cannot fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusedpg._registration import register as _register

if TYPE_CHECKING:
    from fusedpg import compress as compress
    from fusedpg import ddp as ddp
    from fusedpg import fusion as fusion
    from fusedpg import hvd as hvd
    from fusedpg import launch as launch
    from fusedpg import optim as optim
    from fusedpg import tensor_parallel as tensor_parallel
    from fusedpg._C import Options as Options
    from fusedpg._C import ProcessGroupFused as ProcessGroupFused
    from fusedpg._malloc import keep_freed_memory as keep_freed_memory
    from fusedpg._metrics import openmetrics as openmetrics
    from fusedpg._serve_gloo import serve_gloo as serve_gloo
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

__all__ = [
    "ColumnParallelLinear",
    "Options",
    "ProcessGroupFused",
    "RowParallelLinear",
    "compress",
    "ddp",
    "empty",
    "fuse",
    "fused_adam_",
    "fused_adamw_",
    "fused_lamb_",
    "fused_sgd_",
    "fusion",
    "group_info",
    "hvd",
    "in_arena",
    "keep_freed_memory",
    "launch",
    "openmetrics",
    "optim",
    "quantized_all_reduce",
    "serve_gloo",
    "shard_range",
    "sparse_all_reduce",
    "stats",
    "tensor_parallel",
]

_MODULES = frozenset({"compress", "ddp", "fusion", "hvd", "launch", "optim", "tensor_parallel"})
_LAYERS = frozenset({"ColumnParallelLinear", "RowParallelLinear"})
_FUNCTIONS = frozenset(__all__) - _MODULES - _LAYERS
_FUNCTIONS -= {"Options", "ProcessGroupFused", "fuse"}
_FUNCTIONS -= {"keep_freed_memory", "openmetrics", "serve_gloo"}


def __getattr__(name: str) -> Any:
    if name in ("Options", "ProcessGroupFused"):
        from fusedpg._registration import load_extension

        return getattr(load_extension(), name)
    if name in _MODULES:
        import importlib

        return importlib.import_module(f"fusedpg.{name}")
    if name == "keep_freed_memory":
        from fusedpg._malloc import keep_freed_memory

        return keep_freed_memory
    if name == "openmetrics":
        from fusedpg._metrics import openmetrics

        return openmetrics
    if name == "serve_gloo":
        from fusedpg._serve_gloo import serve_gloo

        return serve_gloo
    if name == "fuse":
        from fusedpg.fusion.api import fuse

        return fuse
    if name in _LAYERS:
        from fusedpg import tensor_parallel

        return getattr(tensor_parallel, name)
    if name in _FUNCTIONS:
        from fusedpg import functional

        return getattr(functional, name)
    raise AttributeError(f"module 'fusedpg' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _autoload() -> None:
    """Entry point of torch's plugin autoload: importing this module was enough.

    Anything raised here would break ``import torch`` for everybody.
    """


_register()
