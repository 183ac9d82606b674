"""torch.fx's tracer, for processes whose other threads call modules meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import fx, nn


class Tracer(fx.Tracer):
    """Passes on the calls of other threads: fx replaces ``nn.Module.__call__`` for all of them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._thread = threading.get_ident()

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)
