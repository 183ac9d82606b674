"""What the memory of gradients that were freed costs, and how to keep it."""

from __future__ import annotations

import ctypes

# malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 32 << 20  # glibc maps anew what is larger


def keep_freed_memory() -> bool:
    """Tells glibc's malloc to keep what this process frees, instead of giving it to the system.

    Gradients are freed in every step. What was given back has to come from the kernel again, page
    by page. Call this once in each process, before training. It holds for blocks of up to 32 MiB
    that the main thread allocates, and the process then stays as large as its peak. Other threads
    have heaps of their own, which glibc gives back all the same, unless ``MALLOC_ARENA_MAX=1`` was
    in the environment when the process started. fusedpg never calls this itself.

    Returns:
        Whether ``mallopt`` accepted it: False where the C library is not glibc. A malloc that was
        put in glibc's place (LD_PRELOAD) does not listen.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    never = -1
    return bool(mallopt(_TRIM_THRESHOLD, never) and mallopt(_MMAP_THRESHOLD, _LARGEST))
