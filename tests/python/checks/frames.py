"""How many frames of the library's Python a call takes.

Frames of comprehensions don't count: CPython 3.12 and later have none.
"""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import fusedpg

_FOLDER = os.path.dirname(fusedpg.__file__) + os.sep
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")

_counted: collections.Counter[str] | None = None
_thread: int | None = None  # whose are counted; None: those of all


def _see(frame: FrameType, event: str, _: object) -> None:
    code, counted = frame.f_code, _counted
    ours = event == "call" and code.co_filename.startswith(_FOLDER)
    ours = ours and _thread in (None, threading.get_ident())
    if counted is not None and ours and code.co_name not in _COMPREHENSIONS:
        counted[f"{code.co_filename.removeprefix(_FOLDER)}:{code.co_name}"] += 1


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Lets ``during`` see this thread, and for good those that are made in this block."""
    threading.setprofile(_see)
    sys.setprofile(_see)
    try:
        yield
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
        sys.setprofile(None)


def during(call: Callable[[], Any], *, alone: bool = False) -> collections.Counter[str]:
    """Frames of a call, by function. ``alone``: other threads' don't count."""
    global _counted, _thread
    counted = _counted = collections.Counter()
    _thread = threading.get_ident() if alone else None
    try:
        call()
    finally:
        _counted = None
    return counted
