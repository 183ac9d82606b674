"""Locks that a forked child can take, whatever its parent's threads were doing.

A child has only the thread that forked. A lock that another one held is never released there.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def lock() -> threading.Lock:
    """One that is free in a child."""
    made = threading.Lock()
    _locks.add(made)
    return made


def rlock() -> threading.RLock:
    """The same, for a thread that takes it again."""
    made = threading.RLock()
    _locks.add(made)
    return made


def wait_before_fork(lock: Any) -> None:
    """Has forks of other threads wait while a re-entrant lock is held.

    It is for state that a child must not see half changed.
    """
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )


def _free_all() -> None:
    for one in list(_locks):
        one._at_fork_reinit()  # as threading and logging do with theirs


os.register_at_fork(after_in_child=_free_all)
