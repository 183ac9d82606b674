"""Registers the backend with torch.distributed, and loads the extension."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch._C._distributed_c10d import Backend

    from fusedpg._C import ProcessGroupFused

BACKEND = "fused"
DEVICES = ["cpu", "cuda"]

_extension: ModuleType | None = None
_logger = logging.getLogger("fusedpg")


def minor_release(text: str) -> tuple[int, ...]:
    """(2, 14) of "2.14.1+cu130"."""
    return tuple(int(part) for part in text.split(".")[:2])


def _folder(version: str) -> str:
    return "pt{}_{}".format(*minor_release(version))


def built_for() -> list[str]:
    """The minor releases of torch that the installed package has an extension for, in order."""
    found = Path(__file__).parent.glob("pt*_*/_C*.so")
    names = {path.parent.name.removeprefix("pt").replace("_", ".") for path in found}
    return sorted(names, key=minor_release)


def _hidden_installation() -> str:
    """Advice where this package, in the current folder, hides one that pip has installed."""
    here = Path(__file__).resolve().parent.parent
    others = [path for path in sys.path if Path(path).resolve() != here]
    found = importlib.machinery.PathFinder.find_spec("fusedpg", others)
    if found is None or found.origin is None:
        return ""
    return f" Or leave {here}, which hides the fusedpg in {Path(found.origin).parent.parent}."


def not_built() -> ImportError:
    """The error of a checkout without its compiled modules."""
    return ImportError(
        "fusedpg's extension is not built. In a checkout run "
        f"`pip install --no-build-isolation -e .`.{_hidden_installation()}"
    )


def check_torch_version(running: str) -> str:
    """The folder of the extension for this torch.

    c10d's C++ classes change between minor releases, so an extension built for one release may
    load under another and crash later.

    Raises:
        ImportError: there is no extension, or none for this torch.
    """
    built = built_for()
    if not built:
        raise not_built()
    folder = _folder(running)
    if folder not in map(_folder, built):
        raise ImportError(
            f"fusedpg was built for torch {', '.join(built)}, but torch {running} is "
            "installed. "
            "Build it for this torch, in a checkout of fusedpg: "
            "pip install -r requirements/build.txt && pip install --no-build-isolation ."
        )
    return str(Path(__file__).parent / folder)


def load_extension() -> ModuleType:
    """The compiled module ``fusedpg._C``, loaded once."""
    global _extension
    if _extension is None:
        import torch
        import torch.distributed  # registers the classes that _C derives from

        folder = check_torch_version(str(torch.__version__))
        package = sys.modules["fusedpg"].__path__
        if folder not in package:
            package.append(folder)
        module = importlib.import_module("fusedpg._C")
        module._set_delegate_factory(_make_delegate)
        module._set_announcer(_announce)
        atexit.register(_end_at_exit)
        _extension = module
        from fusedpg import _flight_recorder

        _flight_recorder.install()
    return _extension


def loaded_extension() -> ModuleType | None:
    """The same, or None where nothing has needed it yet."""
    return _extension


def _announce(name: str, info: dict[str, object], asked: bool) -> None:
    """Called on rank 0 of each new group: one line in the log.

    Args:
        asked: FUSEDPG_LOG asks for it, also where the program has not set up logging.
    """
    if asked and not _logger.isEnabledFor(logging.INFO):
        _logger.setLevel(logging.INFO)
    if not _logger.isEnabledFor(logging.INFO):
        return
    if asked and not _logger.hasHandlers():
        _logger.addHandler(logging.StreamHandler())
    where = "in shared memory"
    if info["engine"] != "shm":
        address = f" (at {info['address']})" if "address" in info else ""
        where = (
            f"on several hosts by {info['engine']}, {info['local_world_size']} of them with "
            f"rank 0{address}"
        )
    _logger.info(
        "[fusedpg] group%s of backend %s: %d ranks %s; %d thread(s) a rank, %s kernels",
        *(f' "{name}"' if name else "", info["backend"], info["world_size"], where),
        *(info["threads"], info["isa"]),
    )


def _end_at_exit() -> None:
    """Shuts down the groups that are still alive and tells their other ranks how this one ended."""
    text = "its interpreter exited without destroy_process_group"
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is not None:
        with contextlib.suppress(Exception):
            reason = str(error).partition("\n")[0][:250]
            text += f", after {type(error).__name__}: {reason}"
    if _extension is not None:
        _extension._end_at_exit(text)


def _make_delegate(device: str, store: dist.Store, rank: int, size: int, options: Any) -> Backend:
    """The backend that does what the native engines do not.

    Args:
        options: the group's, a ``fusedpg.Options``.
    """
    import torch

    group: Any
    if device == "cpu":
        from fusedpg._serve_gloo import Gloo

        group = Gloo(store, rank, size, timeout=options._timeout)
    else:
        try:
            from torch.distributed import ProcessGroupNCCL
        except ImportError as error:
            raise RuntimeError(
                "fused: collectives of CUDA tensors need a torch built with NCCL"
            ) from error
        given = options.nccl_options
        chosen = ProcessGroupNCCL.Options()
        if given is not None:  # the caller's own, which he may give to other groups, too
            chosen.is_high_priority_stream = given.is_high_priority_stream
            chosen.config = given.config
        chosen._timeout = options._timeout
        # By these torch's watchdog and flight recorder call the group and its ranks.
        chosen.group_name = options.group_name
        chosen.global_ranks_in_group = options.global_ranks_in_group
        group = ProcessGroupNCCL(store, rank, size, chosen)
    if minor_release(str(torch.__version__)) < (2, 14):  # later ones begin at 0, and warn of it
        group._set_sequence_number_for_group()
    return group


def create(dist_options: Any, pg_options: object = None) -> ProcessGroupFused:
    """Creator function of the backend, as ``Backend.register_backend`` wants it.

    Args:
        dist_options: c10d's ``_DistributedBackendOptions``.
        pg_options: a ``fusedpg.Options``, or None. ``ProcessGroupNCCL.Options`` are for what
            NCCL does for the group; other backends' options do not count.
    """
    module = load_extension()
    from torch.distributed.constants import default_pg_timeout

    options = pg_options if isinstance(pg_options, module.Options) else None
    nccl = pg_options if getattr(pg_options, "backend", None) == "nccl" else None
    chosen = module.Options(nccl_options=nccl) if options is None else options.__copy__()
    timeout = dist_options.timeout
    timeout = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    # torch passes its default where the caller gave no timeout: then the options' one counts.
    if options is None or timeout != default_pg_timeout:
        chosen._timeout = timeout
    chosen.group_name = dist_options.group_id
    chosen.global_ranks_in_group = list(dist_options.global_ranks_in_group)
    # DDP takes its buckets from the group's memory only with this set; torch's default is off.
    os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
    return module.ProcessGroupFused(
        dist_options.store, dist_options.group_rank, dist_options.group_size, chosen, _world(module)
    )


def _world(module: ModuleType) -> ProcessGroupFused | None:
    """The default group's backend, if it is ours: ranks of one host know each other from there."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return None
    backend = None
    with contextlib.suppress(RuntimeError):  # it has none for the CPU
        group: Any = dist.group.WORLD
        backend = group._get_backend(torch.device("cpu"))
    return backend if isinstance(backend, module.ProcessGroupFused) else None


def _explain_torchcomms() -> None:
    """With TORCH_DISTRIBUTED_USE_TORCHCOMMS torch asks torchcomms for every backend by its name."""
    from torch.distributed import distributed_c10d as c10d

    original = getattr(c10d, "new_comm", None)
    if original is None or hasattr(original, "fusedpg"):
        return  # there is no torchcomms

    def new_comm(*args: object, **kwargs: object) -> object:
        if args[:1] == (BACKEND,):
            raise RuntimeError(
                "fused: TORCH_DISTRIBUTED_USE_TORCHCOMMS sends every group to torchcomms, which "
                'has no backend "fused": unset it (or dist_config.use_torchcomms) in this job'
            )
        return original(*args, **kwargs)

    new_comm.fusedpg = True  # type: ignore[attr-defined]
    c10d.new_comm = new_comm


def register() -> None:
    """Registers the backend; never raises, because torch's autoload may be the caller.

    A torch that the extension was not built for is warned about here and raises at first use.
    """
    try:
        import torch
        import torch.distributed as dist

        if built_for():
            check_torch_version(str(torch.__version__))
    except Exception as error:
        warnings.warn(str(error), stacklevel=2)
    try:
        if dist.is_available() and BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=DEVICES)
        if dist.is_available():
            _explain_torchcomms()
        if dist.is_available() and dist.is_gloo_available():
            from fusedpg._serve_gloo import serve_where_asked

            serve_where_asked()
    except Exception as error:
        warnings.warn(f"fusedpg could not register its backend: {error}", stacklevel=2)


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Registers the backend at the end of the import of torch."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader  # of this import alone
            execute = loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                loader.exec_module = execute
                execute(module)
                with contextlib.suppress(ValueError):
                    sys.meta_path.remove(self)
                register()

            loader.exec_module = execute_and_register
        return spec


def register_with_torch() -> None:
    """Registers the backend now if torch is there, else as soon as the program imports it.

    A launcher imports this package, but needs no torch, whose import takes seconds. torch's own
    autoload is not enough: it can be switched off, and a checkout on PYTHONPATH has none.
    """
    if "torch" in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _AfterTorch())
