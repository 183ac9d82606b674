"""All private parts of torch that the optimizers use.

Everything else that the bridge knows of DDP is public: its arguments (``find_unused_parameters``,
``static_graph``, ``gradient_as_bucket_view``), ``require_backward_grad_sync``, forward hooks,
``register_comm_hook`` and the ``GradBucket``.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils._foreach_utils
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from fusedpg._registration import minor_release

_log = logging.getLogger("fusedpg")

# Versions whose reducer is known to do what the bridge relies on when it takes gradients.
KNOWN = ((2, 11), (2, 15))


def check(ddp: DistributedDataParallel) -> None:
    """Raises RuntimeError for a torch, or a DDP, that the bridge cannot work with at all."""
    engine = torch.autograd.Variable._execution_engine
    for where, name in ((torch._C, "_current_graph_task_id"), (engine, "queue_callback")):
        if not hasattr(where, name):
            raise RuntimeError(
                f"torch {torch.__version__} has no {name}: fused optimizers need torch "
                f"{KNOWN[0][0]}.{KNOWN[0][1]} to {KNOWN[1][0]}.{KNOWN[1][1]} under DDP"
            )
    if getattr(ddp, "_use_python_reducer", False):
        raise RuntimeError(
            'fused optimizers do not work with torch._dynamo.config.optimize_ddp="python_reducer"'
        )


def keep_gradients(ddp: DistributedDataParallel) -> bool:
    """Has DDP leave alone ``p.grad`` when it has reduced a bucket.

    Returns:
        Whether it does. If not, DDP copies its bucket into ``p.grad`` at the end of backward, and
        gradients must not be taken before DDP has copied them.
    """
    if not KNOWN[0] <= minor_release(torch.__version__) <= KNOWN[1]:
        _log.warning("fused: torch %s is not known; gradients are copied", torch.__version__)
        return False
    tell = getattr(ddp.reducer, "_set_optimizer_in_backward", None)
    if tell is None:
        return False
    tell()
    return True


def can_remove_hook(ddp: DistributedDataParallel) -> bool:
    names = (
        "_build_params_for_reducer",
        "_build_debug_param_to_name_mapping",
        "_ddp_init_helper",
        "_comm_hooks",
    )
    reducer = ddp.reducer
    return (
        KNOWN[0] <= minor_release(torch.__version__) <= KNOWN[1]
        and hasattr(reducer, "_get_zeros_like_grad_buckets")
        and all(hasattr(ddp, name) for name in names)
        and getattr(ddp, "mixed_precision", None) is None
    )


def buckets(ddp: DistributedDataParallel) -> list[GradBucket]:
    """The buckets of its reducer, as GradBuckets of zeros."""
    found: list[GradBucket] = getattr(ddp.reducer, "_get_zeros_like_grad_buckets", list)()
    return found


def remove_hook(ddp: DistributedDataParallel, state: object) -> None:
    """Takes the communication hook with this state off: DDP gets a new reducer, as when it is
    unpickled, and ``p.grad`` from it again.

    For the beginning of a forward that arms the reducer, of all ranks: the new one does not know
    of earlier forwards whose backward is still to come.
    """
    old = ddp.reducer
    # The parameters that it reduces: those that were not frozen when DDP was made.
    reduced = {p for bucket in buckets(ddp) for p in bucket.parameters()}
    required = {p: p.requires_grad for p in ddp.module.parameters()}
    try:
        _require_gradients({p: p in reduced for p in required})
        params, sparse = ddp._build_params_for_reducer()
        mapping = ddp._build_debug_param_to_name_mapping(params)
        old._remove_autograd_hooks()
        ddp._ddp_init_helper(params, sparse, mapping, ddp.static_graph)
    finally:
        _require_gradients(required)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()  # type: ignore[union-attr]
        ddp._static_graph_delay_allreduce_enqueued = False
    ddp._has_rebuilt_buckets = False
    ddp._comm_hooks = [entry for entry in ddp._comm_hooks if entry[1] is not state]


def _require_gradients(required: dict[torch.nn.Parameter, bool]) -> None:
    for param, does in required.items():
        if param.requires_grad != does:
            param.requires_grad_(does)


# The (maybe nested) backward that this thread runs, as a number of its own.
graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: NO_TASK)
NO_TASK = -1


# What torch.compile leaves to Python, as torch marks its own optimizers: our functions that
# backward calls, and steps. torch.compiler.disable would import torch._dynamo at once.
uncompiled = torch._disable_dynamo


def in_backward() -> bool:
    """Whether autograd runs on this thread."""
    return graph_task() != NO_TASK


# Calls a function at the end of this (maybe nested) backward, unless that raises. What such a
# function queues is called behind all that are queued already.
at_the_end: Any = getattr(torch.autograd.Variable._execution_engine, "queue_callback", None)


def divides_by_active(ddp: DistributedDataParallel) -> bool:
    """Whether DDP was told to divide by the number of ranks that still have data."""
    told = getattr(ddp, "_divide_by_initial_world_size", None)
    if told is None and getattr(getattr(ddp, "_join_config", None), "enable", False):
        raise RuntimeError(
            f"torch {torch.__version__}: what DDP divides by under Join is not known"
        )
    return told is False


_CHECKPOINT = "torch.distributed.checkpoint"
# Functions of its state_dict.py that write into an optimizer: slices into slices.
_LOADS = ("_load_model_state_dict", "_load_optim_state_dict", "_init_optim_state")


def asked_by_checkpoint() -> str | None:
    """Whether torch.distributed.checkpoint asks for a state dict.

    It calls ``state_dict()`` as everybody does, but writes what all ranks give, and knows slices.

    Returns:
        None, or what it asks for: "slices", "whole" (all ranks ask), or "whole on rank 0".
    """
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if module == f"{_CHECKPOINT}.state_dict" and function not in _LOADS:
            info = frame.f_locals.get("info")
            full = getattr(info, "full_state_dict", None)
            offload = getattr(info, "cpu_offload", None)
            if not isinstance(full, bool) or not isinstance(offload, bool):
                # Slices in a state dict that is to be whole would be a silent part of it.
                raise RuntimeError(
                    f"torch {torch.__version__} asks a fused optimizer for its state in a way that "
                    f"is not known ({module}.{function}): checkpoint optimizer.local_state_dict(), "
                    "or full_state_dict()"
                )
            if full:
                return "whole on rank 0" if offload else "whole"
        if module.startswith(f"{_CHECKPOINT}."):
            return "slices"
    return None


def initialises_state() -> bool:
    """Whether the caller wants state of an optimizer by asking for a step without effect."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code.co_name == "_init_optim_state":
            return bool(frame.f_globals["__name__"].startswith("torch.distributed."))
    return False


def flags_of_scaler() -> list[torch.Tensor]:
    """Where the GradScaler that calls ``step()`` keeps whether it has found infinities: it hands
    over a copy. Empty if something else calls."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            state = frame.f_locals.get("optimizer_state")
            flags = state.get("found_inf_per_device") if isinstance(state, dict) else None
            if flags:
                return list(flags.values())
    return []


def takes_foreach(kind: type) -> None:
    """Has ``torch.nn.utils.clip_grad_norm_`` hand gradients of this type to foreach operations, as
    DTensor does. Without, it asks for one norm after the other."""
    types = getattr(torch.utils._foreach_utils, "_foreach_supported_types", None)
    if isinstance(types, list) and kind not in types:
        types.append(kind)


def clips_by_default() -> bool:
    """Whether ``torch.nn.utils.clip_grad_norm_`` asks, and chose itself to ask by foreach."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if frame.f_globals.get("__name__") == "torch.nn.utils.clip_grad":
            return "foreach" in frame.f_locals and frame.f_locals["foreach"] is None
    return False


def called_by_engine(dispatch: CodeType) -> bool:
    """Whether C++ of autograd or DDP has called ``__torch_dispatch__``, and not somebody's Python.

    Args:
        dispatch: code of that function, which is on the stack.
    """
    frame: Any = sys._getframe(1)
    while frame.f_code is not dispatch:
        frame = frame.f_back
    frame = _below_modes(frame.f_back)
    # Threads of autograd for devices have no Python below.
    return frame is None or frame.f_globals.get("__name__") in (
        "torch.autograd.graph",
        "torch.nn.parallel.distributed",
    )


def _below_modes(caller: FrameType | None) -> FrameType | None:
    """Who has called a function that modes (FlopCounterMode, DebugMode, a user's own) have handed
    on: each of them is Python between."""
    frame = caller
    while frame is not None:
        by_mode = frame.f_code.co_name == "__torch_dispatch__"
        if by_mode and isinstance(frame.f_locals.get("self"), TorchDispatchMode):
            caller = frame.f_back
            # torch disables its compiler for modes by wrappers.
            while caller is not None and caller.f_globals.get("__name__") in _DISABLES_COMPILER:
                caller = caller.f_back
        frame = frame.f_back
    return caller


_DISABLES_COMPILER = ("torch._compile", "torch._dynamo.eval_frame")
