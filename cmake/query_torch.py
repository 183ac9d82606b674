"""Print what CMake needs to know about the running Python and a torch.

    python query_torch.py [folder that holds the package torch]

torch is not imported: one of another minor release than this environment's, unpacked without what
it depends on, does too.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
import sysconfig
from pathlib import Path


def torch_folder(path: str) -> Path:
    if path:
        return Path(path).resolve() / "torch"
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise SystemExit("there is no torch in this environment")
    return Path(found.origin).resolve().parent


torch = torch_folder(sys.argv[1] if len(sys.argv) > 1 else "")
if not (torch / "version.py").exists():
    raise SystemExit(f"{torch} is not an installed torch")
about = runpy.run_path(str(torch / "version.py"))
version = str(about["__version__"])
major, minor = version.split(".")[:2]
print(f"FUSEDPG_TORCH_VERSION={version.split('+')[0]}")
print(f"FUSEDPG_TORCH_FULL_VERSION={version}")
print(f"FUSEDPG_TORCH_TAG=pt{major}_{minor}")
print(f"FUSEDPG_TORCH_CUDA={about.get('cuda') or ''}")
print(f"FUSEDPG_PYTHON_INCLUDE_DIR={sysconfig.get_paths()['include']}")
print(f"FUSEDPG_PYTHON_SUFFIX={sysconfig.get_config_var('EXT_SUFFIX')}")
print(f"TORCH_DIR={torch}")
