"""Horovod's API for torch on ``torch.distributed``.

::

    import fusedpg.hvd as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

See docs/guides/horovod.md.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from fusedpg.hvd.run import run

if TYPE_CHECKING:
    from fusedpg.hvd._api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    # `from fusedpg.hvd import _membership` asks here first, and the launcher has no torch.
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fusedpg.hvd import _api

    public = {key: value for key, value in vars(_api).items() if not key.startswith("_")}
    if name == "__all__":
        return sorted([*public, "install", "run"])
    # The import of _api has made modules such as `elastic` attributes of this one.
    value = public.get(name, globals().get(name))
    if value is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})


def install() -> None:
    """Serves ``import horovod.torch`` by this package, in this process.

    ``python -m fusedpg.hvd SCRIPT`` and ``fusedpg-run --serve-horovod`` do so before a program.

    Raises:
        RuntimeError: Horovod itself was imported.
    """
    import types

    from fusedpg.hvd import (
        compression,
        elastic,
        exceptions,
        functions,
        optimizer,
        sync_batch_norm,
    )

    here = sys.modules[__name__]
    known = sys.modules.get("horovod.torch", here)
    if known is not here:
        raise RuntimeError("hvd: horovod.torch was imported already; call install() before")
    horovod = types.ModuleType("horovod", "Horovod's names, served by fusedpg.hvd")
    horovod.torch, horovod.run = here, run  # type: ignore[attr-defined]
    horovod.runner = types.ModuleType("horovod.runner")  # type: ignore[attr-defined]
    horovod.runner.run = run
    horovod.common = types.ModuleType("horovod.common")  # type: ignore[attr-defined]
    horovod.common.exceptions = exceptions
    sys.modules |= {
        "horovod": horovod,
        "horovod.common": horovod.common,
        "horovod.common.exceptions": exceptions,
        "horovod.runner": horovod.runner,
        "horovod.torch": here,
        "horovod.torch.compression": compression,
        "horovod.torch.elastic": elastic,
        "horovod.torch.functions": functions,
        "horovod.torch.mpi_ops": here,
        "horovod.torch.optimizer": optimizer,
        "horovod.torch.sync_batch_norm": sync_batch_norm,
    }
