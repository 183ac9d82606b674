"""The cache's directories, which nobody but this user can change.

Libraries from the cache are loaded into the process: another user who could write to a directory on
the way there, and swap what lies in it, would run code as this one. So every level is opened
relative to the one above it, and checked, and what is in the last one is reached by its descriptor
alone. All files that fusedpg writes to load them later go through this module.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from fusedpg.fusion.errors import FusionError

_LEVEL = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LINKS = 40  # as many as the kernel follows


@contextlib.contextmanager
def directory(configured: str, name: str) -> Iterator[Path]:
    """A directory of the cache, made where there is none.

    The path leads through a descriptor, so it stays the directory that has been checked whatever
    is renamed meanwhile. It ends with the block.

    Raises:
        FusionError: where others could change what lies there, with the level and what to do.
    """
    if not configured:
        raise FusionError("there is no cache directory: set HOME or FUSEDPG_CACHE_DIR")
    descriptor = _opened(os.path.join(configured, name))
    try:
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def content(path: Path) -> bytes | None:
    """What is in a file of such a directory; None without one that is this user's alone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        ours = status.st_uid == os.geteuid() and not status.st_mode & 0o022
        if not ours or not stat.S_ISREG(status.st_mode):
            return None
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _opened(path: str) -> int:
    """A descriptor of a directory that only this user can change, as root can all."""
    waiting = _parts(os.path.join(os.getcwd(), path))
    levels = [(os.open("/", _LEVEL), "/")]
    links = 0
    try:
        _check(*levels[-1])
        while waiting:
            name = waiting.pop()
            above, shown = levels[-1]
            here = os.path.join(shown, name)
            if name == "..":
                if len(levels) > 1:
                    os.close(levels.pop()[0])
                continue
            target = _link(above, name)
            if target is None:
                levels.append((_below(above, name), here))
                _check(*levels[-1])
                continue
            _check_link(above, name, here)
            links += 1
            if links > _LINKS:
                raise FusionError(f"{path}: too many symbolic links")
            waiting += _parts(target)
            while target.startswith("/") and len(levels) > 1:
                os.close(levels.pop()[0])
        descriptor, shown = levels[-1]
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise _refused(shown, "is not this user's alone", status)
        levels.pop()
        return descriptor
    finally:
        for level, _ in levels:
            os.close(level)


def _parts(path: str) -> list[str]:
    """The levels of a path, the last one first."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _link(above: int, name: str) -> str | None:
    """Where a symbolic link leads."""
    try:
        return os.readlink(name, dir_fd=above)
    except OSError:  # there is nothing, or a directory
        return None


def _below(above: int, name: str) -> int:
    try:
        return os.open(name, _LEVEL, dir_fd=above)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=above)
        return os.open(name, _LEVEL, dir_fd=above)


def _check(level: int, shown: str) -> None:
    """Whether others cannot swap what root and this user have in a directory.

    In one with the sticky bit, like /tmp, only its owner and that of an entry can rename that.
    """
    status = os.fstat(level)
    if status.st_uid not in (0, os.geteuid()):
        raise _refused(shown, "belongs to another user", status)
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise _refused(shown, "can be written by other users", status)


def _check_link(above: int, name: str, shown: str) -> None:
    """A link has no mode: it is trusted where nobody else can make one."""
    status = os.stat(name, dir_fd=above, follow_symlinks=False)
    if status.st_uid not in (0, os.geteuid()) or os.fstat(above).st_mode & 0o022:
        raise _refused(shown, "is a symbolic link where other users can make some", status)


def _refused(shown: str, why: str, status: os.stat_result) -> FusionError:
    mode, user = stat.S_IMODE(status.st_mode), os.geteuid()
    return FusionError(
        f"{shown} {why} (owner {status.st_uid}, mode {mode:o}, this user is {user}), so they could "
        "put code there: take their write permission away (chmod go-w), or set FUSEDPG_CACHE_DIR "
        "to a directory that only this user can change"
    )
