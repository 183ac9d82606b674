"""Runs a program that imports Horovod, and is not edited: ``python -m fusedpg.hvd train.py``.

Under torchrun: ``torchrun --nproc-per-node 2 -m fusedpg.hvd train.py``. The program's arguments
follow it; ``-m`` runs a module. Processes that it starts are served, too.
"""

from __future__ import annotations

import os
import runpy
import sys

from fusedpg import hvd
from fusedpg.hvd.served import python_path

_USAGE = "usage: python -m fusedpg.hvd (SCRIPT | -m MODULE) [ARGUMENTS]"


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] in (["-h"], ["--help"]):
        print(_USAGE)
        return
    is_module = arguments[:1] == ["-m"]
    program = arguments[is_module : is_module + 1]
    if not program or program[0].startswith("-"):
        sys.exit(_USAGE)
    os.environ["PYTHONPATH"] = python_path(os.environ)
    hvd.install()
    sys.argv = arguments[is_module:]
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main()
