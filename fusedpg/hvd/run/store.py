"""A store of torch's that the launcher serves, and whose port is known before torch is imported.

Importing torch takes seconds, which workers need as well. So the launcher listens, starts its
workers, and imports torch while they do; a job that is over before needs no torch in the launcher.
"""

from __future__ import annotations

import datetime
import socket
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["SERVE_AFTER_SECONDS", "Store"]

# A worker has to import torch before it can ask for a key, which takes no less than that.
SERVE_AFTER_SECONDS = 1.0
# The same as torch's own store has, for as many workers as may connect before it serves.
BACKLOG = 2048


class Store:
    """A ``TCPStore`` at a free port of this machine.

    Args:
        address: the address of this machine that workers use.
        timeout_seconds: how long a request may wait for its key.
    """

    def __init__(self, address: str, timeout_seconds: float = 300) -> None:
        self._address = address
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        dualstack = socket.has_dualstack_ipv6()
        self._listener = socket.create_server(
            ("", 0),
            family=socket.AF_INET6 if dualstack else socket.AF_INET,
            backlog=BACKLOG,
            dualstack_ipv6=dualstack,
        )
        self.port: int = self._listener.getsockname()[1]
        self._values: dict[str, str] = {}  # what was set before it serves
        self._served: dist.TCPStore | None = None
        self._serve_at = time.monotonic() + SERVE_AFTER_SECONDS
        if "torch" in sys.modules:
            self._serve()

    def serve_when_due(self) -> bool:
        """Imports torch and answers workers, if they may be asking by now; whether it answers."""
        if self._served is None and time.monotonic() >= self._serve_at:
            self._serve()
        return self._served is not None

    def _serve(self) -> None:
        import torch.distributed as dist

        self._served = dist.TCPStore(
            self._address,
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=self._timeout,
            master_listen_fd=self._listener.detach(),
        )
        for key, value in self._values.items():
            self._served.set(key, value)

    def set(self, key: str, value: str) -> None:
        if self._served is None:
            self._values[key] = value
        else:
            self._served.set(key, value)

    def has(self, key: str) -> bool:
        return key in self._values if self._served is None else self._served.check([key])
