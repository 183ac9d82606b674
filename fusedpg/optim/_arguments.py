"""What the optimizers' constructors have in common."""

from __future__ import annotations

from typing import Any

_OURS = (
    "params",
    "ddp",
    "process_group",
    "overlap",
    "max_grad_norm",
    "master_dtype",
    "reduce",
    "share_parameters",
    "comm_hook",
)


def split(arguments: dict[str, Any], **fixed: Any) -> dict[str, Any]:
    """A constructor's ``locals()`` as arguments of ``FusedOptimizer``: what is not that class's own
    is, with ``fixed``, the defaults of groups."""
    ours = {name: arguments[name] for name in _OURS}
    other = {"self", "__class__", *_OURS}  # __class__: of super()
    defaults = {name: value for name, value in arguments.items() if name not in other}
    return ours | {"defaults": defaults | fixed}
