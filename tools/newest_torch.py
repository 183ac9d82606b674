"""Says whether the package index has a newer minor release of torch than those that fusedpg knows.

    python tools/newest_torch.py    # or make newest-torch; the status is 1 if there is one

What to do then stands in docs/develop/release.md.
"""

from __future__ import annotations

import re
import subprocess
import sys

from fusedpg._registration import minor_release
from fusedpg.optim._torch import KNOWN


def newest(index: str) -> str:
    """The version in what `pip index versions torch` prints."""
    found = re.search(r"^torch \((.+)\)$", index, re.MULTILINE)
    if found is None:
        sys.exit(f"pip index versions torch names no version:\n{index}")
    return found[1]


def verdict(version: str) -> tuple[str, bool]:
    """A sentence, and whether this torch is known."""
    name = "{}.{}".format(*KNOWN[1])
    if minor_release(version) <= KNOWN[1]:
        return f"torch {version} is the newest, and fusedpg knows torch up to {name}", True
    return f"torch {version} is out, and fusedpg knows torch up to {name}", False


def main() -> int:
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    sentence, known = verdict(newest(done.stdout))
    print(sentence)
    return 0 if known else 1


if __name__ == "__main__":
    sys.exit(main())
