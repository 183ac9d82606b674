"""Four processes compile one program; the first that begins is killed. Then its file is damaged."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from fusedpg.fusion import compile as compiling

TEXT = """#include <cstdint>
extern "C" void fusedpg_epilogue_2(const void*, uint64_t, uint64_t) {}
"""


def main(cache: Path) -> None:
    slow = cache / "slow-c++"
    begun = cache / "begun"
    slow.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then exec c++ "$1"; fi\n'
        f'echo x >> {begun}\nsleep 0.5\nexec c++ "$@"\n'
    )
    slow.chmod(0o700)
    os.environ |= {"FUSEDPG_CACHE_DIR": str(cache), "CXX": str(slow)}
    children = []
    for number in range(4):
        pid = os.fork()
        if not pid:
            if number:
                while not begun.exists():  # the first one has the lock
                    time.sleep(0.01)
            os._exit(0 if compiling.function(TEXT, "test") else 1)
        children.append(pid)
    while not begun.exists():
        time.sleep(0.01)
    os.kill(children[0], signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [-signal.SIGKILL, 0, 0, 0], codes
    runs = len(begun.read_text().split())
    assert runs == 2, f"compiled {runs} times"
    fusion = cache / "fusion"
    assert not list(fusion.glob("*.tmp")), list(fusion.iterdir())
    (library,) = fusion.glob("*.so")
    content = library.read_bytes()
    for damaged in (content[:1000], content[:-1] + b"?", b""):
        library.write_bytes(damaged)
        pid = os.fork()
        if not pid:
            os._exit(0 if compiling.function(TEXT, "test") else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert library.read_bytes()[:-32] and compiling._whole(library)
    fusion.chmod(0o777)  # others could put code there
    assert compiling.function(TEXT, "test") == 0


main(Path(sys.argv[1]))
