"""How frameworks save an optimizer, so that a save needs no line of their users.

The whole state takes a collective. Accelerate asks all ranks for it and writes what rank 0 gets;
transformers' Trainer asks rank 0 alone, from a method that runs on all ranks.
"""

from __future__ import annotations

import functools
import sys
from types import FrameType
from typing import Any


def asked_by_accelerate() -> str | None:
    """True if ``Accelerator.save_state`` asks for a state dict, which it does on all ranks.

    Returns:
        None, or who needs the whole state: "whole" (all ranks), or "whole on rank 0".
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (
            frame.f_globals.get("__name__") == "accelerate.checkpointing"
            and frame.f_code.co_name == "save_accelerator_state"
        ):
            # If nodes share no file system, one rank of each of them writes.
            each_node = frame.f_locals.get("save_on_each_node", True)
            return "whole" if each_node else "whole on rank 0"
        frame = frame.f_back
    return None


_SAVE = "_save_optimizer_and_scheduler"


def consolidate_in_trainer(kind: type) -> None:
    """Has transformers' ``Trainer``, if it is loaded, gather the state before it saves.

    Args:
        kind: the class of optimizers that this is done for; others are saved as before.
    """
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    save = getattr(trainer, _SAVE, None)
    if save is None or hasattr(save, "fusedpg"):
        return

    @functools.wraps(save)
    def consolidate_and_save(self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = self.optimizer
        while not isinstance(optimizer, kind) and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer  # Accelerate's wrapper
        if isinstance(optimizer, kind):
            each_node = getattr(self.args, "save_on_each_node", True)
            optimizer.consolidate_state_dict(None if each_node else 0)  # type: ignore[attr-defined]
        return save(self, *args, **kwargs)

    consolidate_and_save.fusedpg = True  # type: ignore[attr-defined]
    setattr(trainer, _SAVE, consolidate_and_save)
