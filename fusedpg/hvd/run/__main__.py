"""``fusedpg-run``, or ``python -m fusedpg.hvd.run``: horovodrun's command line."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence

from fusedpg.hvd.run import options
from fusedpg.hvd.run.driver import Driver, JobFailed


def check_build() -> int:
    """The text of horovodrun --check-build, for this installation."""
    from fusedpg import __version__

    hvd = importlib.import_module("fusedpg.hvd")

    def box(there: object) -> str:
        return f"    [{'X' if there else ' '}]"

    print(f"fusedpg v{__version__}, with Horovod's API:\n")
    print("Available Frameworks:")
    print(f"{box(False)} TensorFlow\n{box(True)} PyTorch\n{box(False)} MXNet\n")
    print("Available Controllers:")
    print(f"{box(hvd.mpi_built())} MPI\n{box(hvd.gloo_built())} Gloo\n")
    print("Available Tensor Operations:")
    print(f"{box(hvd.nccl_built())} NCCL\n{box(hvd.ddl_built())} DDL\n{box(hvd.ccl_built())} CCL")
    print(f"{box(hvd.mpi_built())} MPI\n{box(hvd.gloo_built())} Gloo")
    return 0


def _terminate(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def main(arguments: Sequence[str] | None = None) -> int:
    settings = options.parse(sys.argv[1:] if arguments is None else arguments, os.environ)
    if settings is None:
        return check_build()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        Driver(settings, os.environ).run()
    except JobFailed as error:
        print(f"fusedpg-run: {error}", file=sys.stderr)
        return error.code
    except ValueError as error:
        print(f"fusedpg-run: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
