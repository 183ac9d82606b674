"""From an optimizer of torch to ours."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import StateDict

from fusedpg.optim._base import FusedOptimizer
from fusedpg.optim.adam import AdamW

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def from_torch(
    optimizer: torch.optim.Optimizer,
    ddp: DistributedDataParallel | None = None,
    **options: Any,
) -> FusedOptimizer:
    """The fused optimizer that continues where an optimizer of torch stands.

    The new optimizer takes over state (each rank keeps its slices) and *shares* the parameter
    groups, so learning-rate schedulers made for the old one keep working, and its hooks. The old
    optimizer's state is left as it is; drop it to free that, and do not call its ``step()``.

    Args:
        optimizer: ``torch.optim.SGD``, ``Adam`` or ``AdamW``, with equal state on all ranks.
        ddp: the module whose gradients it takes; without, manual mode.
        options: keyword arguments of ours, such as ``overlap`` or ``max_grad_norm``.

    Raises:
        TypeError: for another class of optimizer.
    """
    known = FusedOptimizer._of_torch
    ours = known.get(type(optimizer))
    if ours is None:
        names = ", ".join(f"torch.optim.{cls.__name__}" for cls in known)
        raise TypeError(f"from_torch() takes {names}; got {type(optimizer).__name__}")
    groups = [dict(group) for group in optimizer.param_groups]
    defaults = {
        key: value
        for key, value in optimizer.defaults.items()
        if not (ours is AdamW and key == "decoupled_weight_decay")
    }
    fused = ours(groups, ddp=ddp, **defaults, **options)
    if optimizer.state:
        fused.load_state_dict(optimizer.state_dict())
    fused.param_groups = optimizer.param_groups
    for name in _HOOKS:
        getattr(fused, name).update(getattr(optimizer, name))
    optimizer.register_load_state_dict_pre_hook(_refuse_loading)
    return fused


def _refuse_loading(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> None:
    # It would make new groups, and schedulers would no longer reach the fused optimizer.
    raise RuntimeError(
        "this optimizer was fused: load into what fusedpg.optim.from_torch() returned"
    )
