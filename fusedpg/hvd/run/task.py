"""A worker of `fusedpg.hvd.run(function)`: reads a function, writes its result."""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

from fusedpg.hvd.run.agent import RESULT_FD_VARIABLE


def _pickler() -> Any:
    """cloudpickle also takes functions of a notebook or of a script that is run."""
    try:
        import cloudpickle
    except ImportError:
        return pickle
    return cloudpickle


def pack(function: object, args: object, kwargs: object) -> bytes:
    """Reads the job from standard input, which comes over the agent's own connection."""
    return pickle.dumps((sys.path, _pickler().dumps((function, args, kwargs))))


def main() -> None:
    path, packed = pickle.load(sys.stdin.buffer)
    # The function's module is found as it is where the job was started.
    sys.path[:] = path
    function, args, kwargs = pickle.loads(packed)
    result = _pickler().dumps(function(*args, **kwargs))
    with os.fdopen(int(os.environ[RESULT_FD_VARIABLE]), "wb") as pipe:
        pipe.write(result)


if __name__ == "__main__":
    main()
